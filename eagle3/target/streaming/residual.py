"""Where a chunk's residual stream lies between layers: device memory, host memory or a scratch file.

Legend: T tokens of the chunk, H hidden.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch

from eagle3.files import explained_os_errors

Placement = Literal["device", "host", "file"]


class Residual:
    """[T, H] in rows that are fetched and put back, a micro-batch at a time.

    Args:
        rows: the storage, on the device, in (pinned) host memory or mapped from a file.
        device: where rows are computed with.
    """

    def __init__(self, rows: torch.Tensor, device: torch.device) -> None:
        self._rows = rows
        self._device = device

    def get(self, begin: int, end: int) -> torch.Tensor:
        """Rows `begin` to `end` on the device; not to be written to."""
        return self._rows[begin:end].to(self._device, non_blocking=True)

    def put(self, begin: int, states: torch.Tensor) -> None:
        """Stores states [n, H] from row `begin` on."""
        ordered = self._rows.is_cuda or self._rows.is_pinned()
        self._rows[begin : begin + len(states)].copy_(states, non_blocking=ordered)


@contextmanager
def residual_stream(
    tokens: int, hidden: int, dtype: torch.dtype, device: torch.device, placement: Placement, scratch: Path
) -> Iterator[Residual]:
    """A residual stream of [tokens, hidden]; a scratch file has no name, so it goes with the process.

    Raises:
        ProblemsError: the scratch folder's disk is full.
    """
    if placement == "device":
        yield Residual(torch.empty(tokens, hidden, dtype=dtype, device=device), device)
    elif placement == "host":
        yield Residual(torch.empty(tokens, hidden, dtype=dtype, pin_memory=device.type == "cuda"), device)
    else:
        with explained_os_errors(scratch):
            scratch.mkdir(parents=True, exist_ok=True)
            handle = tempfile.TemporaryFile(dir=scratch)  # noqa: SIM115 (closed below)
        with handle:
            with explained_os_errors(scratch):
                os.posix_fallocate(handle.fileno(), 0, tokens * hidden * dtype.itemsize)
            path = f"/proc/self/fd/{handle.fileno()}"
            rows = torch.from_file(path, shared=True, size=tokens * hidden, dtype=dtype)
            yield Residual(rows.view(tokens, hidden), device)
