"""Reads rows of samples from their shards straight into a batch's memory, several pieces at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import NamedTuple, Self

import torch

from eagle3.data.open_shard import bytes_of, of_samples
from eagle3.data.store import StoreReader
from eagle3.errors import Problem, ProblemsError, raise_problems

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


class Reading(NamedTuple):
    """A read that was begun, and the sample that it is of."""

    sample: str
    job: Future[None]


class RowReader:
    """Threads that read for one consumer. A context manager; what is still to be read at its end is dropped.

    Args:
        reader: the store.
        threads: that read at a time; default: 8.
    """

    def __init__(self, reader: StoreReader, threads: int | None = None) -> None:
        self._reader = reader
        self._pool = ThreadPoolExecutor(threads or _THREADS, thread_name_prefix="read_rows")
        self._open = lru_cache(maxsize=reader.keeps_open)(reader.open_shard)

    def read(self, index: int, parts: Sequence[Part]) -> list[Reading]:
        """Begins to read rows of the shard that a sample is in.

        Args:
            index: of the sample in the store.
            parts: what to read, and where to.

        Returns:
            the reads, for `wait_for`.
        """
        sample = self._reader.samples[index].id
        return [Reading(sample, self._pool.submit(self._fill, index, pieces)) for pieces in _jobs(parts)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._open.cache_clear()

    def _fill(self, index: int, pieces: Sequence[_Piece]) -> None:
        with self._reader.held(index):
            shard = self._open(self._reader.place(index).file)
            for piece in pieces:
                shard.read(*piece)


def _jobs(parts: Sequence[Part]) -> Iterator[list[_Piece]]:
    """The parts cut and grouped: each thread's turn takes long enough to be worth handing out."""
    job: list[_Piece] = []
    room = _JOB_BYTES
    for name, row, target in parts:
        memory = bytes_of(target)
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


def wait_for(readings: Sequence[Reading]) -> None:
    """Waits for reads.

    Raises:
        ProblemsError: kinds `store.shard_truncated`, `store.unreadable`, and those of `StoreReader.open_shard`; each
            with the samples that were to be read.
    """
    bad: dict[Problem, list[str]] = {}
    for sample, job in readings:
        try:
            job.result()
        except ProblemsError as error:  # raised below, together with those of all other reads
            for problem in error.problems:
                bad.setdefault(problem, []).append(sample)
    raise_problems(of_samples(problem, list(dict.fromkeys(samples))) for problem, samples in bad.items())
