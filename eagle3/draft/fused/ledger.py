"""A ledger of device memory: what lives in which phase of a training step, in bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

Phase = Literal["count", "fuse", "share", "forward", "head", "backward", "sums", "finish", "autograd", "update"]
"""Of one micro-batch and the optimiser's step after it, in order.

`count`: its terms are counted and its teacher is read. `fuse`: step 0's states and the embeddings. `share`: what chunks
share. `forward`, `head`, `backward`, `sums`: of a chunk, its steps forward, the head with the loss, its steps backward,
the weights' gradients of all its rows. `finish`: backward through what chunks share. `autograd`: backward through `fc`,
and gradients are handed out. `update`: clipping and the optimiser.
"""
PHASES: tuple[Phase, ...] = get_args(Phase)
Group = Literal["weights", "gradients", "moments", "target head", "batch", "teacher", "activations", "workspace"]
GROUPS: tuple[Group, ...] = get_args(Group)


def span(first: Phase, last: Phase) -> tuple[Phase, ...]:
    """The phases from one to another, both included."""
    return PHASES[PHASES.index(first) : PHASES.index(last) + 1]


@dataclass(frozen=True)
class Entry:
    """Something that takes memory.

    Attributes:
        group: what it is counted as.
        name: what it is.
        size: bytes.
        phases: in which it lives.
    """

    group: Group
    name: str
    size: int
    phases: tuple[Phase, ...] = PHASES


@dataclass(frozen=True)
class Ledger:
    """The entries of one micro-batch."""

    entries: tuple[Entry, ...]

    def __add__(self, more: Iterable[Entry]) -> Ledger:
        return Ledger((*self.entries, *more))

    def at(self, phase: Phase) -> int:
        """Bytes that live in a phase."""
        return sum(entry.size for entry in self.entries if phase in entry.phases)

    @property
    def phase(self) -> Phase:
        """The phase of the peak."""
        return max(PHASES, key=self.at)

    @property
    def peak(self) -> int:
        """Bytes in that phase."""
        return self.at(self.phase)

    def groups(self, phase: Phase) -> Counter[Group]:
        """Bytes of each group in a phase."""
        found: Counter[Group] = Counter()
        for entry in self.entries:
            if phase in entry.phases:
                found[entry.group] += entry.size
        return found
