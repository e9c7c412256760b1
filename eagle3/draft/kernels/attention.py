"""Attention of chains: step-0 keys of their own document up to their own token, and their own later keys
(FlashAttention-2, arXiv 2307.08691).

Legend: R rows, N rows of all steps, S sources, h query heads, v key/value heads, d head width, k later steps so far.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from eagle3.draft.kernels import tiles

LOG2_E = 1.4426950408889634


def attend(
    query: torch.Tensor,
    keys_values: torch.Tensor,
    own: torch.Tensor,
    begins: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
) -> None:
    """As `plain.attend`, but `sums` are logarithms to the base 2; all contiguous, `own` but for its first dimension."""
    rows, heads, width = query.shape
    shape = tiles.tile("forward", width, query.device)
    _attend[(heads, triton.cdiv(rows, shape["block_rows"]))](
        query, keys_values, own, begins, ends, out, sums, rows, len(own), own.stride(0), width**-0.5 * LOG2_E,
        heads, keys_values.shape[1] // 2, width, block_width(width), **shape,
    )  # fmt: skip


def attend_grad_query(
    query: torch.Tensor,
    keys_values: torch.Tensor,
    own: torch.Tensor,
    begins: torch.Tensor,
    ends: torch.Tensor,
    output: torch.Tensor,
    grad: torch.Tensor,
    sums: torch.Tensor,
    means: torch.Tensor,
) -> torch.Tensor:
    """As `plain.attend_grad_query`, with `sums` of `attend` here."""
    rows, heads, width = query.shape
    result, shape = torch.empty_like(query), tiles.tile("queries", width, query.device)
    _grad_query[(heads, triton.cdiv(rows, shape["block_rows"]))](
        query, keys_values, own, begins, ends, output, grad, sums, means, result, rows, len(own), own.stride(0),
        width**-0.5, heads, keys_values.shape[1] // 2, width, block_width(width), **shape,
    )  # fmt: skip
    return result


def block_width(width: int) -> int:
    """The head width as kernels hold it."""
    return max(triton.next_power_of_2(width), 16)


@triton.jit
def _cuts(begin, end, real, block_keys: tl.constexpr):
    """Keys low .. full are seen by some of the rows, full .. rest (whole blocks) by all, rest .. high again by some."""
    low, high = tl.min(begin, axis=0), tl.max(end, axis=0) + 1
    seen_from = tl.max(tl.where(real, begin, -1), axis=0)
    seen_to = tl.min(tl.where(real, end, 1 << 30), axis=0) + 1
    full = tl.minimum(low + tl.cdiv(seen_from - low, block_keys) * block_keys, high)
    rest = full + tl.maximum(seen_to - full, 0) // block_keys * block_keys
    return low, full, rest, high


@triton.jit
def _first(index, low, full, rest, before, partly: tl.constexpr, block_keys: tl.constexpr):
    """The first key of a block: of those that all rows see, or, partly, of those before and after them."""
    if partly == 1:
        return tl.where(index < before, low + index * block_keys, rest + (index - before) * block_keys)
    else:
        return full + index * block_keys


@triton.jit(do_not_specialize=["rows", "steps"])
def _attend(
    query, pairs, own, begins, ends, out, sums, rows, steps, own_step, scale,
    heads: tl.constexpr, key_heads: tl.constexpr, width: tl.constexpr, block: tl.constexpr,
    block_rows: tl.constexpr, block_keys: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    row = (tl.num_programs(1) - 1 - tl.program_id(1)) * block_rows + tl.arange(0, block_rows)
    real = row < rows
    lane = tl.arange(0, block)
    inside = lane < width
    chosen = real[:, None] & inside[None, :]
    at = row.to(tl.int64)[:, None] * (heads * width) + head * width + lane[None, :]
    q = tl.load(query + at, mask=chosen, other=0.0)
    begin = tl.load(begins + row, mask=real, other=1 << 30)
    end = tl.load(ends + row, mask=real, other=-1)
    low, full, rest, high = _cuts(begin, end, real, block_keys)
    before = tl.cdiv(full - low, block_keys)
    counts = ((rest - full) // block_keys, before + tl.cdiv(high - rest, block_keys))
    pair_row: tl.constexpr = 2 * key_heads * width
    pair_at = (head // (heads // key_heads)) * width
    peak = tl.full([block_rows], -1e30, dtype=tl.float32)
    total = tl.zeros([block_rows], dtype=tl.float32)
    mixed = tl.zeros([block_rows, block], dtype=tl.float32)
    for partly in tl.static_range(2):
        for index in range(counts[partly]):
            first = _first(index, low, full, rest, before, partly, block_keys)
            column = first + tl.arange(0, block_keys)
            there = (column < high) | (partly == 0)
            place = pairs + column.to(tl.int64) * pair_row + pair_at
            key = tl.load(place[None, :] + lane[:, None], mask=there[None, :] & inside[:, None], other=0.0)
            score = tl.dot(q, key, input_precision="ieee") * scale
            if partly == 1:
                sees = (column[None, :] >= begin[:, None]) & (column[None, :] <= end[:, None])
                score = tl.where(sees, score, -float("inf"))
            top = tl.maximum(peak, tl.max(score, axis=1))
            weight = tl.exp2(score - top[:, None])
            fade = tl.exp2(peak - top)
            total = total * fade + tl.sum(weight, axis=1)
            value = tl.load(
                place[:, None] + key_heads * width + lane[None, :], mask=there[:, None] & inside[None, :], other=0.0
            )
            mixed = tl.dot(weight.to(value.dtype), value, mixed * fade[:, None], input_precision="ieee")
            peak = top
    for _ in range(steps):
        place = own + row.to(tl.int64) * pair_row + pair_at
        own += own_step
        key = tl.load(place[:, None] + lane[None, :], mask=chosen, other=0.0).to(tl.float32)
        value = tl.load(place[:, None] + key_heads * width + lane[None, :], mask=chosen, other=0.0).to(tl.float32)
        wide = tl.load(query + at, mask=chosen, other=0.0).to(tl.float32)  # again: frees registers before
        score = tl.sum(wide * key, axis=1) * scale
        top = tl.maximum(peak, score)
        weight = tl.exp2(score - top)
        fade = tl.exp2(peak - top)
        total = total * fade + weight
        mixed = mixed * fade[:, None] + weight[:, None] * value
        peak = top
    tl.store(out + at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=chosen)
    tl.store(sums + row.to(tl.int64) * heads + head, peak + tl.log2(total), mask=real)


@triton.jit(do_not_specialize=["rows", "steps"])
def _grad_query(
    query, pairs, own, begins, ends, output, grad, sums, means, result, rows, steps, own_step, scaling,
    heads: tl.constexpr, key_heads: tl.constexpr, width: tl.constexpr, block: tl.constexpr,
    block_rows: tl.constexpr, block_keys: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    row = (tl.num_programs(1) - 1 - tl.program_id(1)) * block_rows + tl.arange(0, block_rows)
    real = row < rows
    lane = tl.arange(0, block)
    inside = lane < width
    chosen = real[:, None] & inside[None, :]
    at = row.to(tl.int64)[:, None] * (heads * width) + head * width + lane[None, :]
    q = tl.load(query + at, mask=chosen, other=0.0)
    slope = tl.load(grad + at, mask=chosen, other=0.0)
    mean = tl.sum(slope.to(tl.float32) * tl.load(output + at, mask=chosen, other=0.0).to(tl.float32), axis=1)
    by_head = row.to(tl.int64) * heads + head
    tl.store(means + by_head, mean, mask=real)
    log_sum = tl.load(sums + by_head, mask=real, other=0.0)
    begin = tl.load(begins + row, mask=real, other=1 << 30)
    end = tl.load(ends + row, mask=real, other=-1)
    low, full, rest, high = _cuts(begin, end, real, block_keys)
    before = tl.cdiv(full - low, block_keys)
    counts = ((rest - full) // block_keys, before + tl.cdiv(high - rest, block_keys))
    pair_row: tl.constexpr = 2 * key_heads * width
    pair_at = (head // (heads // key_heads)) * width
    scale = scaling * 1.4426950408889634
    found = tl.zeros([block_rows, block], dtype=tl.float32)
    for partly in tl.static_range(2):
        for index in range(counts[partly]):
            first = _first(index, low, full, rest, before, partly, block_keys)
            column = first + tl.arange(0, block_keys)
            there = (column < high) | (partly == 0)
            place = pairs + column.to(tl.int64) * pair_row + pair_at
            chosen_keys = there[:, None] & inside[None, :]
            key = tl.load(place[:, None] + lane[None, :], mask=chosen_keys, other=0.0)
            value = tl.load(place[:, None] + key_heads * width + lane[None, :], mask=chosen_keys, other=0.0)
            score = tl.dot(q, tl.trans(key), input_precision="ieee") * scale
            if partly == 1:
                sees = (column[None, :] >= begin[:, None]) & (column[None, :] <= end[:, None])
                score = tl.where(sees, score, -float("inf"))
            weight = tl.exp2(score - log_sum[:, None])
            reached = tl.dot(slope, tl.trans(value), input_precision="ieee")
            change = weight * (reached - mean[:, None])
            found = tl.dot(change.to(key.dtype), key, found, input_precision="ieee")
    for _ in range(steps):
        place = own + row.to(tl.int64) * pair_row + pair_at
        own += own_step
        key = tl.load(place[:, None] + lane[None, :], mask=chosen, other=0.0).to(tl.float32)
        value = tl.load(place[:, None] + key_heads * width + lane[None, :], mask=chosen, other=0.0).to(tl.float32)
        wide = tl.load(query + at, mask=chosen, other=0.0).to(tl.float32)  # again: frees registers before
        weight = tl.exp2(tl.sum(wide * key, axis=1) * scale - log_sum)
        wide = tl.load(grad + at, mask=chosen, other=0.0).to(tl.float32)
        change = weight * (tl.sum(wide * value, axis=1) - mean)
        found += change[:, None] * key
    tl.store(result + at, (found * scaling).to(result.dtype.element_ty), mask=chosen)
