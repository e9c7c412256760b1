"""What an extraction will do, and everything about it that can be refused before the target is loaded: layers, data,
disk space, another run's settings.

Legend: A aux layers, H target hidden, V target vocab.
"""

from __future__ import annotations

import shutil
import sys
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from eagle3.config import ExtractConfig, TargetConfig
from eagle3.data import store_folder
from eagle3.data.chat import PrepareReport, TokenSample, load_tokenizer, special_token_ids
from eagle3.data.chat.sample_file import chosen
from eagle3.data.store_check import is_complete
from eagle3.data.store_format import MANIFEST_FILE, SAMPLE_COUNT
from eagle3.data.store_layout import StoreLayout
from eagle3.errors import Problem, raise_problems
from eagle3.files import existing_folder, size_text
from eagle3.target.engine_choice import resolve_engine
from eagle3.target.head_tensors import find_target_with_head
from eagle3.target.identity import target_contract, target_identity
from eagle3.target.resolve import TargetFiles, find_target
from eagle3.target.shares import Process, this_process
from eagle3.target.source import Source, read_source
from eagle3.wiring.contract import WiringContract
from eagle3.wiring.layers import LayerWiring

_SKIP = "leave it out, or pass data.skip_bad=true"


@dataclass(frozen=True)
class ExtractPlan:
    """All that is known before the target is loaded."""

    cfg: ExtractConfig
    files: TargetFiles
    contract: WiringContract
    settings: dict[str, Any]
    samples: Sequence[TokenSample]
    prepared: PrepareReport

    @property
    def engine(self) -> str:
        """What runs the target, `auto` resolved."""
        return str(self.settings["engine"])

    @property
    def folder(self) -> Path:
        return Path(self.cfg.output)

    @property
    def layout(self) -> StoreLayout:
        """Of the store."""
        return StoreLayout(self.contract, self.cfg.last_hidden_rows)

    @property
    def aux_width(self) -> int:
        return len(self.contract.output_indices) * self.contract.hidden_size

    @cached_property
    def sample_tokens(self) -> list[tuple[str, int]]:
        """Id and tokens of each sample."""
        return [(sample.id, len(sample.input_ids)) for sample in self.samples]

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of each sample in a shard."""
        return [self.layout.tensor_bytes(len(item.input_ids), sum(item.loss_mask)) for item in self.samples]

    @property
    def head_bytes(self) -> int:
        """See `head_bytes`."""
        return head_bytes(self.contract, self.cfg.target)


def head_bytes(contract: WiringContract, target: TargetConfig) -> int:
    """Upper bound of the target's embedding, norm and head, in bytes."""
    values = (2 * contract.vocab_size + 1) * contract.hidden_size
    return values * int(getattr(torch, target.dtype).itemsize)


def make_plan(cfg: ExtractConfig, download: bool = True) -> ExtractPlan:
    """Reads the target's config and the data; loads no weights (`download`: see `find_target`).

    Raises:
        ProblemsError: layers that the target does not have; data that cannot be used.
    """
    store_folder.refuse_url_output(cfg.output)
    find = find_target_with_head if cfg.engine == "sglang" else find_target
    files = find(cfg.target, download=download)
    facts = files.facts
    wiring = LayerWiring(tuple(cfg.output_indices), facts.num_hidden_layers)
    tokenizer = load_tokenizer(str(files.folder), trust_remote_code=cfg.target.trust_remote_code)
    source = read_source(cfg, tokenizer)
    samples = usable_samples(source, files)
    identity = target_identity(files, tokenizer, cfg.target)
    contract = target_contract(files, identity, wiring, cfg.last_hidden_states, cfg.store_dtype)
    settings = {
        "engine": resolve_engine(cfg, files),
        "target": {"weights": identity["weights"], "dtype": identity["dtype"]},
        **source.settings,
        SAMPLE_COUNT: len(samples),
        "keep_ids": [token for token in special_token_ids(tokenizer) if token < facts.vocab_size],
    }
    return ExtractPlan(cfg, files, contract, settings, samples, source.prepared)


def usable_samples(source: Source, files: TargetFiles) -> Sequence[TokenSample]:
    """The samples that this target can read as text; with `data.skip_bad` the others are dropped and counted.

    Raises:
        ProblemsError: without `skip_bad`, each sample that holds a picture's or another vocabulary's ids, or that
            is longer than the target's context.
    """
    usable, problems, prepared = array("Q"), [], source.prepared
    for number, sample in enumerate(source.samples):
        problem = _sample_problem(sample, files)
        if problem is None:
            usable.append(number)
            continue
        problems.append(problem)
        prepared.take_out(sample, problem.kind)
    if not source.skip_bad or not usable:
        raise_problems(problems, f"{len(problems)} of {len(source.samples)} samples cannot be used")
    return source.samples if len(usable) == len(source.samples) else chosen(source.samples, usable)


def _sample_problem(sample: TokenSample, files: TargetFiles) -> Problem | None:
    facts = files.facts
    if media := files.spec.non_text_ids(files.config).intersection(sample.input_ids):
        message = f"holds {sorted(media)}, which stand for pictures or video; only text is extracted"
        return Problem(sample.id, "extract.not_text", message, _SKIP)
    if max(sample.input_ids) >= facts.vocab_size:
        message = f"holds token {max(sample.input_ids)}, the target's vocabulary ends at {facts.vocab_size - 1}"
        return Problem(sample.id, "extract.vocabulary", message, "use the target's own tokenizer")
    if len(sample.input_ids) > facts.context_length:
        message = f"has {len(sample.input_ids)} tokens, the target's context is {facts.context_length}"
        return Problem(sample.id, "extract.too_long", message, f"set data.max_length={facts.context_length}")
    return None


def check_disk(plan: ExtractPlan) -> None:
    """Prints the estimate of tokens and bytes, and refuses what will not fit.

    Raises:
        ProblemsError: kind `extract.disk`; the disk would be fuller than `free_disk_fraction` allows.
    """
    print(plan.prepared, file=sys.stderr)
    estimate, problems = disk_estimate(plan)
    print(estimate, file=sys.stderr)
    raise_problems(problems)


def disk_estimate(plan: ExtractPlan) -> tuple[str, list[Problem]]:
    """What the store takes, in words, and a problem if that does not fit."""
    needed = sum(plan.sizes) + plan.head_bytes
    said = f"estimate: {len(plan.samples):,} samples, {plan.prepared.tokens:,} tokens"
    less = "take fewer conversations (data.limit) or tokens (data.max_length)"
    return room_estimate(plan.folder, said, needed, plan.cfg.free_disk_fraction, less)


def room_estimate(
    folder: Path, said: str, needed: int, free_disk_fraction: float, less: str
) -> tuple[str, list[Problem]]:
    """What a store of `needed` bytes takes beside what is there of it, and a problem if that does not fit.

    Args:
        said: what it will hold, in words.
        less: how to need less, in words.
    """
    missing = max(needed - _bytes_in(folder), 0)
    disk = shutil.disk_usage(existing_folder(folder))
    spare = disk.free - int(free_disk_fraction * disk.total)
    estimate = (
        f"{said}, {size_text(needed)}, of which {size_text(missing)} to be written; "
        f"{size_text(disk.free)} free in {folder}"
    )
    if missing <= spare:
        return estimate, []
    message = (
        f"needs {size_text(missing)} more, {size_text(disk.free)} are free and "
        f"{size_text(disk.free - spare)} must stay free (free_disk_fraction)"
    )
    fix = f"free space, choose another output, or {less}"
    return estimate, [Problem(str(folder), "extract.disk", message, fix)]


def sharing_process(plan: ExtractPlan) -> Process:
    """This process among those that share the work. Tasks of a SLURM array may each be an extraction of their own, so
    they share only what the streamed engine does.

    Raises:
        ProblemsError: as `this_process`.
    """
    process = this_process(plan.cfg.stream)
    own = plan.engine != "streamed" and process.source == "SLURM_ARRAY_TASK_ID"
    return Process() if own else process


def process_problems(plan: ExtractPlan) -> list[Problem]:
    """Why several processes may not run this engine: only the streamed one shares its work.

    Raises:
        ProblemsError: as `this_process`.
    """
    process = sharing_process(plan)
    if plan.engine == "streamed" or process.count == 1:
        return []
    message = f"this is process {process.index} of {process.count}, and engine={plan.engine} takes one process alone"
    return [Problem(process.source, "extract.one_process", message, "pass engine=streamed, or start one process")]


def check_resume(plan: ExtractPlan) -> bool:
    """Refuses another run's store, and a folder that is none, before the target is loaded.

    `StoreWriter` checks again under its lock.

    Returns:
        True if the store is whole and holds every sample already.

    Raises:
        ProblemsError: every difference in contract and settings.
    """
    raise_problems(store_folder.check_output(plan.folder))
    if not (plan.folder / MANIFEST_FILE).exists():
        return False
    manifest = store_folder.check_resume(plan.folder, plan.layout, plan.settings)
    return is_complete(plan.folder, manifest, (name for name, _ in plan.sample_tokens))


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.iterdir() if folder.is_dir() else ():
        with suppress(FileNotFoundError):  # another process gave it its final name
            total += path.stat().st_size if path.is_file() else 0
    return total
