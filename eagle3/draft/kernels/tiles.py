"""Shapes of the attention kernels' tiles."""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
from triton.runtime import driver

Kernel = Literal["forward", "queries", "sources"]

_ROOM = 200 << 10  # bytes of shared memory that the fast tiles need
_WIDEST = 128
_FAST: dict[Kernel, dict[str, int]] = {
    "forward": {"block_rows": 64, "block_keys": 64, "num_warps": 4, "num_stages": 3},
    "queries": {"block_rows": 128, "block_keys": 64, "num_warps": 8, "num_stages": 3},
    "sources": {"num_warps": 4, "num_stages": 3},
}
"""Fastest of those tried on an H200 at a head width of 128, see docs/benchmarks.md."""
_FRUGAL: dict[Kernel, dict[str, int]] = {
    "forward": {"block_rows": 64, "block_keys": 32, "num_warps": 8, "num_stages": 2},
    "queries": {"block_rows": 64, "block_keys": 32, "num_warps": 8, "num_stages": 2},
    "sources": {"num_warps": 8, "num_stages": 1},
}
"""Wider heads, and cards with less shared memory than Hopper: at most 82 KiB at a head width of 128, 160 KiB at 256."""


def tile(kernel: Kernel, width: int, device: torch.device) -> dict[str, int]:
    """Launch options of a kernel for heads of that width."""
    return (_FAST if width <= _WIDEST and _shared_memory(device) >= _ROOM else _FRUGAL)[kernel]


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that a program may have; on a CPU (Triton's interpreter) there is no limit."""
    if device.type != "cuda":
        return _ROOM
    return int(driver.active.utils.get_device_properties(device.index)["max_shared_mem"])
