"""Adds the embedding's half of a projection and turns the heads by their positions (arXiv 2104.09864), and back.

Legend: R rows, d head width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_HEADS = 16
Turn = tuple[torch.Tensor, torch.Tensor]


def rotate_in(
    projected: torch.Tensor,
    shared: torch.Tensor,
    rows: torch.Tensor,
    shift: int,
    turn: Turn,
    rotated: int,
    out: torch.Tensor,
) -> torch.Tensor:
    """As `plain.rotate_in`; rows of `projected` may lie apart."""
    count, heads, width = out.shape
    assert out.is_contiguous() and shared.is_contiguous()
    _rotate_in[(count, triton.cdiv(heads, _HEADS))](
        projected, shared, rows, shift, *turn, out, projected.stride(0), heads, rotated, width,
        triton.next_power_of_2(width // 2), _HEADS,
    )  # fmt: skip
    return out


def rotate_out(
    grad: torch.Tensor,
    rows: torch.Tensor,
    shift: int,
    turn: Turn,
    rotated: int,
    shared_grad: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """As `plain.rotate_out`; rows of `out` may lie apart."""
    count, heads, width = grad.shape
    assert grad.is_contiguous() and shared_grad.is_contiguous() and shared_grad.dtype == torch.float32
    _rotate_out[(count, triton.cdiv(heads, _HEADS))](
        grad, rows, shift, *turn, shared_grad, out, out.stride(0), heads, rotated, width,
        triton.next_power_of_2(width // 2), _HEADS,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["shift"])
def _rotate_in(
    projected, shared, rows, shift, cos, sin, out, p_row,
    heads: tl.constexpr, rotated: tl.constexpr, width: tl.constexpr, block: tl.constexpr, head_block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * head_block + tl.arange(0, head_block)
    half: tl.constexpr = width // 2
    lane = tl.arange(0, block)
    inside = (head < heads)[:, None] & (lane < half)[None, :]
    at = head[:, None] * width + lane[None, :]
    other = (tl.load(rows + row) + shift).to(tl.int64) * (heads * width)
    left = tl.load(projected + row * p_row + at, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(projected + row * p_row + half + at, mask=inside, other=0.0).to(tl.float32)
    left += tl.load(shared + other + at, mask=inside, other=0.0).to(tl.float32)
    right += tl.load(shared + other + half + at, mask=inside, other=0.0).to(tl.float32)
    turned = (head < rotated)[:, None]
    c = tl.where(turned, tl.load(cos + row * half + lane, mask=lane < half, other=1.0)[None, :], 1.0)
    s = tl.where(turned, tl.load(sin + row * half + lane, mask=lane < half, other=0.0)[None, :], 0.0)
    place = out + row * (heads * width) + at
    tl.store(place, (left * c - right * s).to(out.dtype.element_ty), mask=inside)
    tl.store(place + half, (right * c + left * s).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["shift"])
def _rotate_out(
    grad, rows, shift, cos, sin, shared_grad, out, out_row,
    heads: tl.constexpr, rotated: tl.constexpr, width: tl.constexpr, block: tl.constexpr, head_block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * head_block + tl.arange(0, head_block)
    half: tl.constexpr = width // 2
    lane = tl.arange(0, block)
    inside = (head < heads)[:, None] & (lane < half)[None, :]
    at = head[:, None] * width + lane[None, :]
    place = grad + row * (heads * width) + at
    left = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(place + half, mask=inside, other=0.0).to(tl.float32)
    turned = (head < rotated)[:, None]
    c = tl.where(turned, tl.load(cos + row * half + lane, mask=lane < half, other=1.0)[None, :], 1.0)
    s = tl.where(turned, tl.load(sin + row * half + lane, mask=lane < half, other=0.0)[None, :], 0.0)
    new_left, new_right = left * c + right * s, right * c - left * s
    target = out + row * out_row + at
    tl.store(target, new_left.to(out.dtype.element_ty), mask=inside)
    tl.store(target + half, new_right.to(out.dtype.element_ty), mask=inside)
    sums = shared_grad + (tl.load(rows + row) + shift).to(tl.int64) * (heads * width) + at
    tl.store(sums, tl.load(sums, mask=inside, other=0.0) + new_left, mask=inside)
    tl.store(sums + half, tl.load(sums + half, mask=inside, other=0.0) + new_right, mask=inside)
