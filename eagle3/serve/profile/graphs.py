"""Cycles by what the GPU does, for a trace without ranges: graph launches, and the kernels between them.

All work of a graph launch has the launch's correlation id, so that launches are seen even where the trace has nothing
of the CPU. In a cycle SGLang launches the draft's graph (none at one step), the verify's and the draft extend's. Which
is which follows from what runs between them: the tree is laid out before a verify, drafts are accepted after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from eagle3.serve.profile import names
from eagle3.serve.profile.phases import (
    BETWEEN,
    DRAFT,
    DRAFT_EXTEND,
    SAMPLING,
    UNATTRIBUTED,
    VERIFY,
    Found,
    Label,
    Labelled,
)
from eagle3.serve.profile.trace import Trace

REPEATS, LARGER = 0.8, 1.2
"""Of graphs without a telling kernel between: the share that must repeat every third, and how many times as much work
the largest must have as the next, to be taken for the verify's."""
MUCH_MORE, SLACK = 1.5, 10
"""A cycle with more work outside of graphs than so many times the median, and so much, holds a prefill."""
GRAPH_BETWEEN = (
    "by graphs only: what is launched between a draft extend and the next draft counts as between phases, the "
    "drafter's choice of tokens there included"
)
BY_SIZE = (
    "assumed: no kernel says which graph is the verify's, so the largest of every three is taken for it, the one "
    "before for the draft's and the one after for the draft extend's"
)


@dataclass
class _Graph:
    """A graph launch, and the places (in the trace's work) of its work and of what comes before the next one."""

    correlation: int
    own: list[int]
    after: list[int]
    phase: str | None = None


def label_by_graphs(trace: Trace) -> Labelled | None:
    """None where there are no graphs, or nothing says which is which."""
    graphs = _graphs(trace)
    notes = [GRAPH_BETWEEN]
    if len(graphs) < 2:
        return None
    if not _name(trace, graphs):
        if not _name_by_size(graphs):
            return None
        notes.append(BY_SIZE)
    labels = [Label(UNATTRIBUTED, None)] * len(trace.work)
    cycles: list[Found] = []
    with_draft = any(graph.phase == DRAFT for graph in graphs)
    first = DRAFT if with_draft else VERIFY
    order = [first, VERIFY, DRAFT_EXTEND] if with_draft else [VERIFY, DRAFT_EXTEND]
    place: list[str] = []
    outside: list[int] = []
    for graph in graphs:
        if graph.phase == first:
            if cycles:
                cycles[-1].fate = "whole" if place == order else "incomplete"
            cycles.append(Found(trace.work[graph.own[0]].start))
            place = []
            outside.append(0)
        place.append(str(graph.phase))
        cycle = len(cycles) - 1 if cycles else None
        for index in graph.own:
            labels[index] = Label(graph.phase or UNATTRIBUTED, cycle)
        _label_after(trace, graph, cycle, labels)
        if outside:
            outside[-1] += len(graph.after)
    _find_prefills(cycles, outside)
    return Labelled("graphs", cycles, labels, {graph.correlation for graph in graphs}, notes)


def _graphs(trace: Trace) -> list[_Graph]:
    is_graph = trace.graph_launches()
    graphs: dict[int, _Graph] = {}
    latest: _Graph | None = None
    for index, work in enumerate(trace.work):
        if work.correlation is not None and work.correlation in is_graph:
            latest = graphs.setdefault(work.correlation, _Graph(work.correlation, [], []))
            latest.own.append(index)
        elif latest is not None:
            latest.after.append(index)
    return list(graphs.values())


def _name(trace: Trace, graphs: Sequence[_Graph]) -> bool:
    """Gives each graph its phase, from the kernels between; False where too few say anything."""
    for graph, following in pairwise(graphs):
        found = [trace.work[index].name for index in graph.after]
        builds = any(names.BUILDS_TREE.search(name) for name in found)
        accepts = any(names.ACCEPTS.search(name) for name in found)
        if accepts and not builds:
            graph.phase, following.phase = VERIFY, DRAFT_EXTEND
        elif builds and not accepts:
            graph.phase, following.phase = graph.phase or DRAFT, VERIFY
    return sum(graph.phase == VERIFY for graph in graphs) * 6 >= len(graphs)


def _name_by_size(graphs: Sequence[_Graph]) -> bool:
    """The same for graphs that repeat every third, one of them much larger than the others."""
    sizes = [len(graph.own) for graph in graphs]
    pairs = list(zip(sizes, sizes[3:], strict=False))
    if len(pairs) < 3 or sum(one == other for one, other in pairs) < REPEATS * len(pairs):
        return False
    typical = [median(sizes[place::3]) for place in range(3)]
    verify = typical.index(max(typical))
    if max(typical) < LARGER * sorted(typical)[1]:
        return False
    for place, graph in enumerate(graphs):
        graph.phase = (VERIFY, DRAFT_EXTEND, DRAFT)[(place - verify) % 3]
    return True


def _label_after(trace: Trace, graph: _Graph, cycle: int | None, labels: list[Label]) -> None:
    """What runs after a graph: up to the last kernel that lays out or accepts, then the next one's preparation; where
    there is no such kernel it cannot be told."""
    before, then, ends = {
        DRAFT: (DRAFT, VERIFY, names.BUILDS_TREE),
        VERIFY: (SAMPLING, DRAFT_EXTEND, names.ACCEPTS),
        DRAFT_EXTEND: (BETWEEN, BETWEEN, names.BUILDS_TREE),
    }.get(graph.phase or "", (UNATTRIBUTED, UNATTRIBUTED, names.BUILDS_TREE))
    last = max((index for index in graph.after if ends.search(trace.work[index].name)), default=-1)
    if last < 0 and before != then:
        before = then = UNATTRIBUTED
    for index in graph.after:
        labels[index] = Label(before if index <= last else then, cycle)


def _find_prefills(cycles: Sequence[Found], outside: Sequence[int]) -> None:
    whole = [count for cycle, count in zip(cycles, outside, strict=True) if cycle.fate == "whole"]
    if not whole:
        return
    most = MUCH_MORE * median(whole) + SLACK
    for cycle, count in zip(cycles, outside, strict=True):
        if cycle.fate == "whole" and count > most:
            cycle.fate = "interrupted"
