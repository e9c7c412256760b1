"""What an import will do, and everything about it that can be refused before the target is loaded: the dump's files,
one by one, layers, masks, types, disk space, another run's store.

Legend: A aux layers, H target hidden.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from eagle3.config import ImportConfig
from eagle3.data import store_folder
from eagle3.data.chat import load_tokenizer, special_token_ids
from eagle3.data.imports.folder import Dump, check_places, find_dump, warn_of_locks
from eagle3.data.imports.masks import Masks, open_masks
from eagle3.data.imports.sample import Expected, RawSample
from eagle3.data.imports.scan import NOT_SUPERVISED, Scan, read_sample, scan_dump, tokens_digest
from eagle3.data.store_check import check_shard
from eagle3.data.store_format import MANIFEST_FILE, SAMPLE_COUNT, Manifest, load_manifest
from eagle3.data.store_layout import StoreLayout
from eagle3.errors import Problem, ProblemsError, problem_error, raise_problems
from eagle3.target.head_tensors import check_head_tensors, find_target_with_head
from eagle3.target.identity import target_contract, target_identity
from eagle3.target.plan import head_bytes, room_estimate
from eagle3.target.resolve import TargetFiles, find_target
from eagle3.wiring.contract import WiringContract
from eagle3.wiring.diagnosis import ROUNDING
from eagle3.wiring.engines import output_indices_of
from eagle3.wiring.layers import LayerWiring, describe_layers

IMPORTED = "imported"
"""Key of a store's settings that says which samples it was made of."""


@dataclass(frozen=True)
class ImportPlan:
    """All that is known before the target is loaded; see `StorePlan`."""

    cfg: ImportConfig
    files: TargetFiles
    dump: Dump
    masks: Masks
    expected: Expected
    scan: Scan
    contract: WiringContract
    settings: dict[str, Any]

    @property
    def folder(self) -> Path:
        return Path(self.cfg.output)

    @property
    def layout(self) -> StoreLayout:
        """What its shards will hold."""
        return StoreLayout(self.contract, self.cfg.last_hidden_rows)

    @cached_property
    def sample_tokens(self) -> list[tuple[str, int]]:
        """Id and tokens of each sample."""
        return [(sample.name, sample.tokens) for sample in self.scan.found]

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of each sample in a shard."""
        return [self.layout.tensor_bytes(sample.tokens, sample.supervised) for sample in self.scan.found]

    def read(self, index: int) -> RawSample:
        """Sample `index` from its file.

        Raises:
            ProblemsError: it changed since it was checked; kind `import.changed` if it is a good one still.
        """
        found = self.scan.found[index]
        raw = read_sample(self.dump, self.masks, self.expected, found.name)
        if tokens_digest(raw) != found.digest or raw.aux_hidden_states.dtype != found.dtype:
            message = "holds other token ids, another mask or type than when it was checked"
            fix = "import again when nothing writes to the dump any more"
            raise problem_error(str(self.dump.folder / found.name), "import.changed", message, fix)
        return raw


def make_import_plan(cfg: ImportConfig) -> ImportPlan:
    """Reads the target's config and every file of the dump; loads no weights.

    Raises:
        ProblemsError: layers that the target does not have; an output that is something else; without `skip_bad`, every
            sample that cannot be imported; none with a supervised token; states of several types.
    """
    source, output = Path(cfg.source), Path(cfg.output)
    dump, _ = _all_of(
        lambda: find_dump(source, cfg.format),
        lambda: raise_problems([*check_places(source, output), *store_folder.check_output(output)]),
    )
    files = (find_target if cfg.probe else find_target_with_head)(cfg.target)
    facts = files.facts
    wiring, masks, _ = _all_of(
        lambda: _wiring(cfg, files),
        lambda: open_masks(cfg.loss_mask),
        lambda: check_head_tensors(files, cfg.target),
    )
    tokenizer = load_tokenizer(str(files.folder), trust_remote_code=cfg.target.trust_remote_code)
    identity = target_identity(files, tokenizer, cfg.target)
    begun = load_manifest(output) if (output / MANIFEST_FILE).exists() else None
    dtype = cfg.store_dtype or (begun.contract.dtype if begun else "bfloat16")
    contract = target_contract(files, identity, wiring, cfg.last_hidden_states, dtype)
    expected = Expected(
        num_aux=wiring.num_aux,
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        context_length=facts.context_length,
        non_text_ids=files.spec.non_text_ids(files.config),
    )
    layers = describe_layers(wiring.output_indices)
    said = f"{len(dump.names):,} files of {dump.format.maker}: {layers}, {cfg.last_hidden_states} last hidden states"
    print(f"{cfg.source}: {said}", file=sys.stderr)
    known = set() if begun is None else _begun_samples(begun, contract, output)
    store_dtype = StoreLayout(contract).dtype if cfg.store_dtype else None
    scan = _usable(cfg, dump, masks, expected, known, store_dtype)
    contract = replace(contract, dtype=_dtype(cfg, scan))
    settings = {
        "target": {"weights": identity["weights"], "dtype": identity["dtype"]},
        IMPORTED: {"format": dump.format.name, "samples": scan.digest},
        SAMPLE_COUNT: len(scan.found),
        "keep_ids": [token for token in special_token_ids(tokenizer) if token < facts.vocab_size],
    }
    return ImportPlan(cfg, files, dump, masks, expected, scan, contract, settings)


def check_room(plan: ImportPlan) -> None:
    """Prints the estimate of tokens and bytes, and refuses what will not fit.

    Raises:
        ProblemsError: kind `extract.disk`.
    """
    needed = sum(plan.sizes) + head_bytes(plan.contract, plan.cfg.target)
    said = f"estimate: {len(plan.scan.found):,} samples, {plan.scan.tokens:,} tokens"
    less = "import a part of the dump, or a narrower store_dtype"
    estimate, problems = room_estimate(plan.folder, said, needed, plan.cfg.free_disk_fraction, less)
    print(plan.scan, estimate, sep="\n", file=sys.stderr)
    raise_problems(problems)


def begun_manifest(plan: ImportPlan) -> Manifest | None:
    """The manifest of the import that is to go on; None if it is to begin.

    Raises:
        ProblemsError: the store is another run's; every difference.
    """
    if not (plan.folder / MANIFEST_FILE).exists():
        return None
    return store_folder.check_resume(plan.folder, plan.layout, plan.settings)


def keeps_fingerprint(plan: ImportPlan, manifest: Manifest) -> bool:
    """Whether the shard that the store's fingerprint is of is whole; else both are made anew."""
    sample = manifest.fingerprint.sample if manifest.fingerprint is not None else None
    holding = [shard for shard in manifest.shards if sample in {item.id for item in shard.samples}]
    return any(not check_shard(plan.folder, shard, manifest.layout) for shard in holding)


def _wiring(cfg: ImportConfig, files: TargetFiles) -> LayerWiring:
    facts = files.facts
    indices = output_indices_of(cfg.layers, cfg.numbering, facts.num_hidden_layers, facts.family, cfg.sglang_version)
    return LayerWiring(indices, facts.num_hidden_layers)


def _begun_samples(begun: Manifest, contract: WiringContract, output: Path) -> set[str]:
    """Samples of the store that is there, whose states need not be looked at again; refuses a store of another contract
    before the dump is read.

    Raises:
        ProblemsError: every difference; kind `store.other_settings` if no import made it.
    """
    problems = begun.contract.compare(contract, str(output), "this import")
    if IMPORTED not in begun.settings:
        message = "this store was not imported: something else began it"
        problems.append(Problem(str(output), "store.other_settings", message, "use another output"))
    raise_problems(problems, f"cannot go on with {output}")
    return {sample.id for shard in begun.shards for sample in shard.samples}


def _usable(
    cfg: ImportConfig, dump: Dump, masks: Masks, expected: Expected, known: set[str], store_dtype: torch.dtype | None
) -> Scan:
    warn_of_locks(dump)
    scan = scan_dump(dump, masks, expected, store_dtype, known.__contains__, cfg.workers)
    problems, total = list(scan.problems), len(dump.names)
    blank = scan.left_out[NOT_SUPERVISED]
    if blank and not scan.found:
        message = f"{blank:,} of its {total:,} samples can be imported, and none of these has a supervised token"
        fix = "check the loss masks: pass loss_mask=all, or the file or folder that has the right ones (docs/import.md)"
        problems.append(Problem(cfg.source, "import.nothing_supervised", message, fix))
    if problems and (not cfg.skip_bad or not scan.found):
        bad = scan.left_out.total() - blank
        raise ProblemsError(problems, f"{bad:,} of {total:,} samples cannot be imported" if bad else None)
    for problem in scan.problems:
        print(f"left out: {problem}", file=sys.stderr)
    return scan


def _dtype(cfg: ImportConfig, scan: Scan) -> str:
    """Type of the store: what the config says, else the files' own.

    Raises:
        ProblemsError: kind `import.several_dtypes`.
    """
    types = scan.dtypes
    if cfg.store_dtype is None and len(types) > 1:
        said = ", ".join(f"{count:,} {name} (e.g. {_example(scan, name)})" for name, count in types.most_common())
        message = f"the states are of several types: {said}"
        raise problem_error(cfg.source, "import.several_dtypes", message, "say with store_dtype what to make of them")
    chosen: str = next(iter(types)) if cfg.store_dtype is None else cfg.store_dtype
    for name, count in types.items():
        if ROUNDING[name] < ROUNDING[chosen]:
            print(f"note: {count:,} samples of {name} states are rounded to {chosen} (store_dtype)", file=sys.stderr)
    return chosen


def _example(scan: Scan, dtype: str) -> str:
    return next(sample.name for sample in scan.found if str(sample.dtype) == f"torch.{dtype}")


def _all_of(*steps: Callable[[], Any]) -> list[Any]:
    """Does all of these and gives their results; raises the problems of all."""
    results: list[Any] = []
    problems: list[Problem] = []
    for step in steps:
        try:
            results.append(step())
        except ProblemsError as error:
            problems += error.problems
    raise_problems(problems)
    return results
