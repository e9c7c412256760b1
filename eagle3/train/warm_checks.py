"""Where the drafter of `init_from` differs from the dataset and from what the config names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from eagle3.config import TrainConfig
from eagle3.draft.config import RopeConfig
from eagle3.errors import Problem
from eagle3.serve.given_draft import GivenDraft
from eagle3.wiring.checkpoint_config import DraftShape
from eagle3.wiring.contract import CONTRACT_FILE, WiringContract
from eagle3.wiring.layers import check_output_indices, compare_layers, describe_layers
from eagle3.wiring.possible_layers import describe_possible, possible_layers
from eagle3.wiring.provenance import check_said_layers
from eagle3.wiring.targets import CONFIG_FILE

_NAMED = (
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "norm_output",
    "fc_norm",
    "norm_before_fc",
)
_LEAVE_OUT = "leave init_layers out: the drafter has a contract, which says them"
_ANOTHER = "start from a drafter that was trained for this target and these layers"


def contract_problems(
    mine: WiringContract, dataset: WiringContract, config: TrainConfig, folder: Path
) -> Iterator[Problem]:
    """Where the drafter's contract is not the dataset's (the states' type may differ), nor what `init_layers` says."""
    yield from mine.compare(dataset, f"init_from {folder}", f"dataset {config.dataset}", any_dtype=True)
    if config.init_layers is not None:
        for problem in check_said_layers(mine, config.init_layers, str(folder / CONTRACT_FILE)):
            said = problem.kind == "contract.output_indices"
            yield replace(problem, where="init_layers", fix=_LEAVE_OUT if said else problem.fix)


def foreign_problems(
    given: GivenDraft, shape: DraftShape, dataset: WiringContract, config: TrainConfig, folder: Path
) -> Iterator[Problem]:
    """Where a drafter without a contract does not fit the dataset; kinds `init.<field>`, `init.layers*`, `layers.*`."""
    where = str(folder / CONFIG_FILE)
    sizes = {
        "hidden_size": (shape.hidden_size, dataset.hidden_size),
        "target_hidden_size": (shape.target_hidden_size, dataset.hidden_size),
        "vocab_size": (shape.vocab_size, dataset.vocab_size),
        "num_aux": (shape.num_aux, len(dataset.output_indices)),
    }
    for name, (has, wanted) in sizes.items():
        if has != wanted and (name != "target_hidden_size" or given.fields.get(name) is not None):
            meaning = "captured layers" if name == "num_aux" else "of the target"
            message = f"{name} is {has}, dataset {config.dataset} has {wanted} ({meaning})"
            yield Problem(where, f"init.{name}", message, _ANOTHER)
    yield from _layer_problems(given, dataset, config.init_layers, where)


def _layer_problems(
    given: GivenDraft, dataset: WiringContract, said: list[int] | None, where: str
) -> Iterator[Problem]:
    """Whether the drafter was trained on the dataset's layers, as far as ids or the user say."""
    stored, number = dataset.output_indices, dataset.num_hidden_layers
    possible = possible_layers(given.fields, dataset.target_family, number)
    dataset_has = f"the dataset holds {describe_layers(stored)}"
    ask = "find out from whoever trained it, and give them as init_layers (output indices)"
    if said is not None:
        if problems := check_output_indices(said, number, "init_layers"):
            yield from problems
            return
        if difference := compare_layers(stored, said):
            message = f"says {describe_layers(said)}, {dataset_has}: in the drafter, {difference[1]}"
            yield Problem("init_layers", "init.layers", message, _ANOTHER)
        if possible and tuple(said) not in possible:
            message = f"says {describe_layers(said)}, which nobody reads from its config.json, but "
            message += describe_possible(possible)
            yield Problem("init_layers", "init.layers", message, "correct init_layers, or the ids in its config.json")
    elif not possible:
        message = f"names no layers of this target, so nothing says which ones it was trained on; {dataset_has}"
        yield Problem(where, "init.layers_unknown", message, ask)
    elif stored not in possible:
        differences = [difference for layers in possible if (difference := compare_layers(stored, layers))]
        words = "; or ".join(dict.fromkeys(difference[1] for difference in differences))
        message = f"its layer ids mean {describe_possible(possible)}; {dataset_has}: in the drafter, {words}"
        yield Problem(where, "init.layers", message, _ANOTHER)
    elif len(possible) > 1:
        message = f"its layer ids can be read in {len(possible)} ways: {describe_possible(possible)}; {dataset_has}"
        fix = f"{ask}: init_layers={list(stored)}, if it was trained on those"
        yield Problem(where, "init.layers_ambiguous", message, fix)


def named_problems(given: GivenDraft, config: TrainConfig, folder: Path) -> Iterator[Problem]:
    """Keys of `draft` that the config names and that the drafter has otherwise; kind `init.shape`."""
    names = [name for name in _NAMED if config.draft.names(name)]
    if config.draft.num_hidden_layers != 1:
        names.append("num_hidden_layers")
    if not config.rebuild_vocab and config.draft.names("draft_vocab_size"):
        names.append("draft_vocab_size")
    found = {name: (getattr(config.draft, name), given.values[name]) for name in names if name in given.values}
    if config.draft.rope is not None and given.config is not None:
        found["rope"] = RopeConfig(**config.draft.rope.model_dump()), given.config.rope
    for name, (named, has) in found.items():
        if named != has:
            more = ", or pass rebuild_vocab=true" if name == "draft_vocab_size" else ""
            message = f"is {named!r}, the drafter in {folder} has {has!r}"
            yield Problem(f"draft.{name}", "init.shape", message, f"leave draft.{name} out: it follows init_from{more}")
