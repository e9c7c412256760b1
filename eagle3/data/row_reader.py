"""Reads rows of samples from their shards straight into a batch's memory, several pieces at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Self

import torch

from eagle3.data.store import StoreReader
from eagle3.errors import problem_error
from eagle3.files import read_into
from eagle3.wiring.safetensors_header import read_header

_THREADS = 8
_JOB_BYTES = 16 << 20

_Piece = tuple[str, int, memoryview]
"""Tensor, the byte in it where the piece begins, and the memory to fill."""


class Part(NamedTuple):
    """Rows to read.

    Attributes:
        name: of the shard's tensor.
        row: the first one, in the shard.
        target: contiguous [n, ..] on the CPU, n rows as in the file.
    """

    name: str
    row: int
    target: torch.Tensor


class RowReader:
    """Threads that read for one consumer. A context manager; what is still to be read at its end is dropped.

    Args:
        reader: the store.
        threads: that read at a time; default: 8.
    """

    def __init__(self, reader: StoreReader, threads: int | None = None) -> None:
        self._reader = reader
        self._pool = ThreadPoolExecutor(threads or _THREADS, thread_name_prefix="read_rows")
        self._open = lru_cache(maxsize=reader.keeps_open)(_Shard)

    def read(self, index: int, parts: Sequence[Part]) -> list[Future[None]]:
        """Begins to read rows of the shard that a sample is in.

        Args:
            index: of the sample in the store.
            parts: what to read, and where to.

        Returns:
            the reads; one whose file has become shorter, or cannot be fetched, raises `ProblemsError`, which names
            shard and sample.
        """
        return [self._pool.submit(self._fill, index, pieces) for pieces in _jobs(parts)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._open.cache_clear()

    def _fill(self, index: int, pieces: Sequence[_Piece]) -> None:
        with self._reader.held(index):
            shard = self._open(self._reader.folder / self._reader.place(index).file)
            for name, begin, memory in pieces:
                if not shard.read(name, begin, memory):
                    message = "the file has become shorter while in use"
                    fix = "run `eagle3 data verify`, then `eagle3 extract` again"
                    raise problem_error(self._reader.where(index), "store.shard_truncated", message, fix)


def _jobs(parts: Sequence[Part]) -> Iterator[list[_Piece]]:
    """The parts cut and grouped: each thread's turn takes long enough to be worth handing out."""
    job: list[_Piece] = []
    room = _JOB_BYTES
    for name, row, target in parts:
        memory = target.view(torch.uint8).flatten().numpy().data
        first, at = row * (len(memory) // max(len(target), 1)), 0
        while at < len(memory):
            piece = memory[at : at + room]
            job.append((name, first + at, piece))
            at, room = at + len(piece), room - len(piece)
            if not room:
                yield job
                job, room = [], _JOB_BYTES
    if job:
        yield job


class _Shard:
    """An open shard and where its tensors begin."""

    def __init__(self, path: Path) -> None:
        self.path = path
        header = read_header(path)
        self._begins = {name: header.data_start + tensor.begin for name, tensor in header.tensors.items()}
        self._handle = open(path, "rb", buffering=0)  # noqa: SIM115 (closed with this object)

    def read(self, name: str, begin: int, target: memoryview) -> bool:
        """Fills `target` from byte `begin` of a tensor; false if the file ends before."""
        return read_into(self._handle.fileno(), target, self._begins[name] + begin) == len(target)


def wait_for(jobs: Sequence[Future[None]]) -> None:
    """Waits for reads; raises what went wrong in the first that failed."""
    for job in jobs:
        job.result()
