"""Cycles by what the CPU does: SGLang's own ranges, or the Python frames of its EAGLE worker.

A GPU's work belongs to the range in which it was launched, whenever it ran: with the overlap schedule the CPU is up to
a cycle ahead of the GPU.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from eagle3.serve.profile import names
from eagle3.serve.profile.phases import (
    BETWEEN,
    DRAFT,
    DRAFT_EXTEND,
    PREFILL,
    SAMPLING,
    UNATTRIBUTED,
    VERIFY,
    Found,
    Label,
    Labelled,
    Method,
)
from eagle3.serve.profile.trace import Span, Trace

Kind = Literal["draft", "verify", "extend", "prefill"]


class Mark(NamedTuple):
    """A range that says where in a cycle the CPU is."""

    start: float
    end: float
    kind: Kind
    batch: int | None = None


class Segment(NamedTuple):
    """A piece of the decoding thread's time."""

    start: float
    end: float
    phase: str
    cycle: int | None


class Timeline(NamedTuple):
    """The decoding thread's time.

    Attributes:
        segments: in order, without overlap; what lies between two is the scheduler's.
    """

    method: Method
    thread: str
    cycles: list[Found]
    segments: list[Segment]


def find_timeline(trace: Trace) -> Timeline | None:
    """The cycles of a trace with ranges, or with stacks; None where it has neither."""
    for method, marks_of, spans in (("ranges", _from_spans, trace.spans), ("stack", _from_frames, trace.frames)):
        by_thread: dict[str, list[Span]] = {}
        for span in spans:
            by_thread.setdefault(span.thread, []).append(span)
        marks = {thread: marks_of(items) for thread, items in by_thread.items()}
        if not marks:
            continue
        thread = max(marks, key=lambda name: sum(mark.kind == "draft" for mark in marks[name]))
        kinds = Counter(mark.kind for mark in marks[thread])
        if kinds["draft"] and kinds["verify"]:
            return _lay_out(method, thread, marks[thread])  # type: ignore[arg-type]
    return None


def _from_spans(spans: Sequence[Span]) -> list[Mark]:
    """Outermost ranges of one thread: a model's forward inside `draft` or `draft_extend` is the drafter's."""
    marks: list[Mark] = []
    reached = float("-inf")
    for span in spans:
        kind, batch = _kind(span.name)
        if kind is None or span.end <= reached:
            continue
        marks.append(Mark(span.start, span.end, kind, batch))
        reached = span.end
    return marks


def _kind(name: str) -> tuple[Kind | None, int | None]:
    if name == names.DRAFT:
        return "draft", None
    if name == names.DRAFT_EXTEND:
        return "extend", None
    step = names.STEP.match(name)
    if step is None or step[1] not in names.VERIFY_MODES + names.PREFILL_MODES:
        return None, None
    return ("verify" if step[1] in names.VERIFY_MODES else "prefill"), int(step[2])


def _from_frames(frames: Sequence[Span]) -> list[Mark]:
    """The target's forward is a verify inside `verify`, the drafter's inside a draft, else a prefill."""
    marks: list[Mark] = []
    reached = verifying = float("-inf")
    for frame in frames:
        kind: Kind | None = None
        if names.STACK_VERIFY.search(frame.name):
            verifying = frame.end
        elif frame.end > reached:
            if names.STACK_DRAFT.search(frame.name):
                kind = "draft"
            elif names.STACK_EXTEND.search(frame.name):
                kind = "extend"
            elif names.STACK_PREFILL.search(frame.name):
                kind = "prefill"
            elif names.STACK_TARGET.search(frame.name):
                kind = "verify" if frame.end <= verifying else "prefill"
        if kind is not None:
            marks.append(Mark(frame.start, frame.end, kind))
            reached = frame.end
    return marks


def _lay_out(method: Method, thread: str, marks: Sequence[Mark]) -> Timeline:
    """Fills the time between marks: before the verify's forward is its preparation, after it is sampling."""
    cycles: list[Found] = []
    segments: list[Segment] = []
    open_cycle: int | None = None
    before: Mark | None = None
    for mark in marks:
        last, until = (None, mark.start) if before is None else (before.kind, before.end)
        if mark.kind in ("draft", "prefill"):
            if open_cycle is not None:
                whole = last == "extend" and mark.kind == "draft"
                fate = "whole" if whole else "interrupted" if last == "extend" else "incomplete"
                cycles[open_cycle].fate = fate  # type: ignore[assignment]
            open_cycle = len(cycles) if mark.kind == "draft" else None
            if mark.kind == "draft":
                cycles.append(Found(mark.start))
            segments.append(Segment(mark.start, mark.end, DRAFT if mark.kind == "draft" else PREFILL, open_cycle))
        elif mark.kind == "verify":
            drafted = last == "draft" and open_cycle is not None
            if drafted:
                assert open_cycle is not None
                cycles[open_cycle].batch = mark.batch
            start = until if drafted else mark.start
            segments.append(Segment(start, mark.end, VERIFY, open_cycle if drafted else None))
        elif last == "prefill":
            segments.append(Segment(until, mark.end, PREFILL, None))
        else:
            if last == "verify":
                segments.append(Segment(until, mark.start, SAMPLING, open_cycle))
            segments.append(Segment(mark.start, mark.end, DRAFT_EXTEND, open_cycle))
        before = mark
    return Timeline(method, thread, cycles, segments)


def label_by_ranges(trace: Trace, timeline: Timeline) -> Labelled:
    """Each piece of GPU work by the range in which it was launched."""
    same_threads = any(launch.thread == timeline.thread for launch in trace.launches.values())
    starts = [segment.start for segment in timeline.segments]
    labels = []
    for work in trace.work:
        launch = None if work.correlation is None else trace.launches.get(work.correlation)
        if launch is None or (same_threads and launch.thread != timeline.thread):
            labels.append(Label(UNATTRIBUTED, None))
            continue
        place = bisect_right(starts, launch.at) - 1
        if place < 0:
            labels.append(Label(BETWEEN, None))
            continue
        segment = timeline.segments[place]
        labels.append(Label(segment.phase if launch.at <= segment.end else BETWEEN, segment.cycle))
    return Labelled(timeline.method, timeline.cycles, labels, trace.graph_launches())
