"""Splits each decode cycle's time exactly: the parts of a cycle add up to its length.

All times are microseconds of the trace's clock.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from eagle3.serve.profile import names
from eagle3.serve.profile.phases import (
    BETWEEN,
    COMMUNICATION,
    DRAFT,
    DRAFT_EXTEND,
    IDLE,
    PREFILL,
    SAMPLING,
    UNATTRIBUTED,
    VERIFY,
    Found,
    Label,
    Labelled,
)
from eagle3.serve.profile.ranges import Timeline
from eagle3.serve.profile.trace import Span, Trace, Work

FIRST = (VERIFY, DRAFT_EXTEND, DRAFT, SAMPLING, PREFILL, BETWEEN, UNATTRIBUTED)
"""Whose time it is where two run at once; communication comes after all of them, since it is hidden then."""
_ORDER = {phase: place for place, phase in enumerate(FIRST)}


@dataclass
class Cycle:
    """One decode cycle.

    Attributes:
        batch: requests in it, where the trace says so.
        parts: its length by part (`phases.PARTS`).
        communication: the part's time by phase.
        idle_before: idle time by the phase whose work came next.
        overlapped: time of work that ran beside other work, and is in no part.
        launches: (phase, by a graph) -> how many.
        collectives: each piece of communication: phase, name, length.
    """

    start: float
    end: float
    batch: int | None
    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    communication: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    idle_before: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    overlapped: float = 0.0
    launches: Counter[tuple[str, bool]] = field(default_factory=Counter)
    collectives: list[tuple[str, str, float]] = field(default_factory=list)

    @property
    def length(self) -> float:
        return self.end - self.start


def split_gpu(trace: Trace, labelled: Labelled) -> list[Cycle]:
    """The whole cycles by GPU time: from one draft's first work to the next one's.

    A cycle in which prefill work ran becomes `interrupted`; one without draft work `incomplete`.
    """
    starts = _starts(trace.work, labelled)
    begins = [work.start for work in trace.work]
    longest = max((work.end - work.start for work in trace.work), default=0.0)
    cycles = []
    for number, (found, following) in enumerate(zip(labelled.cycles, labelled.cycles[1:], strict=False)):
        if found.fate != "whole":
            continue
        start, end = starts.get(number), starts.get(number + 1)
        if start is None or end is None or end <= start or following is found:
            found.fate = "incomplete"
            continue
        inside = range(bisect_left(begins, start - longest), bisect_left(begins, end))
        items = [(trace.work[at], labelled.labels[at]) for at in inside if trace.work[at].end > start]
        if any(label.phase == PREFILL for _, label in items):
            found.fate = "interrupted"
            continue
        cycles.append(_split(start, end, found, items, labelled.graphs))
    return cycles


def _starts(work: Sequence[Work], labelled: Labelled) -> dict[int, float]:
    """When the first work of each cycle began on the GPU: its draft's, or its verify's where no cycle has a draft's."""
    found: dict[str, dict[int, float]] = {DRAFT: {}, VERIFY: {}}
    for item, label in zip(work, labelled.labels, strict=True):
        if label.phase in found and label.cycle is not None:
            found[label.phase].setdefault(label.cycle, item.start)
    return found[DRAFT] or found[VERIFY]


def _split(start: float, end: float, found: Found, items: list[tuple[Work, Label]], graphs: set[int]) -> Cycle:
    cycle = Cycle(start, end, found.batch)
    total = 0.0
    for work, label in items:
        length = min(work.end, end) - max(work.start, start)
        total += length
        if work.start >= start:
            cycle.launches[label.phase, work.correlation in graphs] += 1
            if names.COMMUNICATION.search(work.name):
                cycle.collectives.append((label.phase, work.name, work.end - work.start))
    for length, busy, gap in _stretches(start, end, items):
        if busy is not None:
            phase, communicates = busy
            cycle.parts[COMMUNICATION if communicates else phase] += length
            if communicates:
                cycle.communication[phase] += length
            total -= length
        else:
            before, after = gap
            inside_graph = before and after and before[0].correlation == after[0].correlation in graphs
            if inside_graph and after:
                cycle.parts[after[1].phase] += length
            else:
                cycle.parts[IDLE] += length
                cycle.idle_before[after[1].phase if after else DRAFT] += length
    cycle.overlapped = max(0.0, total)
    return cycle


_Item = tuple[Work, Label]
_Stretch = tuple[float, tuple[str, bool] | None, tuple[_Item | None, _Item | None]]


def _stretches(start: float, end: float, items: Sequence[_Item]) -> Iterator[_Stretch]:
    """Cuts the time from start to end where work begins or ends.

    Yields:
        length, whose it is (phase, communication) or None where nothing runs, and then the work before and after.
    """
    edges = []
    for place, (work, _) in enumerate(items):
        if work.end > work.start:
            edges += [(max(work.start, start), 1, place), (min(work.end, end), 0, place)]
    edges.sort()
    running: Counter[tuple[int, bool]] = Counter()
    at, before = start, None
    for time, begins, place in edges:
        work, label = items[place]
        key = (_ORDER[label.phase], names.COMMUNICATION.search(work.name) is not None)
        if time > at:
            yield time - at, _whose(running), (before, items[place])
            at = time
        running[key] += 1 if begins else -1
        before = before if begins else items[place]
    if end > at:
        yield end - at, _whose(running), (before, None)


def _whose(running: Counter[tuple[int, bool]]) -> tuple[str, bool] | None:
    active = [(communicates, order) for (order, communicates), count in running.items() if count > 0]
    if not active:
        return None
    communicates, order = min(active)
    return FIRST[order], communicates


def split_cpu(timeline: Timeline, collectives: Sequence[Span]) -> list[Cycle]:
    """The whole cycles by the decoding thread's time: from one draft's beginning to the next one's."""
    ends = [segment.end for segment in timeline.segments]
    talks = [span for span in collectives if span.thread == timeline.thread]
    cycles = []
    for found, following in zip(timeline.cycles, timeline.cycles[1:], strict=False):
        if found.fate != "whole":
            continue
        cycle = Cycle(found.start, following.start, found.batch)
        at = found.start
        for segment in timeline.segments[bisect_right(ends, found.start) :]:
            if segment.start >= following.start:
                break
            talking = _covered(segment.start, segment.end, talks)
            cycle.parts[segment.phase] += segment.end - segment.start - talking
            cycle.parts[COMMUNICATION] += talking
            cycle.communication[segment.phase] += talking
            cycle.parts[BETWEEN] += segment.start - at
            at = segment.end
        cycle.parts[BETWEEN] += following.start - at
        cycles.append(cycle)
    return cycles


def _covered(start: float, end: float, spans: Sequence[Span]) -> float:
    """How much of that time these ranges, sorted by their start, cover."""
    covered, reached = 0.0, start
    for span in spans:
        if span.start >= end:
            break
        if span.end > reached:
            covered += min(span.end, end) - max(span.start, reached)
            reached = min(span.end, end)
    return covered
