"""RMSNorm (arXiv 1910.07467), forward and backward.

Legend: R rows, H width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PROGRAMS = 264
"""Programs of `norm_grad`, each with a row of its own in the weight's sums: two on each of an H200's 132 processors."""

_ROW_PROGRAMS, _COLUMNS = 88, 1024
"""Programs of `unnormed_grad` that share the rows, of at most `PROGRAMS`, and columns of each."""


def norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `plain.norm`; rows may lie apart."""
    rows, width = x.shape
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device) if out is None else out
    factors = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        block = triton.next_power_of_2(width)
        _norm[(rows,)](
            x, weight, out, factors, x.stride(0), out.stride(0), width, eps, block, num_warps=8 if block > 2048 else 4
        )
    return out, factors


def norm_sums(width: int, like: torch.Tensor) -> torch.Tensor:
    """As `plain.norm_sums`."""
    return torch.zeros(PROGRAMS, width, dtype=torch.float32, device=like.device)


def norm_grad(
    x: torch.Tensor,
    factor: torch.Tensor,
    weight: torch.Tensor,
    grad: torch.Tensor,
    sums: torch.Tensor,
    add: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `plain.norm_grad`; rows may lie apart."""
    rows, width = x.shape
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device) if out is None else out
    added = x if add is None else add
    count = 0 if add is None else len(add)
    block = triton.next_power_of_2(width)
    if rows:
        _norm_grad[(PROGRAMS,)](
            x, factor, weight, grad, added, out, sums, rows, count,
            x.stride(0), grad.stride(0), added.stride(0), out.stride(0), width, block,
            num_warps=8 if block > 2048 else 4,
        )  # fmt: skip
    return out


def unnormed_grad(total: torch.Tensor, matrix: torch.Tensor, weight: torch.Tensor, sums: torch.Tensor) -> None:
    """As `plain.unnormed_grad`; rows may lie apart."""
    rows, width = total.shape
    block = min(_COLUMNS, triton.next_power_of_2(width))
    _unnormed_grad[(_ROW_PROGRAMS, triton.cdiv(width, block))](
        total, matrix, weight, sums, rows, total.stride(0), matrix.stride(0), width, block, num_warps=4
    )


@triton.jit
def _norm(x, weight, out, factors, x_row, out_row, width: tl.constexpr, eps, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < width
    value = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    tl.store(out + row * out_row + column, (value * factor * scale).to(out.dtype.element_ty), mask=inside)
    tl.store(factors + row, factor)


@triton.jit(do_not_specialize=["rows", "added"])
def _norm_grad(
    x, factors, weight, grad, add, out, sums, rows, added, x_row, grad_row, add_row, out_row,
    width: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < width
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    total_at = sums + first * width + column
    total = tl.load(total_at, mask=inside, other=0.0)
    for row in range(first, rows, tl.num_programs(0)):
        factor = tl.load(factors + row)
        factor = tl.where(factor == 0.0, float("nan"), factor)
        unit = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32) * factor
        slope = tl.load(grad + row * grad_row + column, mask=inside, other=0.0).to(tl.float32)
        total += slope * unit
        slope *= scale
        mean = tl.sum(slope * unit, axis=0) / width
        result = (slope - unit * mean) * factor
        result += tl.load(add + row * add_row + column, mask=inside & (row < added), other=0.0).to(tl.float32)
        tl.store(out + row * out_row + column, result.to(out.dtype.element_ty), mask=inside)
    tl.store(total_at, total, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _unnormed_grad(
    total, matrix, weight, sums, rows, total_row, matrix_row, width: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    sum_at = sums + first * width + column
    found = tl.load(sum_at, mask=inside, other=0.0)
    for row in range(first, rows, tl.num_programs(0)):
        at = total + row * total_row + column
        value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        found += value * tl.load(matrix + row * matrix_row + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(at, (value * scale).to(total.dtype.element_ty), mask=inside)
    tl.store(sum_at, found, mask=inside)
