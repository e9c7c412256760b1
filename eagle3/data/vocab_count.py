"""How often each target token is supervised: what the draft vocab is chosen from.

Shapes: V target vocab, T tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from eagle3.data.store import StoreReader


def count_supervised(reader: StoreReader, indices: Iterable[int] | None = None) -> torch.Tensor:
    """int64 [V]: occurrences of each target id at supervised positions.

    Always counted from the store itself; nothing is cached.

    Args:
        reader: the store.
        indices: samples to count (default: all), e.g. the training part.
    """
    chosen = list(range(len(reader)) if indices is None else indices)
    with reader.ahead([[index] for index in chosen], tokens_only=True):
        return count_tokens(map(reader.read_tokens, chosen), reader.contract.vocab_size)


def count_tokens(samples: Iterable[tuple[torch.Tensor, torch.Tensor]], vocab_size: int) -> torch.Tensor:
    """int64 [V]: occurrences of each target id at supervised positions of samples: integers [T] and bool [T] each."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for input_ids, loss_mask in samples:
        supervised = input_ids[loss_mask].long()
        counts.index_add_(0, supervised, torch.ones_like(supervised))
    return counts
