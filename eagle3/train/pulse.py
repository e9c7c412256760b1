"""What each process of a run says of itself, and what the others have heard: through the processes' own store.

The store of `torch.distributed` (TCP) needs no shared folder. A process says every few seconds where it is, over a
connection of its own and in a thread that nobody waits for; so nothing that fails here reaches the training.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_ANSWER_SECONDS = 20.0


@dataclass(frozen=True)
class Place:
    """Where a process is.

    Attributes:
        step: at work, from 1; 0 before the first.
        doing: in words; `waiting` says whether that is waiting for the others.
        seconds: for how long.
    """

    step: int
    doing: str
    waiting: bool
    seconds: float

    def spell(self, beat: int) -> str:
        return f"{beat}|{self.step}|{int(self.waiting)}|{self.seconds:.1f}|{self.doing}"

    @classmethod
    def read(cls, text: str) -> Place:
        _, step, waiting, seconds, doing = text.split("|", 4)
        return cls(int(step), doing, waiting == "1", float(seconds))


@dataclass(frozen=True)
class Heard:
    """What was last heard of a process.

    Attributes:
        silent: seconds since it last said something, as far as anybody listened.
    """

    rank: int
    place: Place
    silent: float


class Pulse:
    """Speaks for this process, and listens to others while somebody wants to know.

    Args:
        place: where this process is.
        period: seconds between two times that it speaks.
    """

    def __init__(self, rank: int, store: Any, place: Callable[[], Place], period: float) -> None:
        self._rank, self._store, self._place, self._period = rank, store, place, period
        self._wanted: tuple[int, ...] = ()
        self._heard: dict[int, tuple[str, float]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        self.answered = time.monotonic()
        self.failure = ""

    def start(self) -> None:
        self._thread.start()

    def listen(self, ranks: Iterable[int]) -> list[Heard]:
        """Asks for these ranks from now on; what was heard of them so far."""
        self._wanted = tuple(ranks)
        now, heard = time.monotonic(), dict(self._heard)
        return [Heard(rank, Place.read(heard[rank][0]), now - heard[rank][1]) for rank in self._wanted if rank in heard]

    def close(self) -> None:
        """Ends the thread, or leaves it behind where the store does not answer."""
        self._stop.set()
        self._thread.join(self._period)

    def _run(self) -> None:
        beat, prefix = 0, f"eagle3/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        try:
            while True:
                self._store.set(f"{prefix}/{self._rank}", self._place().spell(beat := beat + 1))
                wanted = self._wanted
                for rank in wanted:
                    if self._store.check([f"{prefix}/{rank}"]):
                        self._hear(rank, self._store.get(f"{prefix}/{rank}").decode())
                self._heard = {rank: heard for rank, heard in self._heard.items() if rank in wanted}
                self.answered = time.monotonic()
                if self._stop.wait(self._period):
                    return
        except Exception as error:  # noqa: BLE001 (whoever watches says it)
            self.failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"

    def _hear(self, rank: int, text: str) -> None:
        if rank not in self._heard or self._heard[rank][0] != text:
            self._heard[rank] = (text, time.monotonic())


def own_store() -> Any:
    """This process's own connection to the store by which the processes found each other; None of a single process, and
    where there is no such store, which is said."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    try:
        shared: Any = dist.distributed_c10d._get_default_store()
        store = shared.clone()
        store.set_timeout(timedelta(seconds=_ANSWER_SECONDS))
    except Exception as error:  # noqa: BLE001 (the watch must not keep a run from training)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            reason = f"{type(error).__name__}: {error}"
            print(f"note: in a stall each rank will know of itself only: {reason}", file=sys.stderr)
        return None
    return store
