"""What an evaluation says: walks pooled into figures, with their intervals.

Shapes: K draft steps, N samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3.evaluate.bootstrap import Interval, ratio_intervals
from eagle3.evaluate.sampling import KINDS
from eagle3.evaluate.walks import Walks, ratio


@dataclass(frozen=True)
class StepsAcceptance:
    """Acceptance of so many drafts a round, pooled over samples (sums first, then the ratio).

    Attributes:
        length: acceptance length, committed / rounds; 1.0 is no gain.
        interval: its 95% percentile bootstrap interval over samples.
        rate: acceptance rate, accepted drafts / drafted tokens (steps a round).
        histogram: [steps+1] rounds by number of accepted drafts; the last round's is cut at the end of the answer.
    """

    steps: int
    length: float
    interval: Interval
    rate: float
    rounds: int
    histogram: tuple[int, ...]


@dataclass(frozen=True)
class SourceAcceptance:
    """Acceptance length of the samples from one source: committed / rounds, with the most drafts a round.

    Attributes:
        interval: 95%, over the source's samples.
        length_by_steps: [K], with 1, 2, .., K drafts a round.
    """

    length: float
    rounds: int
    samples: int
    interval: Interval
    length_by_steps: tuple[float, ...]


@dataclass(frozen=True)
class SamplingAcceptance:
    """Speculative sampling at a temperature, its expected value; see `eagle3.evaluate.sampling`.

    Attributes:
        accepted: [K], of all active terms at a depth the mean of sum(min(p, q)), whatever came before.
        lengths: [K], expected acceptance length with 1, 2, .., K drafts a round, each step over the target's own draw.
        intervals: [K], its 95% bootstrap intervals.
        of_text: [K], the same for the text's own tokens.
    """

    temperature: float
    accepted: tuple[float, ...]
    lengths: tuple[float, ...]
    intervals: tuple[Interval, ...]
    of_text: tuple[float, ...]


@dataclass(frozen=True)
class AcceptanceResult:
    """Acceptance of greedy decoding with 1, 2, .., K drafts a round.

    Attributes:
        by_steps: [K], one for each.
        committed: tokens committed, with any number of drafts.
        samples: samples with at least one round.
        step_accuracy: [K] share of the active terms at each depth whose greedy draft is the answer's token.
        by_depth: [K] of the rounds that reach a depth, the share that accepts the draft there; K drafts a round.
        by_source: by where the prompts come from; empty where no sample says so.
        sampling: None where it was not asked for.
    """

    by_steps: tuple[StepsAcceptance, ...]
    committed: int
    samples: int
    step_accuracy: tuple[float, ...]
    by_depth: tuple[float, ...]
    by_source: dict[str, SourceAcceptance]
    sampling: SamplingAcceptance | None = None

    @property
    def full(self) -> StepsAcceptance:
        """With the most drafts a round."""
        return self.by_steps[-1]

    @property
    def steps(self) -> int:
        """K."""
        return self.full.steps

    @property
    def length(self) -> float:
        return self.full.length

    @property
    def interval(self) -> Interval:
        return self.full.interval

    @property
    def rate(self) -> float:
        return self.full.rate

    @property
    def rounds(self) -> int:
        return self.full.rounds

    @property
    def histogram(self) -> tuple[int, ...]:
        return self.full.histogram

    @property
    def length_by_steps(self) -> tuple[float, ...]:
        return tuple(item.length for item in self.by_steps)


def make_result(
    walks: Walks, sources: dict[str, list[int]], temperature: float | None = None, seed: int = 0
) -> AcceptanceResult:
    """Pools walks.

    Args:
        sources: the samples of each source, by index.
        temperature: that `walks.expected` was reckoned with; None where it was not.
        seed: of the resampling behind the intervals.
    """
    counts = range(1, walks.steps + 1)
    pooled = [walks.pooled(count) for count in counts]
    intervals = _intervals(walks, list(walks.of_sample), seed)
    full = pooled[-1]
    return AcceptanceResult(
        by_steps=tuple(
            StepsAcceptance(
                steps=count,
                length=ratio(item.committed, item.rounds),
                interval=interval,
                rate=ratio(item.accepted, item.rounds * count),
                rounds=item.rounds,
                histogram=item.histogram,
            )
            for count, item, interval in zip(counts, pooled, intervals, strict=True)
        ),
        committed=full.committed,
        samples=sum(item[-1].rounds > 0 for item in walks.of_sample.values()),
        step_accuracy=tuple(map(ratio, walks.hits, walks.terms)),
        by_depth=tuple(map(ratio, full.taken, full.reached)),
        by_source={name: _of_source(walks, indices, seed) for name, indices in sources.items()},
        sampling=None if temperature is None else _sampling(walks, temperature, seed),
    )


def _of_source(walks: Walks, indices: Sequence[int], seed: int) -> SourceAcceptance:
    found = [walks.pooled(count, indices) for count in range(1, walks.steps + 1)]
    samples = sum(walks.of_sample[index][-1].rounds > 0 for index in indices)
    lengths = tuple(ratio(item.committed, item.rounds) for item in found)
    return SourceAcceptance(lengths[-1], found[-1].rounds, samples, _intervals(walks, indices, seed)[-1], lengths)


def _intervals(walks: Walks, indices: Sequence[int], seed: int) -> list[Interval]:
    rounds = [[walk.rounds for walk in walks.of_sample[index]] for index in indices]
    below = torch.tensor(rounds, dtype=torch.float64).view(len(indices), walks.steps)
    return ratio_intervals(_committed(walks, indices).expand_as(below), below, seed)


def _committed(walks: Walks, indices: Sequence[int]) -> Tensor:
    """[N, 1]; the same with any number of drafts."""
    return torch.tensor([walks.of_sample[index][-1].committed for index in indices], dtype=torch.float64)[:, None]


def _sampling(walks: Walks, temperature: float, seed: int) -> SamplingAcceptance:
    indices = list(walks.of_sample)
    rounds = torch.zeros(len(indices), len(KINDS), walks.steps, dtype=torch.float64)
    for place, index in enumerate(indices):
        rounds[place] = walks.expected[index]
    committed = _committed(walks, indices)
    total = float(committed.sum())
    overlap, own = (
        tuple(ratio(total, expected) for expected in rounds[:, KINDS.index(kind)].sum(0).tolist())
        for kind in ("overlap", "own")
    )
    below = rounds[:, KINDS.index("overlap")]
    return SamplingAcceptance(
        temperature=temperature,
        accepted=tuple(map(ratio, walks.overlaps, walks.terms)),
        lengths=overlap,
        intervals=tuple(ratio_intervals(committed.expand_as(below), below, seed)),
        of_text=own,
    )
