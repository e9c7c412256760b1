"""Checkpoints written beside the training, in a thread of the main process.

What is written is a copy in host memory, so training goes on at once and the checkpoint is that of its step. One is
written at a time. Older checkpoints go, and `best.json` moves, once the new one is in place.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from eagle3.errors import ProblemsError
from eagle3.train.checkpoint import TrainState, list_checkpoints, remove_old_checkpoints, save_checkpoint
from eagle3.train.disk_room import check_room
from eagle3.train.run_folder import point_at_best

Tensors = Mapping[str, Tensor]


class Saver:
    """Writes the checkpoints of one run. A context manager: an error that ends the block waits for the checkpoint in
    work; Ctrl-C does not, and leaves nothing half-written that a new start would take for a checkpoint.

    Args:
        run: the run folder.
        keep: newest checkpoints that stay; the best one stays too.
        copies: the tensors that `begin` gets are nobody else's: they are written as they are.
    """

    def __init__(self, run: Path, keep: int, copies: bool) -> None:
        self._run, self._keep, self._copies = run, keep, copies
        self._buffers: dict[tuple[int, str], Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._given_up = self._raised = False
        self._written: deque[float] = deque()
        self._waited = 0.0
        self._all_written = self._all_waited = 0.0
        self._count = 0

    @property
    def failed(self) -> bool:
        """Whether a checkpoint could not be written; no other is begun then."""
        return self._error is not None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts what it encloses as time that training waits for a checkpoint."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self._waited += time.monotonic() - begin

    def begin(self, weights: Tensors, moments: Tensors, state: TrainState) -> None:
        """Copies the tensors and begins to write the checkpoint of `state.step`, once the one before is written.

        Raises nothing where that one failed, and writes nothing: `failed` says so.
        """
        self._join()
        if self.failed:
            return
        held = [self._held(part, tensors) for part, tensors in enumerate((weights, moments))]
        if any(tensor.is_cuda for tensor in (*weights.values(), *moments.values())):
            torch.cuda.synchronize()
        # A thread that nobody waits for: Ctrl-C may leave it behind.
        self._thread = threading.Thread(target=self._write, args=(*held, state), name="save_checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> BaseException | None:
        """Waits until the checkpoint that was begun is in place; returns what kept it, or an earlier one, from that."""
        self._join()
        self._raised = self.failed
        return self._error

    def take(self) -> dict[str, float]:
        """`save_seconds`, the time that the checkpoints took which were written since the last call, and `save_wait`,
        the time that training waited for checkpoints, copies included."""
        written, waited = 0.0, self._waited
        while self._written:
            written += self._written.popleft()
            self._count += 1
        self._waited = 0.0
        self._all_written += written
        self._all_waited += waited
        return {"save_seconds": written, "save_wait": waited}

    def note(self) -> str:
        """All of that time, in words; nothing before the first checkpoint."""
        self.take()
        if not self._count:
            return ""
        return (
            f"checkpoints: {self._count}, written in {self._all_written:.1f} s, for which training waited "
            f"{self._all_waited:.1f} s"
        )

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is not None and not issubclass(kind, Exception):
            self._given_up = True
            return
        self._join()
        if self._error is not None and not self._raised:
            print(f"a checkpoint could not be written: {self._error}", file=sys.stderr)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _held(self, part: int, tensors: Tensors) -> dict[str, Tensor]:
        """Copies in host memory, pinned for a GPU's; their memory is used again for the next checkpoint."""
        if self._copies:
            return dict(tensors)
        held = {}
        for name, tensor in tensors.items():
            buffer = self._buffers.get((part, name))
            if buffer is None:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._buffers[part, name] = buffer
            held[name] = buffer.copy_(tensor.detach(), non_blocking=True)
        return held

    def _write(self, weights: Tensors, moments: Tensors, state: TrainState) -> None:
        begin = time.monotonic()
        try:
            check_room(self._run, sum(tensor.nbytes for tensor in (*weights.values(), *moments.values())))
            save_checkpoint(self._run, weights, moments, state)
            if not self._given_up:
                point_at_best(self._run, state)
                remove_old_checkpoints(self._run, self._keep, state.best.checkpoint if state.best else None)
        except ProblemsError as error:
            self._error = _with_newest(error, self._run)
        except Exception as error:  # noqa: BLE001 (the trainer raises it)
            self._error = error
        else:
            self._written.append(time.monotonic() - begin)


def _with_newest(error: ProblemsError, run: Path) -> ProblemsError:
    """The same error, and where the run stands."""
    kept = list_checkpoints(run)
    if kept:
        stands = f"the newest whole checkpoint is {kept[-1].name}, from which the same command goes on"
    else:
        stands = "there is no checkpoint yet, so the same command begins anew"
    return ProblemsError([replace(item, message=f"{item.message}; {stands}") for item in error.problems], error.title)
