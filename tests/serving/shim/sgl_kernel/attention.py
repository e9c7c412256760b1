"""Attention over the paged KV cache.

Shapes: R rows (tokens), S tokens of a request, h query heads, v key/value heads, d head width, C cache slots.
"""

from __future__ import annotations

import torch
from torch import Tensor


def decode_attention_cpu(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key_scale: object,
    value_scale: object,
    out: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    loc: Tensor,
    attn_logits: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    scale: float,
    logit_cap: float,
    is_cross: bool,
    window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """One new token of each request: stores its key and value (if given) at `loc`, writes `out` [R, h, d].

    Args:
        q: [R, h, d], one row a request.
        key_cache, value_cache: [C, v, d].
        req_to_token: [requests, longest], cache slot of each token.
        seq_lens: tokens of each request, the new one included.
    """
    assert not is_cross and sinks is None
    if k is not None and v is not None:
        key_cache[loc.long()] = k.view(-1, *key_cache.shape[1:]).to(key_cache.dtype)
        value_cache[loc.long()] = v.view(-1, *value_cache.shape[1:]).to(value_cache.dtype)
    for row, (request, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        slots = req_to_token[request, :length].long()
        seen = _window(torch.ones(1, length, dtype=torch.bool), window)
        out[row : row + 1] = _attend(q[row : row + 1], key_cache[slots], value_cache[slots], scale, logit_cap, seen)


def extend_attention_cpu(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    out: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key_scale: object,
    value_scale: object,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_lens: Tensor,
    extend_starts: Tensor,
    max_extend: int,
    scale: float,
    logit_cap: float,
    is_cross: bool,
    window: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    is_causal: bool,
) -> None:
    """Several new tokens of each request; writes `out` [R, h, d].

    Args:
        q: [R, h, d], the new tokens of all requests; those of request b start at `extend_starts[b]`.
        k, v: [R, v, d], theirs. The cache need not hold them: multi-head latent attention keeps latents there, and
            prefills with whole heads. If they are not given, they are in the cache.
        seq_lens: tokens of each request, the `extend_lens` new ones included.
        tree_mask: for draft trees, which of a request's new tokens each new token sees, square by square.
    """
    assert not is_cross and sinks is None
    read = 0
    for request, length, new, start in zip(
        req_pool_indices.tolist(), seq_lens.tolist(), extend_lens.tolist(), extend_starts.tolist(), strict=True
    ):
        rows = slice(start, start + new)
        seen = torch.ones(new, length, dtype=torch.bool)
        if tree_mask is not None:
            seen[:, length - new :] = tree_mask.view(-1)[read : read + new * new].view(new, new).bool()
            read += new * new
        elif is_causal:
            seen = seen.tril(length - new)
        slots = req_to_token[request, : length if k is None else length - new].long()
        keys = _joined(key_cache[slots], None if k is None else k[rows])
        values = _joined(value_cache[slots], None if v is None else v[rows])
        out[rows] = _attend(q[rows], keys, values, scale, logit_cap, _window(seen, window))


def _joined(cached: Tensor, new: Tensor | None) -> Tensor:
    if new is None:
        return cached
    return torch.cat([cached, new.to(cached.dtype)]) if len(cached) else new


def _window(seen: Tensor, window: int) -> Tensor:
    """Takes away [S', S] what lies further back than a sliding window (0 or less: none)."""
    new, length = seen.shape
    return seen.triu(length - new - window + 1) if window and window > 0 else seen


def _attend(q: Tensor, keys: Tensor, values: Tensor, scale: float, logit_cap: float, seen: Tensor) -> Tensor:
    """[S', h, d] of queries [S', h, d], keys and values [S, v, d] and what each query sees, bool [S', S]."""
    group = q.shape[1] // keys.shape[1]
    keys, values = (part.float().repeat_interleave(group, 1) for part in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    if logit_cap and logit_cap > 0:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    shares = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", shares, values).to(q.dtype)
