"""Several ranks' traces together: how much of the communication is waiting for another rank.

The ranks run the same kernels in the same order. A collective takes a rank as long as it waits for the last one to
come, and then for the transfer; the last one does not wait, so the shortest time over the ranks is the transfer's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from eagle3.serve.profile.cycles import Cycle
from eagle3.serve.profile.summary import Split


@dataclass(frozen=True)
class Waiting:
    """Milliseconds a cycle, of all pieces of communication (those hidden behind other work too).

    Attributes:
        transfer: that the collectives themselves took.
        wait: that each rank waited besides, in order of the ranks.
        by_phase: mean over the ranks of (transfer, wait).
    """

    transfer: float
    wait: tuple[float, ...]
    by_phase: dict[str, tuple[float, float]]

    @property
    def mean_wait(self) -> float:
        return mean(self.wait)


def waiting(splits: Sequence[Split]) -> Waiting | str:
    """Transfer and wait of several ranks, or why they cannot be told apart."""
    if len(splits) < 2:
        return "one rank's trace does not say how much of it is waiting for another rank"
    if not any(cycle.collectives for split in splits for cycle in split.cycles):
        return "the ranks' traces hold no communication"
    shapes = {tuple(_shape(cycle) for cycle in split.cycles) for split in splits}
    if len(shapes) > 1:
        return "the ranks' traces do not hold the same cycles with the same collectives: waiting cannot be told apart"
    transfer, wait = 0.0, [0.0] * len(splits)
    by_phase: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    count = len(splits[0].cycles)
    for cycles in zip(*(split.cycles for split in splits), strict=True):
        for same in zip(*(cycle.collectives for cycle in cycles), strict=True):
            shortest = min(length for _, _, length in same) / 1000 / count
            transfer += shortest
            by_phase[same[0][0]][0] += shortest
            for rank, (_, _, length) in enumerate(same):
                waited = length / 1000 / count - shortest
                wait[rank] += waited
                by_phase[same[0][0]][1] += waited / len(splits)
    return Waiting(transfer, tuple(wait), {phase: (one, other) for phase, (one, other) in by_phase.items()})


def _shape(cycle: Cycle) -> tuple[tuple[str, str], ...]:
    return tuple((phase, name) for phase, name, _ in cycle.collectives)
