"""The phases of a decode cycle, and what each piece of a trace's work belongs to.

A cycle is what SGLang does between two verifies' results: draft (all steps but the first, and laying out the tree),
verify (its preparation and the target's forward), sampling (which drafts are committed), draft extend (the drafter over
what was committed: its first step), and what the scheduler does before the next cycle.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

DRAFT, VERIFY, SAMPLING, DRAFT_EXTEND = "draft", "verify", "sampling", "draft_extend"
COMMUNICATION, BETWEEN, IDLE, UNATTRIBUTED = "communication", "between", "idle", "unattributed"
PREFILL = "prefill"
PHASES = (DRAFT, VERIFY, SAMPLING, DRAFT_EXTEND)
PARTS = (*PHASES, COMMUNICATION, BETWEEN, IDLE, UNATTRIBUTED)
"""What a cycle's time is split into."""

Method = Literal["ranges", "stack", "graphs"]
METHODS: dict[Method, str] = {
    "ranges": "SGLang's own ranges (draft, step[..VERIFY..], draft_extend)",
    "stack": "the Python frames of SGLang's EAGLE worker",
    "graphs": "the order of CUDA graph launches and the names of the kernels between them",
}


class Label(NamedTuple):
    """What a piece of work belongs to.

    Attributes:
        cycle: by number; None outside of any.
    """

    phase: str
    cycle: int | None


@dataclass
class Found:
    """A cycle that was found.

    Attributes:
        start: when its draft began, on the CPU or GPU.
        batch: requests in it, where the trace says so.
        fate: `whole`; `interrupted` by a prefill; `unfinished`: the trace ends in it; `incomplete`: a phase is missing.
    """

    start: float
    batch: int | None = None
    fate: Literal["whole", "interrupted", "unfinished", "incomplete"] = "unfinished"


@dataclass
class Labelled:
    """A trace whose work was told apart.

    Attributes:
        labels: one for each piece of the trace's work.
        graphs: correlation ids of graph launches.
        notes: what was assumed, in sentences.
    """

    method: Method
    cycles: list[Found]
    labels: list[Label] = field(default_factory=list)
    graphs: set[int] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
