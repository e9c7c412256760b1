"""Says in words when a step takes much longer than usual: which process is behind, and what it is doing.

The training only notes what it begins; a thread of each process looks at that. The first rank that shows signs of life
speaks. A process that was stopped as a whole (SIGSTOP, a machine that froze) is silent, which the others notice.
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from eagle3.train.engines.base import Ranks
from eagle3.train.pulse import Heard, Place, Pulse

READING, COMPUTING, WAITING = "reading data", "computing", "waiting for the other ranks"
EVALUATING, SAVING = "evaluating", "saving a checkpoint"

TIMES_USUAL = 10.0
"""How much longer than usual something takes before it is worth words; the first time, than `stall_seconds`."""
_REMEMBERED = 100
_NAMED = 8
_LONGEST_PERIOD = 5.0


class Watch:
    """Watches over one process's training. A context manager: it watches while the block runs.

    Args:
        stall_seconds: nothing shorter is worth words.
        store: the processes' store, on a connection of its own; None of a single process.

    Attributes:
        step: the one at work, from 1.
    """

    def __init__(self, ranks: Ranks, stall_seconds: float, store: Any = None) -> None:
        self._rank, self._ranks, self._least = ranks.process_index, ranks.num_processes, stall_seconds
        self._period = min(stall_seconds / 8, _LONGEST_PERIOD)
        self._stack: list[tuple[str, float]] = []
        self._usual: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._pulse = None if store is None else Pulse(self._rank, store, self._place, self._period)
        self.step = 0

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """What the training does within."""
        begin = time.monotonic()
        self._stack = [*self._stack, (what, begin)]
        try:
            yield
        finally:
            self._stack = self._stack[:-1]
            if not self._stack:
                self._usual[what].append(time.monotonic() - begin)

    def __enter__(self) -> Watch:
        self._thread.start()
        if self._pulse is not None:
            self._pulse.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join(2 * self._period)
        if self._pulse is not None:
            self._pulse.close()

    def _place(self) -> Place:
        stack = self._stack
        doing, since = stack[-1] if stack else ("between two steps", time.monotonic())
        return Place(self.step, doing, doing == WAITING, time.monotonic() - since)

    def _run(self) -> None:
        try:
            self._look()
        except Exception as error:  # noqa: BLE001 (training must not end for this)
            _say(f"the watch over stalls ended, training goes on without: {type(error).__name__}: {error}")

    def _look(self) -> None:
        """Every period: how long has what is at work been so, this process's own standstills aside?"""
        last, paused, said, current = time.monotonic(), 0.0, 0.0, None
        while not self._stop.wait(self._period):
            now, stack = time.monotonic(), self._stack
            gap, last = now - last - self._period, now
            top = stack[0] if stack else None
            if top != current:
                self._end(current, said)
                current, paused, said = top, 0.0, 0.0
            if top is None:
                continue
            if gap > max(self._least / 2, 2 * self._period):
                _say(f"rank {self._rank} itself stood still for {gap:.0f} s: it was stopped, or got no processor")
                paused += gap
            elapsed, limit = now - top[1] - paused, self._limit(top[0])
            if elapsed <= limit / 2:
                if self._pulse is not None:
                    self._pulse.listen(())
                continue
            heard = self._listen()
            if heard is not None and elapsed > max(limit, 2 * said):
                said = elapsed
                about = f"{top[0]} for {elapsed:.0f} s in step {self.step}{self._usually(top[0])}"
                _say(f"stalled: rank {self._rank} has been {about}; {self._explain(heard)}")

        if self._stack[:1] != [current]:
            self._end(current, said)

    def _end(self, stalled: tuple[str, float] | None, said: float) -> None:
        """What a stall was, if it was said, is over."""
        if stalled is not None and said:
            _say(f"training goes on: rank {self._rank} was {stalled[0]} for {time.monotonic() - stalled[1]:.0f} s")

    def _usually(self, what: str) -> str:
        usual = list(self._usual[what])
        if not usual:
            return ""
        median = statistics.median(usual)
        return f", usually {median:.1f} s" if median >= 1 else f", usually {1000 * median:.0f} ms"

    def _limit(self, what: str) -> float:
        usual = list(self._usual[what])
        return max(self._least, TIMES_USUAL * (statistics.median(usual) if usual else self._least))

    def _listen(self) -> list[Heard] | None:
        """What is heard of the other ranks; None where one before this is alive, which then speaks."""
        if self._pulse is None:
            return []
        if self._unanswered:  # nobody knows who else speaks: one of a machine does
            return [] if self._rank <= 1 or os.environ.get("LOCAL_RANK", "0") == "0" else None
        before = self._pulse.listen(range(self._rank))
        if any(item.silent <= self._patience for item in before):
            return None
        return self._pulse.listen(rank for rank in range(self._ranks) if rank != self._rank)

    @property
    def _patience(self) -> float:
        """Seconds of silence after which a process is taken to be stopped."""
        return 3 * self._period

    @property
    def _unanswered(self) -> float:
        """Seconds for which the store has not answered, if that is long."""
        assert self._pulse is not None
        silent = time.monotonic() - self._pulse.answered
        return silent if silent > self._patience + self._period else 0.0

    def _explain(self, heard: Sequence[Heard]) -> str:
        me = Heard(self._rank, self._place(), 0.0)
        if self._pulse is not None and (silent := self._unanswered):
            reason = f" ({self._pulse.failure})" if self._pulse.failure else ""
            return (
                f"rank {self._rank} is {me.place.doing}; the store by which the ranks find each other, which rank 0 or "
                f"its launcher holds, has not answered for {silent:.0f} s{reason}: that process is stopped or cut off"
            )
        return explain([me, *heard], self._ranks, self._patience)


def explain(heard: Sequence[Heard], ranks: int, patience: float) -> str:
    """Who is behind, in words.

    Args:
        heard: of every rank that is known, the speaker included.
        ranks: how many there are.
        patience: seconds of silence that mean nothing.
    """
    if ranks == 1:
        return f"there are no others; at this moment it is {heard[0].place.doing}"
    silent = [item for item in heard if item.silent > patience]
    if silent:
        longest = max(item.silent for item in silent)
        return (
            f"no sign of life from {_names(silent)} for {longest:.1f} s: stopped, killed, or cut off from the others; "
            f"when last heard of, {_places(silent)}"
        )
    behind = _behind(heard)
    if not behind:
        unknown = "" if len(heard) == ranks else f" (of {ranks - len(heard)} ranks nothing is known)"
        return (
            f"no rank is behind, as far as they can tell: all are {heard[0].place.doing} in step {heard[0].place.step}"
            f"{unknown}; a device or the network between them may hang"
        )
    return f"{_names(behind)} behind: {_places(behind)}"


def _behind(heard: Sequence[Heard]) -> list[Heard]:
    """Those in an earlier step, else those who work while others wait, else those who read while others compute."""
    first = min(item.place.step for item in heard)
    tests = (
        lambda place: place.step == first,
        lambda place: not place.waiting,
        lambda place: place.doing == READING,
    )
    for test in tests:
        found = [item for item in heard if test(item.place)]
        if 0 < len(found) < len(heard):
            return found
    return []


def _names(items: Sequence[Heard]) -> str:
    numbers = [str(item.rank) for item in sorted(items, key=lambda item: item.rank)]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(numbers[:_NAMED])}{f' and {len(numbers) - _NAMED} more' if len(numbers) > _NAMED else ''}"


def _places(items: Sequence[Heard]) -> str:
    return "; ".join(
        f"rank {item.rank} was {item.place.doing} in step {item.place.step} (for {item.place.seconds:.1f} s)"
        for item in sorted(items, key=lambda item: item.rank)[:_NAMED]
    )


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
