"""A shard that is read and never mapped: a file that shrinks while it is in use is a problem then, and not the end of
the process (SIGBUS).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from eagle3.data.tensor_file import TORCH_DTYPES
from eagle3.errors import Problem, ProblemsError, problem_error, raise_problems
from eagle3.files import read_into
from eagle3.wiring.safetensors_header import read_header

_MOST_NAMED = 8


class OpenShard:
    """An open file and where its tensors begin. Several threads may read.

    Args:
        path: of the file; it is read as it was when it was opened, whatever its name leads to later.

    Raises:
        ProblemsError: as `read_header`; kind `store.unreadable`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._header = read_header(path)
        with self._explained():
            self._handle = open(path, "rb", buffering=0)  # noqa: SIM115 (closed with this object)

    def read(self, name: str, begin: int, target: memoryview) -> None:
        """Fills `target` from byte `begin` of a tensor.

        Raises:
            ProblemsError: kind `store.shard_truncated`, the file ends before; `store.unreadable`.
        """
        offset = self._header.data_start + self._header.tensors[name].begin + begin
        with self._explained():
            done = read_into(self._handle.fileno(), target, offset)
        if done < len(target):
            expected = self._header.file_bytes
            message = f"has {os.fstat(self._handle.fileno()).st_size} bytes, and had {expected} when it was opened"
            fix = "leave a store alone while it is in use; run `eagle3 data repair`, then `eagle3 extract` again"
            raise problem_error(str(self.path), "store.shard_truncated", message, fix)

    def rows(self, name: str, rows: slice) -> torch.Tensor:
        """Rows `start` to `stop` of a tensor [N, ..], in memory of their own.

        Raises:
            ProblemsError: as `read`.
        """
        info = self._header.tensors[name]
        values = torch.empty((rows.stop - rows.start, *info.shape[1:]), dtype=TORCH_DTYPES[info.dtype])
        self.read(
            name, rows.start * ((info.end - info.begin) // info.shape[0]) if info.shape[0] else 0, bytes_of(values)
        )
        return values

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            message = f"cannot be read: {error.strerror or error}"
            fix = "check the disk; `eagle3 data verify` names all that it does not hand out"
            raise problem_error(str(self.path), "store.unreadable", message, fix) from error


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.view(torch.uint8).flatten().numpy().data


@contextmanager
def naming(*samples: str) -> Iterator[None]:
    """Adds to the problems of the block which samples it was reading."""
    try:
        yield
    except ProblemsError as error:
        raise_problems((of_samples(problem, samples) for problem in error.problems), error.title)


def of_samples(problem: Problem, samples: Sequence[str]) -> Problem:
    """A problem of a shard that tells which samples it was met with; one that names its sample stays as it is."""
    if any(problem.where.endswith(f": sample {sample!r}") for sample in samples):
        return problem
    named = ", ".join(map(repr, samples[:_MOST_NAMED]))
    more = f" and {len(samples) - _MOST_NAMED} more" if len(samples) > _MOST_NAMED else ""
    return replace(problem, where=f"{problem.where}: {'sample' if len(samples) == 1 else 'samples'} {named}{more}")
