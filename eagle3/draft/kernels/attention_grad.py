"""Gradients of keys and values: of step 0's, which many rows read, and of a later step's, which one chain reads.

Legend: R rows, N rows of all steps, S sources, h query heads, v key/value heads, d head width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from eagle3.draft.fused.layout import KEY_BLOCK, QUERY_BLOCK, Chunk
from eagle3.draft.kernels import tiles
from eagle3.draft.kernels.attention import block_width

_OWN_ROWS = 32
_PROGRAMS = 2000  # enough to fill a GPU of 132 processors evenly


def source_sums(sources: int, key_heads: int, group: int, head_dim: int, like: torch.Tensor) -> torch.Tensor:
    """As `plain.source_sums`: a first dimension for each part into which the query heads of a key head are split."""
    programs = triton.cdiv(sources, KEY_BLOCK) * key_heads
    splits = min(group, triton.cdiv(_PROGRAMS, programs))
    return torch.zeros(splits, sources, 2 * key_heads, head_dim, dtype=torch.float32, device=like.device)


def attend_grad_sources(
    query: torch.Tensor,
    keys_values: torch.Tensor,
    grad: torch.Tensor,
    sums: torch.Tensor,
    means: torch.Tensor,
    chunk: Chunk,
    total: torch.Tensor,
) -> None:
    """As `plain.attend_grad_sources`; all contiguous."""
    rows, heads, width = query.shape
    sources, key_heads = len(keys_values), keys_values.shape[1] // 2
    group, splits = heads // key_heads, len(total)
    _grad_sources[(key_heads, triton.cdiv(sources, KEY_BLOCK), splits)](
        query, keys_values, grad, sums, means, chunk.begins, chunk.ends, chunk.reader_starts, chunk.readers, total,
        rows, sources, width**-0.5, heads, key_heads, width, block_width(width), triton.cdiv(group, splits),
        QUERY_BLOCK, KEY_BLOCK, **tiles.tile("sources", width, query.device),
    )  # fmt: skip


def attend_grad_own(
    step: int,
    query: torch.Tensor,
    own: torch.Tensor,
    grad: torch.Tensor,
    sums: torch.Tensor,
    means: torch.Tensor,
    chunk: Chunk,
) -> torch.Tensor:
    """As `plain.attend_grad_own`; all contiguous."""
    _, heads, width = query.shape
    rows, key_heads = chunk.counts[step], own.shape[2] // 2
    result = torch.empty(rows, 2 * key_heads, width, dtype=query.dtype, device=query.device)
    _grad_own[(triton.cdiv(rows, _OWN_ROWS), key_heads)](
        query, own[step - 1], grad, sums, means, chunk.step_starts, result, rows, step, len(chunk.counts), width**-0.5,
        heads, key_heads, width, block_width(width), _OWN_ROWS, num_warps=4,
    )  # fmt: skip
    return result


@triton.jit(do_not_specialize=["rows", "sources"])
def _grad_sources(
    query, pairs, grad, sums, means, begins, ends, starts, readers, total, rows, sources, scaling,
    heads: tl.constexpr, key_heads: tl.constexpr, width: tl.constexpr, block: tl.constexpr, share: tl.constexpr,
    block_rows: tl.constexpr, block_keys: tl.constexpr,
):  # fmt: skip
    key_head, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = heads // key_heads
    pair_row: tl.constexpr = 2 * key_heads * width
    column = tile * block_keys + tl.arange(0, block_keys)
    there = column < sources
    lane = tl.arange(0, block)
    inside = lane < width
    chosen = there[:, None] & inside[None, :]
    at = column.to(tl.int64)[:, None] * pair_row + key_head * width + lane[None, :]
    key = tl.load(pairs + at, mask=chosen, other=0.0)
    value = tl.load(pairs + at + key_heads * width, mask=chosen, other=0.0)
    key_grad = tl.zeros([block_keys, block], dtype=tl.float32)
    value_grad = tl.zeros([block_keys, block], dtype=tl.float32)
    scale = scaling * 1.4426950408889634
    for member in range(split * share, tl.minimum(split * share + share, group)):
        head = key_head * group + member
        for partly in tl.static_range(2):
            for index in range(tl.load(starts + 2 * tile + partly), tl.load(starts + 2 * tile + partly + 1)):
                row = tl.load(readers + index) * block_rows + tl.arange(0, block_rows)
                real = (row < rows) | (partly == 0)
                place = row.to(tl.int64)[:, None] * (heads * width) + head * width + lane[None, :]
                q = tl.load(query + place, mask=real[:, None] & inside[None, :], other=0.0)
                slope = tl.load(grad + place, mask=real[:, None] & inside[None, :], other=0.0)
                by_head = row.to(tl.int64) * heads + head
                log_sum = tl.load(sums + by_head, mask=real, other=0.0)
                mean = tl.load(means + by_head, mask=real, other=0.0)
                score = tl.dot(key, tl.trans(q), input_precision="ieee") * scale
                weight = tl.exp2(score - log_sum[None, :])
                if partly == 1:
                    begin = tl.load(begins + row, mask=real, other=1 << 30)
                    end = tl.load(ends + row, mask=real, other=-1)
                    sees = (column[:, None] >= begin[None, :]) & (column[:, None] <= end[None, :])
                    weight = tl.where(sees, weight, 0.0)
                value_grad = tl.dot(weight.to(slope.dtype), slope, value_grad, input_precision="ieee")
                reached = tl.dot(value, tl.trans(slope), input_precision="ieee")
                change = weight * (reached - mean[None, :])
                key_grad = tl.dot(change.to(q.dtype), q, key_grad, input_precision="ieee")
    goal = total + split.to(tl.int64) * sources * pair_row + at
    tl.store(goal, tl.load(goal, mask=chosen, other=0.0) + key_grad * scaling, mask=chosen)
    goal += key_heads * width
    tl.store(goal, tl.load(goal, mask=chosen, other=0.0) + value_grad, mask=chosen)


@triton.jit(do_not_specialize=["rows", "step"])
def _grad_own(
    query, own, grad, sums, means, starts, result, rows, step, steps: tl.constexpr, scaling,
    heads: tl.constexpr, key_heads: tl.constexpr, width: tl.constexpr, block: tl.constexpr, block_rows: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    key_head = tl.program_id(1)
    group: tl.constexpr = heads // key_heads
    pair_row: tl.constexpr = 2 * key_heads * width
    lane = tl.arange(0, block)
    inside = lane < width
    chosen = (row < rows)[:, None] & inside[None, :]
    at = row.to(tl.int64)[:, None] * pair_row + key_head * width + lane[None, :]
    key = tl.load(own + at, mask=chosen, other=0.0).to(tl.float32)
    value = tl.load(own + at + key_heads * width, mask=chosen, other=0.0).to(tl.float32)
    key_grad = tl.zeros([block_rows, block], dtype=tl.float32)
    value_grad = tl.zeros([block_rows, block], dtype=tl.float32)
    for reader in range(step, steps):
        first = tl.load(starts + reader)
        real = row < tl.load(starts + reader + 1) - first
        wide_row = (first + row).to(tl.int64)
        for member in range(group):
            head = key_head * group + member
            place = wide_row[:, None] * (heads * width) + head * width + lane[None, :]
            q = tl.load(query + place, mask=real[:, None] & inside[None, :], other=0.0).to(tl.float32)
            slope = tl.load(grad + place, mask=real[:, None] & inside[None, :], other=0.0).to(tl.float32)
            log_sum = tl.load(sums + wide_row * heads + head, mask=real, other=0.0)
            mean = tl.load(means + wide_row * heads + head, mask=real, other=0.0)
            weight = tl.exp2(tl.sum(q * key, axis=1) * (scaling * 1.4426950408889634) - log_sum)
            weight = tl.where(real, weight, 0.0)
            change = weight * (tl.sum(slope * value, axis=1) - mean) * scaling
            key_grad += change[:, None] * q
            value_grad += weight[:, None] * slope
    tl.store(result + at, key_grad.to(result.dtype.element_ty), mask=chosen)
    tl.store(result + at + key_heads * width, value_grad.to(result.dtype.element_ty), mask=chosen)
