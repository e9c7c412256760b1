"""Bookkeeping of the paged KV cache: which cache slot holds which token of which request."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, target_loc: Tensor, source_loc: Tensor) -> None:
    """Moves cache rows from `source_loc` to `target_loc` in every buffer; the two may overlap.

    Args:
        data_ptrs: addresses of the buffers.
        strides: bytes of one row of each buffer.
    """
    sources, targets = source_loc.tolist(), target_loc.tolist()
    for base, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(base + source * stride, stride) for source in sources]
        for target, row in zip(targets, rows, strict=True):
            ctypes.memmove(base + target * stride, row, stride)


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out_cache_loc: Tensor, pool_len: int = 0
) -> None:
    """Enters the slots `out_cache_loc` of all requests, one after another, as their tokens start..end."""
    read = 0
    for request, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        slots = out_cache_loc[read : read + last - first]
        req_to_token[request, first:last] = slots.to(req_to_token.dtype)
        read += last - first


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out_cache_loc: Tensor, pool_len: int = 0
) -> None:
    """Reads back what `assign_req_to_token_pool_cpu` enters."""
    written = 0
    for request, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        slots = req_to_token[request, first:last]
        out_cache_loc[written : written + last - first] = slots.to(out_cache_loc.dtype)
        written += last - first


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """The slots of the `topk * num_steps` tokens that follow each request's last one."""
    count = topk * num_steps
    for row, (request, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        slots = req_to_token[request, length : length + count]
        out_cache_loc[row * count : (row + 1) * count] = slots.to(out_cache_loc.dtype)


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, topk: int, num_steps: int, pool_len: int
) -> Tensor:
    """[requests * topk, pool_len]: for each draft branch the slots of its request's tokens, then of its own drafts."""
    rows = []
    for request, length in zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True):
        for branch in range(topk):
            row = torch.zeros(pool_len, dtype=req_to_token.dtype)
            row[:length] = req_to_token[request, :length]
            first = length + branch * num_steps
            drafts = req_to_token[request, first : first + num_steps]
            row[length : length + len(drafts)] = drafts
            rows.append(row)
    return torch.stack(rows)


def fill_bonus_tokens_cpu(accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int) -> None:
    """The last accepted token of each request."""
    tokens = accept_tokens.reshape(-1)
    for row, count in enumerate(accept_lens.tolist()):
        bonus_tokens[row] = tokens[accept_stride * row + count - 1]


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor) -> None:
    """The slots of the accepted tokens; -1 in `accept_index` is none."""
    chosen = accept_index[accept_index > -1].long()
    accept_out_cache_loc[: len(chosen)] = out_cache_loc[chosen]


def rotate_input_ids_cpu(
    input_ids: Tensor, starts: Tensor, lengths: Tensor, new_tokens: Tensor, select_index: Tensor | None = None
) -> None:
    """Shifts each request's ids one to the left and puts its new token at the end, or at `select_index`.

    This is what puts token i + 1 beside the state of token i.
    """
    tokens = new_tokens.reshape(-1)
    for row, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        if length == 0:
            continue
        end = start + length - 1
        input_ids[start:end] = input_ids[start + 1 : end + 1].clone()
        input_ids[end if select_index is None else int(select_index[row])] = tokens[row]
