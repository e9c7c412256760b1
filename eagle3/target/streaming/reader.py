"""Reads a layer's raw weights into one buffer while the layer before it computes.

Several threads read the files, block by block. For a GPU each block is pinned host memory and is copied on a stream of
its own; on the CPU the threads read straight into the buffer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from eagle3.errors import Problem, problem_error
from eagle3.files import read_into, readable
from eagle3.target.streaming.checkpoint import Raw, Recipe

BLOCK_BYTES = 64 << 20
BLOCKS_PER_THREAD = 2
_ALIGNMENT = 256


@dataclass(frozen=True)
class _Piece:
    """Some bytes of a file, and where they go in the buffer."""

    path: Path
    begin: int
    size: int
    target: int


@dataclass(frozen=True)
class _Block:
    """A stretch of the buffer and the pieces that fill it."""

    begin: int
    size: int
    pieces: tuple[_Piece, ...]


def raw_offsets(recipes: Sequence[Recipe]) -> tuple[dict[Raw, int], int]:
    """Where each raw tensor begins in a layer's buffer, and the buffer's size."""
    offsets, end = {}, 0
    for recipe in recipes:
        for raw in recipe.raws:
            offsets[raw] = end
            end += -(-raw.size // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


class WeightReader:
    """Fills a buffer on `device` with one layer's raw tensors at a time, in the background.

    Args:
        device: where the buffer lies.
        size: of the buffer in bytes: `raw_offsets` of the largest layer.
        threads: that read.
    """

    def __init__(self, device: torch.device, size: int, threads: int) -> None:
        self.device = device
        self._buffer = torch.empty(size, dtype=torch.uint8, device=device)
        self._pool = ThreadPoolExecutor(threads, "weights")
        self._local = threading.local()
        self._open = lru_cache(maxsize=256)(_File)
        self._jobs: list[Future[None]] = []
        self._offsets: dict[Raw, int] = {}
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.bytes_read = 0

    def start(self, recipes: Sequence[Recipe]) -> None:
        """Begins to read these; whatever the buffer held must not be used by work that is queued later."""
        assert not self._jobs
        self._offsets, _ = raw_offsets(recipes)
        if self._copies is not None:
            self._copies.wait_stream(torch.cuda.current_stream(self.device))
        self._jobs = [self._pool.submit(self._fill, block) for block in _blocks(self._offsets)]
        self.bytes_read += sum(raw.size for raw in self._offsets)

    def finish(self) -> dict[Raw, torch.Tensor]:
        """Waits until all is there.

        Returns:
            views of the buffer, valid until the next `start`.

        Raises:
            ProblemsError: a file has become shorter or cannot be read.
        """
        jobs, self._jobs = self._jobs, []
        try:
            for job in jobs:
                job.result()
        finally:
            for job in jobs:
                job.cancel()
        if self._copies is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._copies)
        return {
            raw: self._buffer[offset : offset + raw.size].view(raw.dtype).view(raw.shape)
            for raw, offset in self._offsets.items()
        }

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._open.cache_clear()

    def _fill(self, block: _Block) -> None:
        target = self._buffer[block.begin : block.begin + block.size]
        if self._copies is None:
            self._read(block, target)
            return
        staging, event = self._next_staging()
        event.synchronize()
        self._read(block, staging[: block.size])
        with torch.cuda.stream(self._copies):
            target.copy_(staging[: block.size], non_blocking=True)
            event.record(self._copies)

    def _read(self, block: _Block, memory: torch.Tensor) -> None:
        view = memory.numpy().data
        for piece in block.pieces:
            begin = piece.target - block.begin
            self._open(piece.path).read(view[begin : begin + piece.size], piece.begin)

    def _next_staging(self) -> tuple[torch.Tensor, torch.cuda.Event]:
        """This thread's least recently used pinned block, and the event after which it is free."""
        if not hasattr(self._local, "ring"):
            torch.cuda.set_device(self.device)
            self._local.ring = [
                (torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())
                for _ in range(BLOCKS_PER_THREAD)
            ]
        self._local.ring.append(self._local.ring.pop(0))
        staging: tuple[torch.Tensor, torch.cuda.Event] = self._local.ring[-1]
        return staging


def check_vectors(recipes: Iterable[Recipe]) -> list[Problem]:
    """Reads what is small, norms and biases, and finds those that are not finite. A router's bias with NaN would choose
    experts at random, and no state would show it.
    """
    problems = []
    for recipe in recipes:
        if recipe.scheme == "plain" and len(recipe.shape) == 1:
            [place] = recipe.raws[0].places
            values = bytearray(place.size)
            _File(place.path).read(memoryview(values), place.begin)
            if not torch.isfinite(torch.frombuffer(values, dtype=recipe.raws[0].dtype)).all():
                fix = "download this file again"
                message = f"{place.name} has NaN or infinity"
                problems.append(Problem(str(place.path), "target.non_finite", message, fix))
    return problems


class _File:
    """A file that stays open as long as this object lives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with readable(path):
                self._handle = open(path, "rb", buffering=0)  # noqa: SIM115 (closed with the object)
        except (FileNotFoundError, NotADirectoryError):
            fix = "put it back, leave the checkpoint in place while it is read, and run the same command again"
            raise problem_error(str(path), "file.missing", "is gone, it was there when the run began", fix) from None

    def read(self, target: memoryview, offset: int) -> None:
        with readable(self.path):
            done = read_into(self._handle.fileno(), target, offset)
        if done < len(target):
            message = f"ends at byte {offset + done}, expected {len(target) - done} more"
            raise problem_error(str(self.path), "target.truncated", message, "download this file again")


def _blocks(offsets: dict[Raw, int]) -> list[_Block]:
    """Cuts a layer's reads into stretches of the buffer of at most `BLOCK_BYTES`."""
    blocks: list[_Block] = []
    pieces: list[_Piece] = []
    for raw, offset in offsets.items():
        for place in raw.places:
            done = 0
            while done < place.size:
                begin = pieces[0].target if pieces else offset
                room = begin + BLOCK_BYTES - offset
                if room <= 0:
                    blocks.append(_block(pieces))
                    pieces = []
                    continue
                size = min(room, place.size - done)
                pieces.append(_Piece(place.path, place.begin + done, size, offset))
                done += size
                offset += size
    return [*blocks, *([_block(pieces)] if pieces else [])]


def _block(pieces: list[_Piece]) -> _Block:
    begin, last = pieces[0].target, pieces[-1]
    return _Block(begin, last.target + last.size - begin, tuple(pieces))
