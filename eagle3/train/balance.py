"""How evenly work is spread over processes: what a run says of it at its start, and what its log does.

The slowest process sets the pace of a window, so what counts is the busiest one's share over the mean's, both summed
over windows. One process has nobody to wait for, and nothing is said.
"""

from __future__ import annotations

from collections.abc import Sequence

from eagle3.data.dealing import Window
from eagle3.train.feed import Feed


class Imbalance:
    """What the busiest process had to do over what one has in the mean, since the last line."""

    def __init__(self) -> None:
        self._processes = 1
        self._begin()

    def add(self, loads: Sequence[int]) -> None:
        """A window.

        Args:
            loads: of each process.
        """
        self._processes = len(loads)
        self._busiest += max(loads)
        self._all += sum(loads)

    @property
    def value(self) -> float:
        """1 where all have as much; the number of processes where one has everything."""
        return self._busiest * self._processes / self._all

    def take(self) -> dict[str, float]:
        """`imbalance` of the windows since the last call, which starts anew; nothing of a single process."""
        values = {"imbalance": self.value} if self._processes > 1 and self._all else {}
        self._begin()
        return values

    def _begin(self) -> None:
        self._busiest = self._all = 0


def balance_notes(feed: Feed) -> list[str]:
    """A line on the first epoch, or none."""
    windows = feed.epoch(0)
    processes = len(windows[0][0])
    if processes == 1:
        return []
    dealt, in_order = (_imbalance(feed, epoch) - 1 for epoch in (windows, feed.epoch_in_order(0)))
    return [
        f"balance: over {len(windows):,} windows the busiest of {processes} processes has {dealt:.1%} more to do than "
        f"the mean ({in_order:.1%} if dealt in order)"
    ]


def _imbalance(feed: Feed, windows: Sequence[Window]) -> float:
    found = Imbalance()
    for window in windows:
        found.add(feed.loads(window))
    return found.value
