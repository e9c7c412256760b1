"""Causal attention of packed documents (FlashAttention-2, arXiv 2307.08691), forward only.

A document never sees another. Keys may come in two parts: one of each key head, and one that all heads share (the
rotary part of multi-head latent attention, which then is never copied per head).

Legend: T tokens of all documents, N query heads, G key/value heads, C width of a head's own part, S of the shared
part, V of the values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

ROWS = 128
_KEYS = 64
_LOG2_E = 1.4426950408889634


def attention_tiles(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """Work for the kernel: int32 [tiles, 3] of a document's first token, the tile's first query, the document's end.

    Tiles with the most keys come first, so that the last to run are short.
    """
    tiles, begin = [], 0
    for length in lengths:
        tiles += [(begin, first, begin + length) for first in range(begin, begin + length, ROWS)]
        begin += length
    tiles.sort(key=lambda tile: tile[0] - tile[1])
    return torch.tensor(tiles, dtype=torch.int32).to(device)


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    shared_key: torch.Tensor | None,
    tiles: torch.Tensor,
    scaling: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention output [T, N, V], contiguous.

    Args:
        query: [T, N, C + S].
        key: [T, G, C]; N is a multiple of G.
        value: [T, G, V].
        shared_key: [T, S], or None if S is 0.
        tiles: from `attention_tiles`.
        scaling: of the scores.
        window: tokens that a query sees, itself included; None for all before it.
        sinks: [N], a learned score of each head that takes weight and gives nothing.
    """
    tokens, heads = query.shape[:2]
    own, width = key.shape[2], value.shape[2]
    shared = 0 if shared_key is None else shared_key.shape[1]
    for tensor in (query, key, value):
        assert tensor.stride(2) == 1
    out = query.new_empty(tokens, heads, width)
    rotary = query if shared_key is None else shared_key
    sink = query if sinks is None else sinks
    _attend[(heads, len(tiles))](
        query, key, value, rotary, sink, out, tiles, scaling * _LOG2_E, window or 0,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        rotary.stride(0), out.stride(0), out.stride(1),
        heads // key.shape[1], own, max(shared, 16), width, shared > 0,
        window is not None, sinks is not None, ROWS, _KEYS,
        num_warps=8, num_stages=3,
    )  # fmt: skip
    return out


@triton.jit
def _attend(
    query, key, value, rotary, sink, out, tiles, scale, window,
    q_token, q_head, k_token, k_head, v_token, v_head, r_token, o_token, o_head,
    share: tl.constexpr, own: tl.constexpr, shared: tl.constexpr, width: tl.constexpr, two: tl.constexpr,
    sliding: tl.constexpr, sunk: tl.constexpr, rows: tl.constexpr, keys: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    tile = tl.program_id(1)
    begin = tl.load(tiles + tile * 3)
    first = tl.load(tiles + tile * 3 + 1)
    end = tl.load(tiles + tile * 3 + 2)
    row = first + tl.arange(0, rows)
    lane = tl.arange(0, keys)
    c, s, v = tl.arange(0, own), tl.arange(0, shared), tl.arange(0, width)
    real = row < end
    q_row = query + row.to(tl.int64)[:, None] * q_token + head * q_head
    q = tl.load(q_row + c[None, :], mask=real[:, None], other=0.0)
    if two:
        q_shared = tl.load(q_row + own + s[None, :], mask=real[:, None], other=0.0)
    key += (head // share).to(tl.int64) * k_head
    value += (head // share).to(tl.int64) * v_head
    if sunk:  # as a first key whose value is nothing
        peak = tl.zeros([rows], dtype=tl.float32) + tl.load(sink + head).to(tl.float32) * 1.4426950408889634
        total = tl.full([rows], 1.0, dtype=tl.float32)
    else:
        peak = tl.full([rows], -1e30, dtype=tl.float32)  # finite: a row may see none of a window's first keys
        total = tl.zeros([rows], dtype=tl.float32)
    mixed = tl.zeros([rows, width], dtype=tl.float32)
    last = tl.minimum(first + rows, end)
    if sliding:
        begin = tl.maximum(begin, first - window + 1)
    for at in range(begin, last, keys):
        column = at + lane
        there = column < last
        wide = column.to(tl.int64)
        k = tl.load(key + wide[None, :] * k_token + c[:, None], mask=there[None, :], other=0.0)
        score = tl.dot(q, k)
        if two:
            r = tl.load(rotary + wide[None, :] * r_token + s[:, None], mask=there[None, :], other=0.0)
            score = tl.dot(q_shared, r, score)
        if at + keys > first:
            score = tl.where(column[None, :] <= row[:, None], score, -float("inf"))
        if sliding:
            score = tl.where(row[:, None] - column[None, :] < window, score, -float("inf"))
        high = tl.maximum(peak, tl.max(score, axis=1) * scale)
        weight = tl.exp2(score * scale - high[:, None])
        fade = tl.exp2(peak - high)
        total = total * fade + tl.sum(weight, axis=1)
        values = tl.load(value + wide[:, None] * v_token + v[None, :], mask=there[:, None], other=0.0)
        mixed = tl.dot(weight.to(values.dtype), values, mixed * fade[:, None])
        peak = high
    result = (mixed / total[:, None]).to(out.dtype.element_ty)
    o_row = out + row.to(tl.int64)[:, None] * o_token + head * o_head
    tl.store(o_row + v[None, :], result, mask=real[:, None])
