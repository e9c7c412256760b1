"""The serving rounds over stored answers, given which drafts are right; see `acceptance`.

Shapes: T tokens, K draft steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Span = tuple[int, int]


@dataclass(frozen=True)
class Walk:
    """Serving rounds over some answers; walks add up.

    Attributes:
        histogram: [K+1] rounds by number of accepted drafts; the last round's is cut at the end of the answer.
        committed: tokens committed; the first token of an answer comes from the prefill and does not count.
        reached: [K] rounds that reach each depth: every draft before it was accepted, and the answer goes on there.
    """

    histogram: tuple[int, ...]
    committed: int
    reached: tuple[int, ...]

    @property
    def rounds(self) -> int:
        return sum(self.histogram)

    @property
    def accepted(self) -> int:
        return sum(count * accepted for accepted, count in enumerate(self.histogram))

    @property
    def taken(self) -> tuple[int, ...]:
        """[K] rounds that accept the draft at each depth."""
        return tuple(sum(self.histogram[depth:]) for depth in range(1, len(self.histogram)))


@dataclass(frozen=True)
class Walks:
    """Walks of some samples, by sample.

    Attributes:
        steps: most drafts a round.
        of_sample: for each sample by its index in the store, its walk with 1, 2, .., steps drafts a round.
        hits, terms: [steps] active terms at each depth whose greedy draft is the answer's token, and all of them.
        expected: for each sample, float64 [2, steps], the expected rounds of speculative sampling, by `sampling.KINDS`;
            empty where it was not asked for.
        overlaps: [steps], sum over the active terms at each depth of the probability that sampling accepts there.
    """

    steps: int
    of_sample: dict[int, tuple[Walk, ...]]
    hits: tuple[int, ...]
    terms: tuple[int, ...]
    expected: dict[int, Tensor] = field(default_factory=dict)
    overlaps: tuple[float, ...] = ()

    def pooled(self, drafts: int, indices: Iterable[int] | None = None) -> Walk:
        """The samples' rounds together, with so many drafts each; of `indices` those that are here, default: all."""
        chosen = self.of_sample if indices is None else [index for index in indices if index in self.of_sample]
        return add_walks([self.of_sample[index][drafts - 1] for index in chosen], drafts)


def answer_spans(loss_mask: Tensor) -> list[Span]:
    """The runs of supervised tokens in a sample's loss mask [T], as half-open (begin, end)."""
    padded = torch.nn.functional.pad(loss_mask.to(torch.int8), (1, 1))
    edges = padded.diff().nonzero().flatten().tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def walk(matches: Tensor, spans: Sequence[Span], steps: int) -> Walk:
    """Walks the serving rounds over one sample's answers.

    Args:
        matches: [K, T] bool, K >= steps; (k, i) says whether chain i's draft at step k is token i+2+k.
        spans: answers, half-open; the first token of each is known before its first round.
        steps: drafts a round.
    """
    histogram, reached = [0] * (steps + 1), [0] * steps
    committed = 0
    for _, accepted, commit in rounds(matches, spans, steps):
        histogram[accepted] += 1
        committed += commit
        for depth in range(min(commit, steps)):
            reached[depth] += 1
    return Walk(tuple(histogram), committed, tuple(reached))


def rounds(matches: Tensor, spans: Sequence[Span], steps: int) -> Iterator[tuple[int, int, int]]:
    """(last committed token's place, accepted drafts, tokens committed) of each serving round; see `walk`."""
    leading = matches[:steps].long().cumprod(0).sum(0).tolist()
    for begin, end in spans:
        last = max(begin, 1)  # token 0 has no state before it, so no chain can draft after it
        while (left := end - 1 - last) > 0:
            accepted = min(leading[last - 1], left)
            commit = min(accepted + 1, left)
            yield last, accepted, commit
            last += commit


def add_walks(walks: Sequence[Walk], steps: int) -> Walk:
    """The pooled walk of several samples, each of `steps` drafts a round."""
    histogram = tuple(sum(item.histogram[accepted] for item in walks) for accepted in range(steps + 1))
    reached = tuple(sum(item.reached[depth] for item in walks) for depth in range(steps))
    return Walk(histogram, sum(item.committed for item in walks), reached)


def ratio(part: float, whole: float) -> float:
    """part / whole; NaN where there is nothing to divide by: no data is neither 0 nor 1."""
    return part / whole if whole else math.nan
