"""`init_from`: a run that starts from the weights of a drafter; what is kept of it, and whether it fits.

Whatever differs between that drafter, the dataset and the config is listed at once, before anything is written. A run
that is resumed has all of it in its own folder, so there the drafter is not read again.

Shapes: D draft vocab, H hidden.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3.config import TrainConfig
from eagle3.draft.config import DraftConfig
from eagle3.draft.model import DraftModel
from eagle3.draft.vocab import DraftVocab
from eagle3.errors import Problem, problem_error, raise_problems
from eagle3.files import readable, refuse_url, sha256_file
from eagle3.serve.given_draft import GivenDraft, read_given
from eagle3.serve.saved_draft import find_checkpoint, load_run, load_run_shape
from eagle3.train.checkpoint import WEIGHTS_FILE, checkpoints_folder, list_checkpoints
from eagle3.train.feed import Dataset
from eagle3.train.warm_checks import contract_problems, foreign_problems, named_problems
from eagle3.wiring.contract import WiringContract
from eagle3.wiring.layers import describe_layers
from eagle3.wiring.targets import CONFIG_FILE

_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class WarmStart:
    """The drafter that a run starts from, or started from.

    Attributes:
        config: its shape.
        vocab: its draft vocab.
        rebuild: the run has a draft vocab of its own, counted anew.
        state: its trained weights, by SGLang's names; None where they are not read: in a plan and a resumed run.
        record: for the run's provenance.
        notes: what a user should know, a line each.
    """

    config: DraftConfig
    vocab: DraftVocab
    rebuild: bool
    state: Mapping[str, Tensor] | None = None
    record: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def shape(self, draft_vocab_size: int) -> DraftConfig:
        """The shape of a drafter that starts from it with so many entries in its draft vocab."""
        return replace(self.config, draft_vocab_size=draft_vocab_size)

    @torch.no_grad()
    def take(self, model: DraftModel, vocab: DraftVocab) -> str:
        """Replaces a new drafter's weights; head rows [H] of target ids that it does not have stay as they are.

        Args:
            model: of `shape(len(vocab))`.
            vocab: the run's draft vocab.

        Returns:
            What became of the head, in words that follow a sentence about the draft vocab; empty if nothing was done.
        """
        if self.state is None:
            return ""
        places = self.vocab.to_draft(vocab.ids)
        kept = places >= 0
        head = model.lm_head.weight.detach().clone()
        head[kept] = self.state[_HEAD][places[kept]].to(head.dtype)
        model.load_trainable_state({**self.state, _HEAD: head})
        count = int(kept.sum())
        self.record["init_from"]["head_rows_kept"] = count
        if not self.rebuild:
            return "; kept as it is"
        return (
            f"; counted anew: {count} of the {len(self.vocab)} rows of the head are kept, {len(vocab) - count} are new"
        )


def find_warm_start(config: TrainConfig, reader: Dataset, values: bool = True) -> WarmStart | None:
    """The drafter of `init_from`, checked; None where there is no such key.

    Args:
        config: the run's.
        reader: the dataset.
        values: read its weights; a plan needs their shapes only.

    Raises:
        ProblemsError: everything that is wrong with the folder (`eagle3.serve.given_draft.read_given`), and everything
            that differs from the dataset and the config: kinds `init.*`, `contract.*`, `layers.*`.
    """
    if config.init_from is None:
        return None
    refuse_url(config.init_from, "a drafter to start from", "download it, and give the folder")
    run = Path(config.output)
    if run.is_dir() and list_checkpoints(run):
        drafter, vocab, _ = load_run_shape(run)
        return WarmStart(drafter, vocab, False, notes=[f"began from {config.init_from}, which is not read again"])
    folder = Path(config.init_from)
    given = _read(folder, values)
    given.add(_problems(config, reader.contract, given, folder))
    raise_problems(given.problems, f"cannot start from {folder}")
    assert given.config is not None and given.vocab is not None
    record = {"init_from": _record(given, folder)} if values else {}
    state = given.state if values else None
    notes = _notes(given, config, folder)
    if (mine := given.config.rms_norm_eps) != (eps := reader.target_config["rms_norm_eps"]):
        notes.append(f"its rms_norm_eps {mine} is kept; the target's is {eps}")
    return WarmStart(given.config, given.vocab, config.rebuild_vocab, state, record, notes)


def _read(folder: Path, values: bool) -> GivenDraft:
    """An exported folder, a run (its best checkpoint) or one of a run's checkpoints."""
    with readable(folder):
        is_folder, is_there = folder.is_dir(), folder.exists()
        is_checkpoint, is_run = (folder / WEIGHTS_FILE).is_file(), checkpoints_folder(folder).is_dir()
        has_config = os.path.lexists(folder / CONFIG_FILE)
    if is_checkpoint:
        place = folder.resolve()
        return _read_run(place.parent.parent, place.name, values)
    if is_run:
        return _read_run(folder, "best", values)
    if has_config:
        return read_given(folder, values)
    message = f"holds no drafter: it has no {CONFIG_FILE}, and is neither a run nor a run's checkpoint"
    if not is_folder:
        message = "is a file, expected the folder that it lies in" if is_there else "no such folder"
    raise problem_error(str(folder), "init.folder", message, "give the folder of an exported drafter, or a run")


def _read_run(run: Path, checkpoint: str, values: bool) -> GivenDraft:
    file = find_checkpoint(run, checkpoint) / WEIGHTS_FILE
    config, vocab, contract = load_run_shape(run)
    given = GivenDraft({}, "eagle3", None, asdict(config), config, vocab, contract, files=[file])
    saved = given.attempt(lambda: load_run(run, file.parent.name)) if values else None
    given.state = {} if saved is None else saved.state
    return given


def _problems(config: TrainConfig, contract: WiringContract, given: GivenDraft, folder: Path) -> Iterable[Problem]:
    if given.contract is not None:
        yield from contract_problems(given.contract, contract, config, folder)
    elif given.shape is not None:
        yield from foreign_problems(given, given.shape, contract, config, folder)
    yield from named_problems(given, config, folder)


def _record(given: GivenDraft, folder: Path) -> dict[str, Any]:
    assert given.vocab is not None
    return {
        "folder": str(folder),
        "written_by": given.tool,
        "weights": {os.path.relpath(file, folder): sha256_file(file) for file in given.files},
        "draft_vocab_digest": given.vocab.digest,
    }


def _notes(given: GivenDraft, config: TrainConfig, folder: Path) -> list[str]:
    notes = [f"starts from the weights in {folder}, which look like those of {given.tool}"]
    if given.contract is None:
        why = "as init_layers says" if config.init_layers else "the only way to read its layer ids"
        notes.append(
            f"they have no contract: taken to be trained on {describe_layers(config.output_indices)}, {why}; "
            "nothing says for which target, tokenizer and chat template, or whether before or after its final norm"
        )
    return notes
