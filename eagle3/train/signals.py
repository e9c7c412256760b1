"""Signals that ask a run to stop: the step is finished, a checkpoint is saved, and the same command goes on there.

A signal may reach one process only, or processes at different moments, so each says in a step's own reduction whether
it was asked (`eagle3.train.window`): all of them stop after the same step.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SAME_SECONDS = 5.0
"""A terminal and the launcher that it reaches too, or a scheduler and a launcher, send one request twice."""


class StopRequest:
    """Whether this process was asked to stop.

    Attributes:
        name: of the first signal that asked; None before.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._since = 0.0
        self._before: dict[int, Any] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within, a signal is noted, and another one that comes later does what it would have done without this.

        Does nothing outside the main thread, which alone may handle signals. A signal that is ignored stays ignored.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        for number in STOP_SIGNALS:
            if signal.getsignal(number) not in (None, signal.SIG_IGN):
                self._before[number] = signal.signal(number, self._handle)
        try:
            yield
        finally:
            self._put_back()

    def note(self, step: int, total: int) -> str:
        """What to say when training has stopped after this step."""
        who = self.name or "a signal to another process"
        return f"stopped by {who} after step {step} of {total}, which is saved: the same command goes on from there"

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Notes the signal; whatever runs goes on."""
        now = time.monotonic()
        if self.name is None:
            self._since = now
            self.name = signal.Signals(number).name
            if os.environ.get("RANK", "0") == "0":
                again = f"once more, {SAME_SECONDS:.0f} s later, stops at once"
                with suppress(OSError):  # not print: this may interrupt one
                    os.write(2, f"\n{self.name}: stopping after this step; {again}\n".encode())
        elif now - self._since >= SAME_SECONDS:
            before = self._before[number]
            self._put_back()
            os.kill(os.getpid(), number)
            if before is signal.SIG_DFL:  # a container's first process: the system does not end it
                os._exit(128 + number)

    def _put_back(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())
