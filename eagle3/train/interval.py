"""Where training's time goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Interval:
    """Tokens, training time and time spent waiting for data, since the last log line and in all."""

    def __init__(self) -> None:
        self.tokens, self.seconds, self.waited = 0, 0.0, 0.0
        self._all_seconds = self._all_waited = 0.0
        self._started = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts what it encloses as waiting."""
        begin = time.monotonic()
        yield
        self.waited += time.monotonic() - begin

    def in_all(self) -> tuple[float, float]:
        """(share of the training time, seconds) spent waiting, over all intervals that were taken."""
        return self._all_waited / self._all_seconds if self._all_seconds else 0.0, self._all_waited

    def begin(self) -> None:
        self._started = time.monotonic()

    def end(self, tokens: int) -> None:
        self.seconds += time.monotonic() - self._started
        self.tokens += tokens

    def take(self, waited: float | None = None) -> dict[str, float]:
        """`tokens_per_second`, `seconds` and `data_wait` (a share) of the interval, which starts anew.

        Args:
            waited: seconds that were waited, if not this process's.
        """
        waited = self.waited if waited is None else waited
        share = waited / self.seconds
        values = {"tokens_per_second": self.tokens / self.seconds, "seconds": self.seconds, "data_wait": share}
        self._all_seconds += self.seconds
        self._all_waited += waited
        self.tokens, self.seconds, self.waited = 0, 0.0, 0.0
        return values
