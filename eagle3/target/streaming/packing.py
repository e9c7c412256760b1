"""Documents side by side in one row, without padding: which tokens go through a layer together, and attention that
keeps them apart.

Legend: T tokens of a micro-batch, N query heads, G key/value heads, C width of queries and keys, V of values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

ATTENTION = "eagle3_packed"
_current: ContextVar[MicroBatch] = ContextVar("micro_batch")


@dataclass(frozen=True)
class MicroBatch:
    """Whole documents that go through a layer together.

    Attributes:
        begin: row of its first token in the chunk.
        documents: token ids of each.
        device: where it is computed.
    """

    begin: int
    documents: tuple[tuple[int, ...], ...]
    device: torch.device

    @cached_property
    def lengths(self) -> list[int]:
        return [len(document) for document in self.documents]

    @cached_property
    def end(self) -> int:
        """Row after its last token in the chunk."""
        return self.begin + sum(self.lengths)

    @cached_property
    def input_ids(self) -> torch.Tensor:
        """int64 [1, T]."""
        return torch.tensor([token for document in self.documents for token in document]).unsqueeze(0).to(self.device)

    @cached_property
    def position_ids(self) -> torch.Tensor:
        """int64 [1, T], from 0 in each document."""
        return torch.cat([torch.arange(length) for length in self.lengths]).unsqueeze(0).to(self.device)

    @cached_property
    def tiles(self) -> torch.Tensor:
        """The attention kernel's work."""
        from eagle3.target.streaming.kernels.attention import attention_tiles

        return attention_tiles(self.lengths, self.device)


def micro_batches(batch: Sequence[Sequence[int]], most: int, device: torch.device) -> list[MicroBatch]:
    """Cuts a chunk's documents, in order, into micro-batches of at most `most` tokens (a longer one is alone)."""
    groups: list[list[tuple[int, ...]]] = []
    filled = most
    for document in batch:
        if filled + len(document) > most:
            groups.append([])
            filled = 0
        groups[-1].append(tuple(document))
        filled += len(document)
    result, begin = [], 0
    for group in groups:
        result.append(MicroBatch(begin, tuple(group), device))
        begin = result[-1].end
    return result


@contextmanager
def packed(micro: MicroBatch) -> Iterator[None]:
    """`with packed(micro): layer(...)`: the attention inside is that of this micro-batch's documents."""
    token = _current.set(micro)
    try:
        yield
    finally:
        _current.reset(token)


def current() -> MicroBatch:
    """The micro-batch that is being computed."""
    return _current.get()


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention interface: query [1, N, T, C], key [1, G, T, C], value [1, G, T, V] -> [1, T, N, V]."""
    micro = current()
    assert attention_mask is None and query.shape[0] == 1 and query.shape[2] == sum(micro.lengths)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.is_cuda and _fits_kernel(query, value):
        from eagle3.target.streaming.kernels.attention import packed_attention

        q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
        mixed = packed_attention(q, k, v, None, micro.tiles, scaling, sliding_window, s_aux)
        return mixed.unsqueeze(0), None
    documents = zip(*(states.split(_lengths(micro), 2) for states in (query, key, value)), strict=True)
    outputs = [_one_document(q, k, v, scaling, sliding_window, s_aux) for q, k, v in documents]
    return torch.cat(outputs, 2).transpose(1, 2), None


def _lengths(micro: MicroBatch) -> list[int]:
    return micro.lengths


def _fits_kernel(query: torch.Tensor, value: torch.Tensor) -> bool:
    return query.dtype != torch.float32 and all(
        width in (16, 32, 64, 128) for width in (query.shape[-1], value.shape[-1])
    )


def _one_document(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Causal attention of one document, [1, N, T, V].

    Args:
        window: tokens that a query sees, itself included.
        sinks: [N], a learned score of each head that takes weight and gives nothing.
    """
    if window is None and sinks is None:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    share, tokens = query.shape[1] // key.shape[1], query.shape[2]
    scores = query @ key.repeat_interleave(share, 1).transpose(-2, -1) * scaling
    distance = torch.arange(tokens, device=query.device)[:, None] - torch.arange(tokens, device=query.device)
    hidden = (distance < 0) | (distance >= (window or tokens))
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(1, -1, tokens, 1)], -1)
    weights = torch.softmax(scores.float(), -1)[..., :tokens].to(value.dtype)
    return weights @ value.repeat_interleave(share, 1)


def _no_mask(*_: Any, **__: Any) -> None:
    """Documents are kept apart by `_attention` itself."""


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _no_mask)
