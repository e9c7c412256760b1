"""The drafter that is to be tried, held against the target before any weights of either are read.

Shapes: V target vocab, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from eagle3.config import DecodeConfig
from eagle3.draft.config import DraftConfig
from eagle3.draft.model import DraftModel
from eagle3.draft.vocab import DraftVocab
from eagle3.errors import Problem, problem_error, raise_problems
from eagle3.evaluate.checkpoint import load_draft
from eagle3.files import digest_json, sha256_file
from eagle3.serve.given_draft import read_given
from eagle3.serve.saved_draft import find_checkpoint, load_run_shape
from eagle3.target.resolve import TargetFiles
from eagle3.train.checkpoint import WEIGHTS_FILE, checkpoints_folder
from eagle3.wiring.checkpoint_target import compare_shape_with_target, compare_target
from eagle3.wiring.contract import CONTRACT_FILE, WiringContract
from eagle3.wiring.conventions import LAYER_IDS
from eagle3.wiring.layers import LayerWiring, check_output_indices
from eagle3.wiring.targets import CONFIG_FILE
from eagle3.wiring.weights import WEIGHTS_FILE as EXPORTED_WEIGHTS_FILE


@dataclass(frozen=True)
class GivenDrafter:
    """A drafter whose wiring fits the target.

    Attributes:
        output_indices: layers whose outputs it reads.
        digest: of its weights.
        read: gives its trained weights, shape and draft vocab.
    """

    output_indices: tuple[int, ...]
    digest: str
    read: Callable[[], tuple[dict[str, Tensor], DraftConfig, DraftVocab]]

    def model(self, embedding: Tensor) -> tuple[DraftModel, DraftVocab]:
        """The draft model in float32 with the target's embedding [V, H], and its draft vocab."""
        state, config, vocab = self.read()
        model = DraftModel(config)
        model.load_trainable_state(state)
        model.init_from_target(embedding, None, None, vocab)
        return model.eval(), vocab


def find_drafter(cfg: DecodeConfig, files: TargetFiles, identity: Mapping[str, str]) -> GivenDrafter:
    """Reads contract and headers, and compares them with the target.

    Args:
        files: the target's.
        identity: `target_identity` of it.

    Raises:
        ProblemsError: it is no drafter, or was trained for another target, tokenizer or chat template: kinds
            `contract.<field>`, `target.<field>`; a folder without contract whose layers nobody said: `decode.layers`.
    """
    folder = Path(cfg.checkpoint)
    weights, contract = _contract(folder)
    if contract is None:
        return _foreign(cfg, files, folder)
    problems = [*compare_target(contract, files.facts), *_text_problems(contract, identity, folder)]
    if cfg.output_indices is not None and tuple(cfg.output_indices) != contract.output_indices:
        message = f"output_indices is {cfg.output_indices}, its contract says {list(contract.output_indices)}"
        fix = "leave output_indices out: it is for folders without a contract"
        problems.append(Problem(str(folder), "decode.layers", message, fix))
    raise_problems(problems, f"{folder} was not trained for {files.facts.name}")

    def read() -> tuple[dict[str, Tensor], DraftConfig, DraftVocab]:
        draft = load_draft(folder)
        return draft.state, draft.config, draft.vocab

    if not weights.is_file():
        read()  # says what is wrong
    return GivenDrafter(contract.output_indices, sha256_file(weights), read)


def _text_problems(contract: WiringContract, identity: Mapping[str, str], folder: Path) -> Iterator[Problem]:
    """Where the target's token ids or prompts are not those that the drafter learned; kinds `contract.<field>`."""
    for name in ("tokenizer", "chat_template"):
        said = getattr(contract, f"{name}_digest")
        if said != identity[name]:
            message = f"{name}_digest is {said!r}, the target's {identity[name]!r}"
            fix = f"give the {name.replace('_', ' ')} that the drafter was trained with, or train it anew"
            yield Problem(f"checkpoint {folder}", f"contract.{name}_digest", message, fix)


def _contract(folder: Path) -> tuple[Path, WiringContract | None]:
    """The file of weights and the contract of one of our folders; without one, it is another tool's."""
    if (folder / WEIGHTS_FILE).is_file():
        run = folder.resolve().parent.parent
        return folder / WEIGHTS_FILE, load_run_shape(run)[2]
    if checkpoints_folder(folder).is_dir():
        return find_checkpoint(folder, "best") / WEIGHTS_FILE, load_run_shape(folder)[2]
    if (folder / CONTRACT_FILE).is_file():
        return folder / EXPORTED_WEIGHTS_FILE, WiringContract.load(folder)
    if (folder / CONFIG_FILE).is_file():
        return folder, None
    message = "is neither a run, nor a run's checkpoint, nor an exported folder"
    raise problem_error(str(folder), "evaluate.checkpoint", message, "check the path")


def _foreign(cfg: DecodeConfig, files: TargetFiles, folder: Path) -> GivenDrafter:
    given = read_given(folder, values=False)
    problems = list(given.problems)
    if given.shape is not None:
        problems += compare_shape_with_target(given.shape, files.facts, str(folder / CONFIG_FILE))
    depth = files.facts.num_hidden_layers
    if cfg.output_indices is None:
        said = given.fields.get("eagle_config") or {}
        ids = said.get(LAYER_IDS) if isinstance(said, dict) else None
        message = f"{given.tool} wrote it: nothing says which layers it was trained on (config.json: {ids or 'no ids'})"
        fix = "give output_indices=[...] in output indices; `eagle3 wiring explain` says what each engine calls them"
        problems.append(Problem(str(folder), "decode.layers", message, fix))
    else:
        problems += check_output_indices(cfg.output_indices, depth, "output_indices")
        if given.shape is not None and len(cfg.output_indices) != given.shape.num_aux:
            message = f"names {len(cfg.output_indices)} layers, the drafter reads {given.shape.num_aux}"
            problems.append(Problem("output_indices", "decode.layers", message, "give as many"))
    raise_problems(problems, f"cannot decode with {folder}")
    assert cfg.output_indices is not None
    wiring = LayerWiring(tuple(cfg.output_indices), depth)

    def read() -> tuple[dict[str, Tensor], DraftConfig, DraftVocab]:
        whole = read_given(folder, values=True)
        raise_problems(whole.problems, f"cannot decode with {folder}")
        assert whole.config is not None and whole.vocab is not None
        return whole.state, whole.config, whole.vocab

    digest = digest_json([sha256_file(path) for path in given.files])
    return GivenDrafter(wiring.output_indices, digest, read)
