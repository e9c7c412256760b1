"""How often each token is supervised: what the draft vocab is chosen from.

Shapes: V target vocab, T tokens of a sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import torch

from eagle3.data.chat import TokenSample
from eagle3.data.store import StoreReader

MOST_SOURCES = 20
"""Sources that are counted on their own: each takes 8 bytes a token of the target's vocab."""
OTHERS = "others"


@dataclass
class SupervisedCounts:
    """Occurrences of each target id at supervised positions.

    Attributes:
        total: int64 [V].
        by_source: int64 [V] of each source, where samples name one; of the first `MOST_SOURCES`, the rest as `others`.
        samples: how many were counted.
        of: how many there are.
        keeps_parts: only a share of them is counted, and `parts` are its samples' sources and supervised ids.
    """

    total: torch.Tensor
    of: int
    keeps_parts: bool
    by_source: dict[str, torch.Tensor] = field(default_factory=dict)
    samples: int = 0
    parts: list[tuple[str | None, torch.Tensor]] = field(default_factory=list)

    @classmethod
    def empty(cls, vocab_size: int) -> SupervisedCounts:
        """Of no sample; `of` is to be set when all have been added."""
        return cls(torch.zeros(vocab_size, dtype=torch.int64), 0, keeps_parts=False)

    def add_sample(self, sample: TokenSample) -> None:
        """Counts a rendered conversation."""
        mask = torch.tensor(sample.loss_mask, dtype=torch.bool)
        self.add(torch.tensor(sample.input_ids)[mask].long(), sample.source)

    def add(self, supervised: torch.Tensor, source: str | None) -> None:
        """Counts a sample's supervised ids."""
        self.samples += 1
        _add(self.total, supervised)
        if source is not None:
            if source not in self.by_source and len(self.by_source) >= MOST_SOURCES:
                source = OTHERS
            _add(self.by_source.setdefault(source, torch.zeros_like(self.total)), supervised)
        if self.keeps_parts:
            self.parts.append((source, supervised))


def count_supervised(reader: StoreReader, indices: Iterable[int] | None = None) -> torch.Tensor:
    """int64 [V]: occurrences of each target id at supervised positions.

    Always counted from the store itself; nothing is cached.

    Args:
        reader: the store.
        indices: samples to count (default: all), e.g. the training part.
    """
    chosen = list(range(len(reader)) if indices is None else indices)
    return count_tokens(_store_tokens(reader, chosen), reader.contract.vocab_size)


def count_tokens(samples: Iterable[tuple[torch.Tensor, torch.Tensor]], vocab_size: int) -> torch.Tensor:
    """int64 [V]: occurrences of each target id at supervised positions of samples: integers [T] and bool [T] each."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for input_ids, loss_mask in samples:
        _add(counts, input_ids[loss_mask].long())
    return counts


def count_store(reader: StoreReader, share: int | None = None, seed: int = 0) -> SupervisedCounts:
    """Counts of a store by source, or of `share` of its samples, drawn at random by `seed`."""
    chosen = draw(len(reader), share, seed)
    counts = _empty(reader.contract.vocab_size, len(chosen), len(reader))
    sources = largest_sources([reader.samples[index].source for index in chosen])
    for source, (input_ids, loss_mask) in zip(sources, _store_tokens(reader, chosen), strict=True):
        counts.add(input_ids[loss_mask].long(), source)
    return counts


def count_samples(
    samples: Sequence[TokenSample], vocab_size: int, share: int | None = None, seed: int = 0
) -> SupervisedCounts:
    """Counts of rendered conversations by source, or of `share` of them, drawn at random by `seed`."""
    chosen = draw(len(samples), share, seed)
    counts = _empty(vocab_size, len(chosen), len(samples))
    for index, source in zip(chosen, largest_sources([samples[index].source for index in chosen]), strict=True):
        counts.add_sample(replace(samples[index], source=source))
    return counts


def largest_sources(sources: Sequence[str | None]) -> list[str | None]:
    """The samples' sources; of more than `MOST_SOURCES` the smallest are put together as `others`."""
    counts = Counter(source for source in sources if source is not None)
    kept = set(sorted(counts, key=lambda name: (-counts[name], name))[:MOST_SOURCES])
    return [source if source is None or source in kept else OTHERS for source in sources]


def draw(count: int, share: int | None, seed: int) -> list[int]:
    """All numbers below `count`, or `share` of them in random order."""
    return list(range(count)) if share is None or share >= count else Random(seed).sample(range(count), share)


def _store_tokens(reader: StoreReader, chosen: list[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    with reader.ahead([[index] for index in chosen], tokens_only=True):
        yield from map(reader.read_tokens, chosen)


def _empty(vocab_size: int, samples: int, of: int) -> SupervisedCounts:
    return SupervisedCounts(torch.zeros(vocab_size, dtype=torch.int64), of, keeps_parts=samples < of)


def _add(counts: torch.Tensor, supervised: torch.Tensor) -> None:
    counts.index_add_(0, supervised, torch.ones_like(supervised))
