"""What a decoding run adds up to: figures of each set, as the field's tables have them.

Shapes: K greatest depth, N conversations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eagle3.evaluate.bootstrap import Interval, ratio_intervals
from eagle3.evaluate.walks import Walk, add_walks, ratio


@dataclass(frozen=True)
class Answer:
    """An answer's figures.

    Attributes:
        group: the conversation it belongs to.
        tokens: its tokens, the first one included.
        accepted: accepted drafts of each round.
        seconds: by speculative decoding.
        own_tokens, own_seconds: of the target alone; None where it was not asked.
    """

    group: str
    tokens: int
    accepted: Sequence[int]
    seconds: float
    own_tokens: int | None = None
    own_seconds: float | None = None

    def walk(self, steps: int) -> Walk:
        """Its rounds, counted as `eagle3 evaluate` counts them."""
        histogram, reached, left = [0] * (steps + 1), [0] * steps, self.tokens - 1
        for accepted in self.accepted:
            commit = min(accepted + 1, left)
            histogram[accepted] += 1
            left -= commit
            for depth in range(min(commit, steps)):
                reached[depth] += 1
        return Walk(tuple(histogram), self.tokens - 1, tuple(reached))


@dataclass(frozen=True)
class SetResult:
    """Figures of some answers, pooled (sums first, then the ratio).

    Attributes:
        answers: how many.
        tokens: of all answers, first ones included.
        committed: tokens committed by rounds.
        length: acceptance length, committed / rounds; 1.0 is no gain.
        interval: its 95% percentile bootstrap interval over conversations.
        rate: accepted drafts / drafted tokens.
        by_depth: [K] of the rounds that get to a depth, the share that accepts a draft there.
        histogram: [K+1] rounds by accepted drafts; an answer's last round is cut at its end.
        seconds: of speculative decoding, prompts included.
        tokens_per_second: tokens / seconds.
        own_tokens_per_second, speed_up: of the target alone, and over it; None where it was not asked.
    """

    answers: int
    tokens: int
    committed: int
    rounds: int
    length: float
    interval: Interval
    rate: float
    by_depth: tuple[float, ...]
    histogram: tuple[int, ...]
    seconds: float
    tokens_per_second: float
    own_tokens_per_second: float | None
    speed_up: float | None


def make_set(answers: Sequence[Answer], steps: int, drafted: int, seed: int) -> SetResult:
    """Adds up answers.

    Args:
        steps: K.
        drafted: most drafts a round.
        seed: of the resampling behind the interval.
    """
    walk = add_walks([item.walk(steps) for item in answers], steps)
    seconds, tokens = sum(item.seconds for item in answers), sum(item.tokens for item in answers)
    rate = ratio(tokens, seconds)
    own_seconds = [item.own_seconds for item in answers if item.own_seconds is not None]
    own = None
    if answers and len(own_seconds) == len(answers):
        own = ratio(sum(item.own_tokens or 0 for item in answers), sum(own_seconds))
    return SetResult(
        answers=len(answers),
        tokens=tokens,
        committed=walk.committed,
        rounds=walk.rounds,
        length=ratio(walk.committed, walk.rounds),
        interval=_interval(answers, seed),
        rate=ratio(walk.accepted, walk.rounds * drafted),
        by_depth=tuple(map(ratio, walk.taken, walk.reached)),
        histogram=walk.histogram,
        seconds=seconds,
        tokens_per_second=rate,
        own_tokens_per_second=own,
        speed_up=None if own is None else ratio(rate, own),
    )


def mean_length(sets: Sequence[SetResult]) -> float:
    """The plain mean of the sets' acceptance lengths, as papers print it; sets without a round carry nothing."""
    lengths = [item.length for item in sets if not math.isnan(item.length)]
    return ratio(sum(lengths), len(lengths))


def _interval(answers: Sequence[Answer], seed: int) -> Interval:
    groups: dict[str, list[float]] = {}
    for item in answers:
        sums = groups.setdefault(item.group, [0.0, 0.0])
        sums[0] += item.tokens - 1
        sums[1] += len(item.accepted)
    both = torch.tensor(list(groups.values()), dtype=torch.float64).view(-1, 2)
    return ratio_intervals(both[:, :1], both[:, 1:], seed)[0]
