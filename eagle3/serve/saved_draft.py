"""A trained drafter read from disk: from a run's checkpoint, or from an exported folder.

Either way its weights, shape, draft vocab and wiring contract must agree with each other.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from safetensors.torch import load_file
from torch import Tensor

from eagle3.config import TrainConfig, load_config
from eagle3.draft.config import DraftConfig
from eagle3.draft.model import DraftModel
from eagle3.draft.vocab import DraftVocab
from eagle3.errors import Problem, problem_error, raise_problems
from eagle3.files import read_json_object
from eagle3.serve.adapter import check_tensors, from_exported, trained_shapes
from eagle3.serve.draft_config import draft_config_from_exported
from eagle3.train.checkpoint import WEIGHTS_FILE, checkpoints_folder, list_checkpoints, load_state
from eagle3.wiring.checkpoint_tensors import WEIGHTS_FILE as EXPORTED_WEIGHTS_FILE
from eagle3.wiring.checks import check_checkpoint
from eagle3.wiring.contract import WiringContract
from eagle3.wiring.safetensors_header import read_header
from eagle3.wiring.targets import CONFIG_FILE


class SavedDraft(NamedTuple):
    """A drafter without its embedding, which is the target's.

    Attributes:
        state: the trained weights, by SGLang's names (`DraftModel.load_trainable_state` reads them).
    """

    state: dict[str, Tensor]
    config: DraftConfig
    vocab: DraftVocab
    contract: WiringContract

    def model(self, embedding: Tensor) -> DraftModel:
        """The draft model in float32, with the target's embedding [V, H]."""
        model = DraftModel(self.config)
        model.load_trainable_state(self.state)
        model.init_from_target(embedding, None, None, self.vocab)
        return model.eval()


def load_exported(folder: Path | str) -> SavedDraft:
    """Reads an exported folder, strictly.

    Raises:
        ProblemsError: whatever `check_checkpoint` finds for the version it was exported for; a config that we would
            not write; a tensor that is not finite.
    """
    folder = Path(folder)
    raise_problems(check_checkpoint(folder, cuda_graphs=False))
    config_file, model_file = folder / CONFIG_FILE, folder / EXPORTED_WEIGHTS_FILE
    config = draft_config_from_exported(read_json_object(config_file, "the config of an export"), str(config_file))
    contract = WiringContract.load(folder)
    state, vocab = from_exported(read_tensors(model_file), config, str(model_file))
    return SavedDraft(state, config, vocab, contract)


def load_run(run: Path, checkpoint: str = "best") -> SavedDraft:
    """Reads one checkpoint of a run; see `find_checkpoint`.

    Raises:
        ProblemsError: no such checkpoint, or anything that is missing, extra, mis-shaped, not finite or in
            disagreement.
    """
    folder = find_checkpoint(run, checkpoint)
    config, vocab, contract = load_run_shape(run)
    load_state(folder)
    state = read_tensors(folder / WEIGHTS_FILE)
    problems = check_tensors(state, trained_shapes(config), str(folder / WEIGHTS_FILE))
    raise_problems([*problems, *_disagreements(config, vocab, contract, str(run))])
    return SavedDraft(state, config, vocab, contract)


def load_run_shape(run: Path) -> tuple[DraftConfig, DraftVocab, WiringContract]:
    """What a run trains: shape, draft vocab and contract; whether they agree is not checked.

    Raises:
        ProblemsError: a file is missing or damaged.
    """
    config = DraftConfig.from_dict(read_json_object(run / "draft_config.json", "the draft config of a run"))
    contract = WiringContract.load(run)
    vocab_file = run / "draft_vocab.safetensors"
    tables = read_tensors(vocab_file)
    if tables.keys() != {"d2t", "t2d"}:
        message = f"holds {sorted(tables)}, expected d2t and t2d"
        raise problem_error(str(vocab_file), "draft_vocab.tables", message, "train again, or restore the file")
    return config, DraftVocab.from_tables(tables["d2t"], tables["t2d"], str(vocab_file)), contract


def find_checkpoint(run: Path, checkpoint: str) -> Path:
    """The folder of a run's `best` or `last` checkpoint, or of the one with that name.

    Raises:
        ProblemsError: kind `run.checkpoint`, naming those that are there; `file.missing` without a best one.
    """
    if not run.is_dir():
        raise problem_error(str(run), "run.checkpoint", "no such folder", "give a run folder")
    found = list_checkpoints(run)
    name = checkpoint
    if checkpoint == "best" and found:
        name = str(read_json_object(run / "best.json", "which checkpoint is best; `last` needs none").get("checkpoint"))
    elif checkpoint == "last" and found:
        name = found[-1].name
    folder = checkpoints_folder(run) / name
    if folder not in found:
        have = ", ".join(path.name for path in found) or "none"
        message = f"has no checkpoint {name!r}, only: {have}"
        raise problem_error(str(run), "run.checkpoint", message, "give a run folder, and best, last or one of these")
    return folder


def train_config(run: Path) -> TrainConfig:
    """The config a run was trained with."""
    return load_config(TrainConfig, run / "config.yaml")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file that is whole; see `read_header` for what is refused."""
    read_header(path)
    return load_file(path)


def _disagreements(config: DraftConfig, vocab: DraftVocab, contract: WiringContract, where: str) -> list[Problem]:
    """Where the parts of one drafter contradict each other; kind `draft.disagreement`."""
    pairs = {
        "hidden_size": (config.hidden_size, contract.hidden_size),
        "vocab_size": (config.vocab_size, contract.vocab_size),
        "aux layers": (config.num_aux, len(contract.output_indices)),
        "draft vocab": (vocab.digest, contract.draft_vocab_digest),
    }
    problems = [
        Problem(where, "draft.disagreement", f"{name}: {mine} here, {theirs} in the contract", "do not mix folders")
        for name, (mine, theirs) in pairs.items()
        if mine != theirs
    ]
    if (len(vocab), vocab.vocab_size) != (config.draft_vocab_size, config.vocab_size):
        message = f"draft vocab is {len(vocab)} of {vocab.vocab_size}, config: {config.draft_vocab_size} of "
        message += str(config.vocab_size)
        problems.append(Problem(where, "draft.disagreement", message, "do not mix folders"))
    return problems
