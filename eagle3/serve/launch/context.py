"""How long a sequence will be served, against what the drafter's and the target's config.json allow.

SGLang gives the drafter the target's context and refuses to start where the drafter's is shorter
(`sglang/srt/configs/model_config.py`, `_derive_context_length`), after the target's weights have been read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eagle3.config.launch_schema import LaunchConfig
from eagle3.errors import Problem
from eagle3.wiring.checkpoint_config import OWN_KEY
from eagle3.wiring.layers import is_size
from eagle3.wiring.targets import served_context


@dataclass(frozen=True)
class Context:
    """What was decided.

    Attributes:
        argument: tokens to tell the server; None for its own choice.
        longer: somebody's limit is exceeded, as allowed.
    """

    argument: int | None
    longer: bool = False
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def decide_context(cfg: LaunchConfig, target: int | None, draft: Mapping[str, Any] | None) -> Context:
    """The context to serve.

    Args:
        target: the target's own context, in tokens; None if nobody knows it.
        draft: the drafter's config.json; None without one.
    """
    recorded = _size((draft or {}).get(OWN_KEY, {}), "context_length")
    argument = cfg.context_length if cfg.context_length is not None else recorded
    found = Context(argument)
    if cfg.context_length is None and recorded is not None:
        found.notes.append(f"the drafter was exported for a context of {recorded} tokens")
    served = argument if argument is not None else target
    limits = {}
    if target is not None:
        limits["the target's"] = (target, "set a smaller context_length")
    if draft is not None and _size(draft, "max_position_embeddings") is not None:
        fix = "export it with max_position_embeddings of that length, or set context_length to the drafter's"
        limits["the drafter's"] = (served_context(draft), fix)
    longer = False
    for whose, (limit, fix) in limits.items():
        if served is None or served <= limit:
            continue
        if cfg.allow_longer_context:
            longer = True
            found.notes.append(
                f"{served} tokens are served, {whose} own limit is {limit}: allowed by allow_longer_context"
            )
            continue
        message = f"{served} tokens are to be served, {whose} own limit is {limit}: the server refuses to start"
        fix = f"{fix}, or take it knowingly with allow_longer_context=true"
        found.problems.append(Problem("context_length", "launch.context", message, fix))
    return Context(argument, longer, found.problems, found.notes)


def _size(values: Any, key: str) -> int | None:
    value = values.get(key) if isinstance(values, Mapping) else None
    return value if is_size(value) else None
