"""What the matrix products of a computation take when each is timed on its own."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS = {"mm": 0, "addmm": 1, "addmm_": 1, "_int_mm": 0, "_scaled_mm": 0}
"""Products by name, and which argument is their left matrix."""
_REPEATS = 8

Key = tuple[torch.dtype, torch.dtype, tuple[int, ...], tuple[int, ...], bool, bool, bool, bool]
"""Types of operands and result, their sizes, whether each is transposed, whether something is added to, whether float8
is summed up fast."""


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Key] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.__name__.split(".")[0]
        if name in _PRODUCTS:
            left, right = args[_PRODUCTS[name] : _PRODUCTS[name] + 2]
            transposed = (left.stride(-1) != 1, right.stride(-1) != 1)
            key = (
                left.dtype,
                result.dtype,
                tuple(left.shape),
                tuple(right.shape),
                *transposed,
                name.startswith("addmm"),
                bool((kwargs or {}).get("use_fast_accum")),
            )
            self.found[key] += 1
        return result


def matmul_seconds(run: Callable[[], None], device: torch.device) -> float:
    """Runs `run` once and adds up the median times of its matrix products, each alone, on random numbers."""
    with _Recorder() as recorder:
        run()
    return sum(count * _seconds(key, device) for key, count in recorder.found.items())


def _seconds(key: Key, device: torch.device) -> float:
    dtype, out_dtype, left_shape, right_shape, left_turned, right_turned, adds, fast = key
    left, right = _operand(dtype, left_shape, left_turned, device), _operand(dtype, right_shape, right_turned, device)
    options = {} if out_dtype == dtype else {"out_dtype": out_dtype}
    out = torch.zeros(left_shape[0], right_shape[1], dtype=out_dtype, device=device)
    scales = torch.ones(left_shape[0], 1, device=device), torch.ones(1, right_shape[1], device=device)

    def product() -> None:
        if dtype == torch.float8_e4m3fn:
            torch._scaled_mm(left, right, *scales, out_dtype=out_dtype, use_fast_accum=fast, out=out)
        elif adds:
            out.addmm_(left, right)
        elif options:
            torch.mm(left, right, **options)
        else:
            torch.mm(left, right, out=out)

    timed = _gpu_seconds if device.type == "cuda" else _cpu_seconds
    return statistics.median([timed(product) for _ in range(_REPEATS + 2)][2:])


def _gpu_seconds(product: Callable[[], None]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    product()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000


def _cpu_seconds(product: Callable[[], None]) -> float:
    start = time.perf_counter()
    product()
    return time.perf_counter() - start


def _operand(dtype: torch.dtype, shape: tuple[int, ...], turned: bool, device: torch.device) -> torch.Tensor:
    made = torch.empty(shape[::-1] if turned else shape, device=device).normal_()
    if dtype == torch.float8_e4m3fn:
        made *= 100  # where rows with a scale have their values
    return (made.T if turned else made).to(dtype)
