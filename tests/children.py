"""Work in a process of its own, forked from the tests', that may be killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from itertools import count

import torch


def in_a_child(action: Callable[[], object]) -> int:
    """Starts `action`; returns the process, whose exit code is 0 if it came to its end, else 1."""
    child = os.fork()
    if child == 0:
        code = 1
        torch.set_num_threads(1)  # a fork has none of its parent's threads
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    return child


def killed(action: Callable[[], object], function: str, call: int) -> bool:
    """Runs `action` in a process that is killed as it enters the `call`-th `os.<function>`; was it?"""

    def deadly_action() -> None:
        real, calls = getattr(os, function), count(1)

        def deadly(*args: object, **kwargs: object) -> object:
            if next(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        setattr(os, function, deadly)
        action()

    return os.waitpid(in_a_child(deadly_action), 0)[1] == signal.SIGKILL
