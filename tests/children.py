"""Work in a process of its own, forked from the tests', that may be killed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from itertools import count

import torch

from eagle3.draft.loss import TargetHead, post_norm


def in_a_child(action: Callable[[], object], trains: bool = False) -> int:
    """Starts `action`; returns the process, whose exit code is 0 if it came to its end, else 1.

    Args:
        trains: logits must be those of this process to the last bit.
    """
    child = os.fork()
    if child == 0:
        code = 1
        compute_alone(trains)
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    return child


def compute_alone(trains: bool = False) -> None:
    """For a fork, which has none of its parent's threads: OpenMP would wait for them, and counts its threads for each
    Python thread anew. MKL keeps a list of threads by number, in which a fork may search without an end: where many
    processes are forked, the target's logits are made without it.

    Args:
        trains: see `in_a_child`.
    """
    torch.set_num_threads(1)
    run = threading.Thread.run

    def run_alone(thread: threading.Thread) -> None:
        torch.set_num_threads(1)
        run(thread)

    threading.Thread.run = run_alone  # type: ignore[method-assign]
    if not trains:
        TargetHead.logits = logits_without_products  # type: ignore[method-assign]


def logits_without_products(head: TargetHead, last_hidden: torch.Tensor) -> torch.Tensor:
    """As `TargetHead.logits`, to rounding."""
    states = post_norm(last_hidden.to(head.lm_head.dtype), head.kind, head.norm_weight, head.eps)
    return torch.stack([(states * row).sum(-1) for row in head.lm_head], -1)


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
