"""From measured requests to figures with 95% intervals, by bootstrap over conversations.

Tokens/s at c conversations in flight is c * tokens / seconds in flight, summed over the requests (Little's law), of the
time in which all c were busy: the end of a pass, where fewer are left, counts for nothing.

Shapes: N conversations, V values, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eagle3.evaluate.bootstrap import Interval, intervals, ratio_intervals, resampled_sums
from eagle3.serve.bench.measured import Counted, Pass, Request
from eagle3.serve.bench.rounds import Rounds, pooled

QUANTILES = (0.5, 0.95, 0.99)
QUANTILE_RESAMPLES = 200
MOST_VALUES = 200_000
"""Values behind a percentile; of more, evenly many of each conversation's are taken."""


@dataclass(frozen=True)
class Figure:
    """A number and its 95% interval; NaN where there is no data."""

    value: float
    interval: Interval


@dataclass(frozen=True)
class Depth:
    """A depth of drafts.

    Attributes:
        reached: rounds that got there.
        accepted: of them, those that accept the draft there.
        share: accepted / reached, with its standard error over conversations.
    """

    depth: int
    reached: int
    accepted: int
    share: float
    standard_error: float


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of several requests, pooled: sums first, then the ratio.

    Attributes:
        length: acceptance length, committed / verifies.
        rate: accepted drafts / drafted tokens; None where the server does not say how many it drafts.
        by_depth: empty where the server gives no histogram.
        unsure: requests whose last round may have been cut at another place than it is taken for.
    """

    length: Figure
    rate: float | None
    verifies: int
    committed: int
    histogram: tuple[int, ...] | None
    by_depth: tuple[Depth, ...]
    unsure: int


@dataclass(frozen=True)
class Speed:
    """Tokens/s of the whole server.

    Attributes:
        tok_s: while all conversations were busy, prefill included.
        decode_tok_s: the same from each answer's first token on: what a cycle yields, and what a plan is made of.
        wall_tok_s: all tokens over all of the passes' time, their ends included.
        by_request: tokens/s that one request sees from its first token on.
        full_share: share of the passes' time in which all were busy.
        by_pass: tok_s of each pass.
    """

    tok_s: Figure
    decode_tok_s: Figure
    wall_tok_s: float
    by_request: Figure
    full_share: float
    by_pass: tuple[float, ...]


@dataclass(frozen=True)
class Busy:
    """A request's part in the time in which all conversations were busy.

    Attributes:
        tokens, seconds: of it.
        decoded, decoding: tokens after the first, and seconds from that one on.
    """

    tokens: int
    seconds: float
    decoded: int
    decoding: float


def busy(request: Request, full: float) -> Busy:
    """Args: full: seconds from the pass's start to when the first conversation found none left."""
    left = full - request.sent
    if left <= 0:
        return Busy(0, 0.0, 0, 0.0)
    came = sum(count for moment, count in zip(request.at, request.tokens, strict=True) if moment <= left)
    first, seconds = request.at[0], min(left, request.seconds)
    if first > left:
        return Busy(0, seconds, 0, 0.0)
    return Busy(came, seconds, came - request.tokens[0], seconds - first)


def busy_sums(passes: Sequence[Pass], talks: Sequence[str]) -> torch.Tensor:
    """Float64 [N, 4] of `Busy`, each conversation's requests of all passes together."""
    place = {name: row for row, name in enumerate(talks)}
    sums = torch.zeros(len(talks), 4, dtype=torch.float64)
    for item in passes:
        for request in item.requests:
            if request.talk in place:
                part = busy(request, item.full)
                sums[place[request.talk]] += torch.tensor(
                    [part.tokens, part.seconds, part.decoded, part.decoding], dtype=torch.float64
                )
    return sums


def talks_of(passes: Sequence[Pass]) -> list[str]:
    """Keys of the conversations that were answered, in one order."""
    return sorted({request.talk for item in passes for request in item.requests})


def speed_of(passes: Sequence[Pass], concurrency: int, seed: int) -> Speed:
    """Tokens/s of passes at one concurrency."""
    talks = talks_of(passes)
    sums = busy_sums(passes, talks)
    above, below = sums[:, [0, 2]] * concurrency, sums[:, [1, 3]]
    both = ratio_intervals(above, below, seed)
    totals = above.sum(0) / below.sum(0)
    alone = torch.zeros(len(talks), 2, dtype=torch.float64)
    place = {name: row for row, name in enumerate(talks)}
    for request in (request for item in passes for request in item.requests):
        decoded, seconds = request.count - request.tokens[0], request.seconds - request.at[0]
        alone[place[request.talk]] += torch.tensor([decoded, seconds], dtype=torch.float64)
    seconds = sum(item.seconds for item in passes)
    return Speed(
        Figure(float(totals[0]), both[0]),
        Figure(float(totals[1]), both[1]),
        sum(request.count for item in passes for request in item.requests) / seconds if seconds else math.nan,
        Figure(float(alone[:, 0].sum() / alone[:, 1].sum()), ratio_intervals(alone[:, :1], alone[:, 1:], seed)[0]),
        sum(item.full for item in passes) / seconds if seconds else math.nan,
        tuple(_of_pass(item, concurrency) for item in passes),
    )


def _of_pass(item: Pass, concurrency: int) -> float:
    sums = busy_sums([item], talks_of([item])).sum(0)
    return float(sums[0] * concurrency / sums[1])


def speedup_of(passes: Sequence[Pass], others: Sequence[Pass], seed: int) -> tuple[Figure, Figure] | None:
    """How many times as fast as `others`, as tok_s and as decode_tok_s, over the conversations that both answered.

    Both resample the same conversations, so what makes one slow on both sides does not widen the interval.
    """
    talks = sorted(set(talks_of(passes)) & set(talks_of(others)))
    if not talks:
        return None
    sums = torch.cat([busy_sums(passes, talks), busy_sums(others, talks)], 1)
    drawn = torch.cat([sums.sum(0, keepdim=True), resampled_sums(sums, seed)])
    ratios = torch.stack(
        [drawn[:, place] / drawn[:, place + 1] * drawn[:, place + 5] / drawn[:, place + 4] for place in (0, 2)], 1
    )
    found = intervals(ratios[1:])
    whole, decode = (Figure(float(ratios[0, column]), found[column]) for column in (0, 1))
    return whole, decode


def percentiles(
    values: Sequence[float], owners: Sequence[str], weights: Sequence[float] | None, seed: int
) -> dict[str, Figure] | None:
    """p50, p95 and p99 of values [V], with intervals over their owners; None without a value.

    Args:
        owners: the conversation of each.
        weights: how often each counts; default: once.
    """
    if not values:
        return None
    stride = math.ceil(len(values) / MOST_VALUES)
    found, order = torch.tensor(values[::stride], dtype=torch.float64).sort()
    names = {name: row for row, name in enumerate(sorted(set(owners)))}
    rows = torch.tensor([names[name] for name in owners[::stride]])[order]
    weight = torch.ones(len(found), dtype=torch.float64)
    if weights is not None:
        weight = torch.tensor(weights[::stride], dtype=torch.float64)[order]
    wanted = torch.tensor(QUANTILES, dtype=torch.float64)
    estimate = _quantiles(found, weight, wanted)
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for _ in range(QUANTILE_RESAMPLES):
        chosen = torch.randint(len(names), (len(names),), generator=generator)
        times = torch.bincount(chosen, minlength=len(names)).double()
        drawn.append(_quantiles(found, weight * times[rows], wanted))
    spread = intervals(torch.stack(drawn))
    return {
        f"p{round(100 * share)}": Figure(float(value), interval)
        for share, value, interval in zip(QUANTILES, estimate, spread, strict=True)
    }


def _quantiles(values: torch.Tensor, weights: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    sums = weights.cumsum(0)
    return values[torch.searchsorted(sums, wanted * sums[-1]).clamp(max=len(values) - 1)]


def acceptance_of(requests: Sequence[Request], counted: Counted, drafts: int | None, seed: int) -> Acceptance | None:
    """Acceptance of the requests that the server says something of; None where it says nothing, or verified nothing.

    Args:
        drafts: tokens drafted a verify.
    """
    by_talk: dict[str, list[Rounds]] = {}
    for place, rounds in counted.of.items():
        by_talk.setdefault(requests[place].talk, []).append(rounds)
    each = [pooled(items) for items in by_talk.values()]
    whole = pooled(each)
    if not whole.verifies:
        return None
    above = torch.tensor([[item.committed] for item in each], dtype=torch.float64)
    below = torch.tensor([[item.verifies] for item in each], dtype=torch.float64)
    length = Figure(whole.committed / whole.verifies, ratio_intervals(above, below, seed)[0])
    rate = whole.accepted / (whole.verifies * drafts) if drafts else None
    return Acceptance(
        length, rate, whole.verifies, whole.committed, whole.histogram, _by_depth(whole, each), whole.unsure
    )


def _by_depth(whole: Rounds, each: Sequence[Rounds]) -> tuple[Depth, ...]:
    if whole.taken is None or whole.reached is None:
        return ()
    found = []
    for place, (reached, accepted) in enumerate(zip(whole.reached, whole.taken, strict=True)):
        share = accepted / reached if reached else math.nan
        squares = 0.0
        for item in each:
            assert item.taken is not None and item.reached is not None
            of_it = item.reached[place] if place < len(item.reached) else 0
            squares += ((item.taken[place] if place < len(item.taken) else 0) - share * of_it) ** 2
        count = len(each)
        error = math.sqrt(squares * count / (count - 1)) / reached if reached and count > 1 else math.nan
        found.append(Depth(place + 1, reached, accepted, share, error))
    return tuple(found)
