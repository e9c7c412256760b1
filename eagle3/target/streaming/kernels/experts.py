"""What a mixture of experts does around its grouped matrix products.

Legend: T tokens, K experts of a token, R = T * K rows sorted by expert, H hidden, I expert width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def gather_rows(states: torch.Tensor, source: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out[r] = states[source[r]]; states [T, H], source int32 [R], out [R, H]."""
    hidden = states.shape[1]
    block = min(triton.next_power_of_2(hidden), 2048)
    _gather[(len(source), triton.cdiv(hidden, block))](states, source, out, hidden, block)
    return out


@triton.jit
def _gather(states, source, out, hidden, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    token = tl.load(source + row).to(tl.int64)
    inside = column < hidden
    value = tl.load(states + token * hidden + column, mask=inside)
    tl.store(out + row * hidden + column, value, mask=inside)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, both [R, I] with rows of equal stride; silu is rounded before the product, as torch does."""
    rows, width = gate.shape
    out = gate.new_empty(rows, width)
    assert gate.stride() == up.stride() and gate.stride(1) == 1
    block = min(triton.next_power_of_2(width), 2048)
    _swiglu[(rows, triton.cdiv(width, block))](gate, up, out, gate.stride(0), width, block)
    return out


@triton.jit
def _swiglu(gate, up, out, stride, width, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    first = tl.load(gate + row * stride + column, mask=inside)
    second = tl.load(up + row * stride + column, mask=inside)
    wide = first.to(tl.float32)
    active = (wide / (1.0 + tl.exp(-wide))).to(first.dtype)
    value = active.to(tl.float32) * second.to(tl.float32)
    tl.store(out + row * width + column, value.to(first.dtype), mask=inside)


def combine(
    rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """out[t] = sum over k of weights[t, k] * rows[place[t, k]], summed in float32, plus shared[t].

    Args:
        rows: [R, H], sorted by expert.
        place: int32 [T, K], where each of a token's rows is.
        weights: float32 [T, K].
        shared: [T, H] or None.
        out: [T, H]; may be `shared`.
    """
    tokens, slots = place.shape
    hidden = rows.shape[1]
    block = min(triton.next_power_of_2(hidden), 1024)
    grid = (tokens, triton.cdiv(hidden, block))
    add = out if shared is None else shared
    _combine[grid](rows, place, weights, add, out, hidden, slots, shared is not None, block)
    return out


@triton.jit
def _combine(rows, place, weights, shared, out, hidden, slots: tl.constexpr, add: tl.constexpr, block: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < hidden
    total = tl.zeros([block], dtype=tl.float32)
    for slot in tl.static_range(slots):
        row = tl.load(place + token * slots + slot).to(tl.int64)
        weight = tl.load(weights + token * slots + slot)
        total += weight * tl.load(rows + row * hidden + column, mask=inside, other=0.0).to(tl.float32)
    result = total.to(out.dtype.element_ty)
    if add:
        extra = tl.load(shared + token * hidden + column, mask=inside, other=0.0).to(tl.float32)
        result = (result.to(tl.float32) + extra).to(out.dtype.element_ty)
    tl.store(out + token * hidden + column, result, mask=inside)


def accumulate(
    rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor, first: int, total: torch.Tensor
) -> torch.Tensor:
    """total[t] += sum of weights[t, k] * rows[place[t, k] - first] over those k whose row is among `rows`.

    Args:
        rows: [r, H], rows `first` to `first + r` of all that are sorted by expert.
        place, weights: as for `combine`.
        total: float32 [T, H].
    """
    tokens, slots = place.shape
    hidden = rows.shape[1]
    block = min(triton.next_power_of_2(hidden), 1024)
    grid = (tokens, triton.cdiv(hidden, block))
    _accumulate[grid](rows, place, weights, total, first, first + len(rows), hidden, slots, block)
    return total


@triton.jit
def _accumulate(rows, place, weights, total, first, last, hidden, slots: tl.constexpr, block: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < hidden
    result = tl.load(total + token * hidden + column, mask=inside, other=0.0)
    for slot in tl.static_range(slots):
        row = tl.load(place + token * slots + slot).to(tl.int64)
        here = (row >= first) & (row < last)
        weight = tl.load(weights + token * slots + slot)
        value = tl.load(rows + (row - first) * hidden + column, mask=inside & here, other=0.0)
        result += weight * value.to(tl.float32)
    tl.store(total + token * hidden + column, result, mask=inside)
