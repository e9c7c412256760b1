"""What the log says of a stretch of training besides its losses: speed, waiting, balance, memory.

Every process measures, since the processes agree on the longest wait; only the main process's numbers are logged.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from eagle3.data.dealing import Window
from eagle3.draft.cost import Cost
from eagle3.train.balance import Imbalance
from eagle3.train.engines.base import Ranks
from eagle3.train.feed import Feed
from eagle3.train.interval import Interval

MUCH_WAITING = 0.1
"""Share of the time spent waiting for data that is worth a line."""
_WORTH_SECONDS = 1.0


class Meter:
    """Measures windows from `begin` to `end`; `take` gives the numbers since the last time.

    Args:
        peak: FLOP/s of a process's card; None where that is not known.
    """

    def __init__(self, feed: Feed, cost: Cost, ranks: Ranks, peak: float | None) -> None:
        self._feed, self._cost, self._ranks, self._peak = feed, cost, ranks, peak
        self._interval, self._imbalance = Interval(), Imbalance()
        self._supervised, self._operations = 0, 0.0
        self._said = 0.0

    def begin(self) -> None:
        self._interval.begin()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts what it encloses as waiting for data."""
        with self._interval.waiting():
            yield

    def end(self, window: Window, rows: Sequence[float]) -> None:
        """A window is done.

        Args:
            rows: [K] terms at each TTT step, over all processes; zeros where nothing was computed.
        """
        work = self._feed.work(window)
        self._interval.end(work.tokens)
        self._imbalance.add(self._feed.loads(window))
        self._supervised += work.supervised
        self._operations += self._cost.needed(work, rows) if any(rows) else 0.0

    def take(self) -> dict[str, Any]:
        """The fields of a `train` record that docs/watching.md lists under speed; call it on every process."""
        waited, slowest = self._longest_wait()
        seconds = self._interval.seconds
        values: dict[str, Any] = self._interval.take(waited)
        values["supervised_tokens_per_second"] = self._supervised / seconds
        peak = None if self._peak is None else self._peak * self._ranks.num_processes * seconds
        values["mfu"] = self._operations / peak if peak else None
        if self._ranks.num_processes > 1:
            values["data_wait_rank"] = slowest
        values["memory_gib"] = peak_memory(self._ranks.device) / 2**30
        self._supervised, self._operations = 0, 0.0
        return values | self._imbalance.take()

    def in_all(self) -> tuple[float, float]:
        """(share of the training time, seconds) spent waiting for data, up to the last `take`."""
        return self._interval.in_all()

    def warning(self, values: dict[str, Any]) -> str:
        """Words for numbers that `take` gave, if training waits for data a lot; not again until it is twice as bad."""
        share = values["data_wait"]
        if share <= max(MUCH_WAITING, 2 * self._said) or self._interval.in_all()[1] < _WORTH_SECONDS:
            return ""
        self._said = share
        whose = f", most of all on rank {values['data_wait_rank']}" if "data_wait_rank" in values else ""
        return (
            f"warning: training waits for data {share:.0%} of its time{whose} ({share * values['seconds']:.1f} of the "
            f"last {values['seconds']:.1f} s); to make it faster: {self._feed.faster} (docs/watching.md)"
        )

    def _longest_wait(self) -> tuple[float, int]:
        """Seconds that the process waited which waited longest, and its rank."""
        mine, ranks = self._interval.waited, self._ranks
        if ranks.num_processes == 1:
            return mine, 0
        waits = torch.zeros(ranks.num_processes, dtype=torch.float64, device=ranks.device)
        waits[ranks.process_index] = mine
        found = ranks.reduce(waits, reduction="sum").tolist()
        return max(found), found.index(max(found))


def peak_memory(device: torch.device) -> int:
    """Bytes that this process took at most so far: of the card as torch gave them out, on a CPU of main memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
