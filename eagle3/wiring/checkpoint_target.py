"""A draft checkpoint against the target model that it is to be served with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle3.errors import Problem
from eagle3.wiring.checkpoint_config import OWN_KEY, DraftShape
from eagle3.wiring.contract import WiringContract
from eagle3.wiring.targets import TargetFacts, served_context


def compare_target(contract: WiringContract, facts: TargetFacts) -> list[Problem]:
    """Where the target is not the one that the checkpoint was made for; kinds `target.<field>`.

    A known target's name has no config digest to compare: give the folder for that.
    """
    fields = {
        "family": (contract.target_family, facts.family),
        "num_hidden_layers": (contract.num_hidden_layers, facts.num_hidden_layers),
        "hidden_size": (contract.hidden_size, facts.hidden_size),
        "vocab_size": (contract.vocab_size, facts.vocab_size),
        "config_digest": (contract.target_config_digest, facts.config_digest),
    }
    return [
        Problem(
            f"target {facts.name}",
            f"target.{name}",
            f"{name} is {has!r}, the checkpoint was made for {contract.target_name} with {said!r}",
            f"serve it with {contract.target_name}, or train a drafter for {facts.name}",
        )
        for name, (said, has) in fields.items()
        if has is not None and said != has
    ]


def compare_shape_with_target(shape: DraftShape, facts: TargetFacts, where: str) -> list[Problem]:
    """Where a checkpoint without a contract does not fit the target; kinds `target.<field>`."""
    fields = {
        "hidden_size": (shape.target_hidden_size, facts.hidden_size),
        "vocab_size": (shape.vocab_size, facts.vocab_size),
    }
    return [
        Problem(
            where,
            f"target.{name}",
            f"config.json means a target with {name} {said}, {facts.name} has {has}",
            "serve it with the target that it was trained for",
        )
        for name, (said, has) in fields.items()
        if said != has
    ]


def compare_shape(contract: WiringContract, shape: DraftShape, draft_vocab: str | None, where: str) -> list[Problem]:
    """Where config.json or the draft vocab in the weights is not what the contract says; kinds `contract.<field>`."""
    fields = {
        "hidden_size": (contract.hidden_size, shape.target_hidden_size),
        "vocab_size": (contract.vocab_size, shape.vocab_size),
        "draft_vocab_digest": (contract.draft_vocab_digest, draft_vocab),
    }
    return [
        Problem(
            where,
            f"contract.{name}",
            f"{name} is {has!r} in the checkpoint, {said!r} in its contract",
            "export it again from the run that the contract belongs to",
        )
        for name, (said, has) in fields.items()
        if has is not None and said != has
    ]


def check_context(config: Mapping[str, Any], target_context: int | None, where: str) -> list[Problem]:
    """A context shorter than what the checkpoint is served with, which SGLang refuses at start.

    That is the `context_length` that config.json's own key records, else the target's (in tokens; None if nobody
    knows it). Kind `context.too_short`. Call it only where `check_config` found nothing.
    """
    needed = config.get(OWN_KEY, {}).get("context_length") or target_context
    length = served_context(config)
    if needed is None or length >= needed:
        return []
    message = f"the drafter's context is {length} tokens, it is to be served with {needed}: SGLang refuses to start"
    fix = f"set max_position_embeddings to {needed}, or serve with --context-length {length} and record that"
    return [Problem(where, "context.too_short", message, fix)]
