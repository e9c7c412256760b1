"""A checkpoint without a contract: what it looks like, what nobody can know about it, and what was said about it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eagle3.errors import Problem
from eagle3.wiring.checkpoint_layers import readings
from eagle3.wiring.contract import CONTRACT_FILE, WiringContract
from eagle3.wiring.layers import check_output_indices, describe_layers
from eagle3.wiring.layouts import Layout
from eagle3.wiring.targets import TargetFacts

_OTHER_UNKNOWNS = "tokenizer, chat template, and whether it was taught from states before or after the final norm"


def no_contract(layout: Layout, facts: TargetFacts | None, layers: Sequence[int] | None, folder: Path) -> list[Problem]:
    """What a checkpoint of another tool does not say, unless the caller says it; kind `checkpoint.no_contract`."""
    missing = [
        *(["which layers it was trained on (--layers)"] if layers is None else []),
        *(["which target it is for (--target)"] if facts is None else []),
    ]
    if not missing:
        return []
    message = f"has no {CONTRACT_FILE}; config.json looks like {layout.tool}. Nothing says {' and '.join(missing)}"
    if facts is not None:
        lines = readings(layout.fields, facts.family, facts.num_hidden_layers)
        message += f". With {facts.name}, " + "; ".join(lines)
    fix = (
        "give --target and --layers (output indices) from whoever trained it, or compare with the running server: "
        f"eagle3 wiring probe --server URL. Still unknown then: {_OTHER_UNKNOWNS}"
    )
    return [Problem(str(folder), "checkpoint.no_contract", message, fix)]


def check_said_layers(contract: WiringContract, layers: Sequence[int], where: str) -> list[Problem]:
    """Layers that the caller says, against the contract; kinds `contract.output_indices`, `layers.*`."""
    if problems := check_output_indices(layers, contract.num_hidden_layers, "layers"):
        return problems
    if tuple(layers) == contract.output_indices:
        return []
    message = f"it was trained on {describe_layers(contract.output_indices)}, not on {describe_layers(layers)}"
    return [Problem(where, "contract.output_indices", message, "leave --layers out: the contract says them")]
