"""A row of the result: one server at one concurrency, all of its passes together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from eagle3.config import LoadSection
from eagle3.serve.bench.facts import Facts
from eagle3.serve.bench.figures import (
    Acceptance,
    Figure,
    Speed,
    acceptance_of,
    percentiles,
    speed_of,
    speedup_of,
)
from eagle3.serve.bench.measured import Counted, Failure, Pass, Request, count_rounds
from eagle3.serve.bench.prompts import Reference
from eagle3.serve.bench.rounds import pooled

Percentiles = dict[str, Figure] | None


@dataclass(frozen=True)
class Latency:
    """Milliseconds.

    Attributes:
        ttft: from sending a request to its first token.
        inter_token: from a token to the next; a piece of several tokens has the mean of its own.
        update: from a piece to the next, which is what a reader sees: a round, where the server streams each.
        request: from sending to the last token.
    """

    ttft: Percentiles
    inter_token: Percentiles
    update: Percentiles
    request: Percentiles


@dataclass(frozen=True)
class OfSet:
    """One set's part."""

    requests: int
    tokens: int
    tok_s: Figure
    acceptance: Acceptance | None


@dataclass(frozen=True)
class Compared:
    """Answers held against others to the same prompts.

    Attributes:
        compared: how many had one.
        different: of them, those that differ.
        first: the first few that do, by conversation and turn, with the token from which on.
    """

    compared: int
    different: int
    first: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """One server at one concurrency.

    Attributes:
        name: for people; of the server.
        baseline: it is what the others are compared with.
        passes: how many were measured; `wanted` were asked for.
        lost: why some are missing.
        cached_share: of the prompts' tokens, those that came from the prefix cache; None where the server does not say.
        cycle_ms: from one verify to the next; None without acceptance.
        speedup, decode_speedup: over the baseline; None without one.
        shorter: answers' mean length / the baseline's; None without one.
        acceptance: by request; `counted`, from the server's counters, where requests do not say.
        against: answers against the `reference` and the `baseline`, where there is one.
        foreign: requests of others; None where the server does not say.
    """

    name: str
    url: str
    facts: Facts
    baseline: bool
    concurrency: int
    passes: int
    wanted: int
    lost: str
    requests: int
    tokens: int
    prompt_tokens: int
    failures: tuple[Failure, ...]
    cut: int
    shortened: int
    cached_share: float | None
    flushed: bool | None
    foreign: int | None
    instances: int
    speed: Speed | None
    latency: Latency | None
    acceptance: Acceptance | None
    counted: Acceptance | None
    cycle_ms: float | None
    speedup: Figure | None
    decode_speedup: Figure | None
    shorter: float | None
    by_set: Mapping[str, OfSet]
    against: Mapping[str, Compared]
    silent: int
    senseless: tuple[str, ...]


def make_row(
    facts: Facts,
    url: str,
    baseline: bool,
    concurrency: int,
    passes: Sequence[Pass],
    lost: str,
    others: Sequence[Pass] | None,
    load: LoadSection,
    reference: Mapping[str, Reference] | None = None,
) -> Row:
    """Args: others: the baseline's passes at this concurrency; None where there is no baseline, or this is it."""
    seed, greedy = load.seed, not load.temperature
    requests = [request for item in passes for request in item.requests]
    counted = count_rounds(requests, facts.steps)
    drafts = None if facts.draft_tokens is None else facts.draft_tokens - 1
    if facts.topk not in (None, 1):
        drafts = facts.steps  # of a tree, a path's
    acceptance = acceptance_of(requests, counted, drafts, seed)
    faster = None if others is None else speedup_of(passes, others, seed)
    against = {} if reference is None else {"reference": _against_reference(requests, reference)}
    if others and greedy:
        against["baseline"] = _against_passes(requests, others)
    foreign = [item.foreign for item in passes if item.foreign is not None]
    flushed = [item.flushed for item in passes if item.flushed is not None]
    return Row(
        name=facts.name,
        url=url,
        facts=facts,
        baseline=baseline,
        concurrency=concurrency,
        passes=len(passes),
        wanted=load.passes,
        lost=lost,
        requests=len(requests),
        tokens=sum(request.count for request in requests),
        prompt_tokens=sum(request.prompt_tokens for request in requests),
        failures=tuple(failure for item in passes for failure in item.failures),
        cut=sum(request.finish == "length" for request in requests),
        shortened=sum(item.shortened for item in passes),
        cached_share=_cached_share(requests),
        flushed=all(flushed) if flushed else None,
        foreign=sum(foreign) if foreign else None,
        instances=len({item.instance for item in passes}),
        speed=speed_of(passes, concurrency, seed) if requests else None,
        latency=_latency(requests, seed) if requests else None,
        acceptance=acceptance,
        counted=None if acceptance is not None else _from_counters(passes),
        cycle_ms=_cycle_ms(requests, counted),
        speedup=faster[0] if faster else None,
        decode_speedup=faster[1] if faster else None,
        shorter=_shorter(requests, others),
        by_set=_by_set(passes, requests, counted, concurrency, drafts, seed),
        against=against,
        silent=counted.silent,
        senseless=tuple(counted.senseless),
    )


def _latency(requests: Sequence[Request], seed: int) -> Latency:
    owners = [request.talk for request in requests]
    gaps: list[float] = []
    tokens: list[float] = []
    of: list[str] = []
    for request in requests:
        for before, after, count in zip(request.at, request.at[1:], request.tokens[1:], strict=False):
            gaps.append(1000 * (after - before))
            tokens.append(count)
            of.append(request.talk)
    return Latency(
        ttft=percentiles([1000 * request.at[0] for request in requests], owners, None, seed),
        inter_token=percentiles([gap / count for gap, count in zip(gaps, tokens, strict=True)], of, tokens, seed),
        update=percentiles(gaps, of, None, seed),
        request=percentiles([1000 * request.seconds for request in requests], owners, None, seed),
    )


def _cycle_ms(requests: Sequence[Request], counted: Counted) -> float | None:
    verifies = sum(rounds.verifies for rounds in counted.of.values())
    seconds = sum(requests[place].seconds - requests[place].at[0] for place in counted.of)
    return 1000 * seconds / verifies if verifies else None


def _from_counters(passes: Sequence[Pass]) -> Acceptance | None:
    rounds = [item.counted for item in passes if item.counted is not None]
    if not rounds or any(item.foreign for item in passes):
        return None
    whole = pooled(rounds)
    nan = float("nan")
    return Acceptance(Figure(whole.committed / whole.verifies, (nan, nan)), None, whole.verifies, whole.committed,
                      None, (), 0)  # fmt: skip


def _by_set(
    passes: Sequence[Pass], requests: list[Request], counted: Counted, concurrency: int, drafts: int | None, seed: int
) -> dict[str, OfSet]:
    found = {}
    for name in sorted({request.set_name for request in requests}):
        only = [replace(item, requests=tuple(one for one in item.requests if one.set_name == name)) for item in passes]
        places = [place for place, request in enumerate(requests) if request.set_name == name]
        of = Counted({place: counted.of[place] for place in places if place in counted.of})
        tokens = sum(requests[place].count for place in places)
        acceptance = acceptance_of(requests, of, drafts, seed)
        found[name] = OfSet(len(places), tokens, speed_of(only, concurrency, seed).tok_s, acceptance)
    return found


def _cached_share(requests: Sequence[Request]) -> float | None:
    cached = [request.meta.get("cached_tokens") for request in requests]
    pairs = [(item, request.prompt_tokens) for item, request in zip(cached, requests, strict=True)]
    if not all(type(item) is int and 0 <= item <= prompt for item, prompt in pairs):
        return None
    prompt = sum(request.prompt_tokens for request in requests)
    return sum(item for item in cached if item is not None) / prompt if prompt else None


def _shorter(requests: Sequence[Request], others: Sequence[Pass] | None) -> float | None:
    """Over the conversations and turns that both answered."""
    if not others or not requests:
        return None
    theirs = [request for item in others for request in item.requests]
    both = {(one.talk, one.turn) for one in requests} & {(one.talk, one.turn) for one in theirs}
    means = []
    for side in (requests, theirs):
        counts = [one.count for one in side if (one.talk, one.turn) in both]
        means.append(sum(counts) / len(counts) if counts else 0)
    return means[0] / means[1] if means[1] else None


def _against_reference(requests: Sequence[Request], reference: Mapping[str, Reference]) -> Compared:
    pairs = [(one, reference[one.prompt]) for one in requests if one.prompt in reference and one.ids is not None]
    return _compared([(one, expected.ids, expected.cut) for one, expected in pairs])


def _against_passes(requests: Sequence[Request], others: Sequence[Pass]) -> Compared:
    theirs = {one.prompt: one for item in others for one in item.requests if one.ids is not None}
    pairs = [(one, theirs[one.prompt]) for one in requests if one.prompt in theirs and one.ids is not None]
    return _compared([(one, other.ids or (), other.finish == "length") for one, other in pairs])


def _compared(items: Sequence[tuple[Request, Sequence[int], bool]]) -> Compared:
    """An answer that was cut at its limit is held against as much of the other."""
    different = []
    for one, expected, cut in items:
        found = list(one.ids or ())[: len(expected) if cut else None]
        expected = list(expected)[: len(found) if one.finish == "length" else None]
        if found != expected:
            pairs = enumerate(zip(found, expected, strict=False))
            place = next((place for place, (a, b) in pairs if a != b), min(len(found), len(expected)))
            different.append(f"{one.talk}, turn {one.turn}, from token {place} on")
    return Compared(len(items), len(different), tuple(different[:5]))
