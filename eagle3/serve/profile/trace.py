"""What of a trace is needed: the GPU's work, who launched it, and the ranges on the CPU.

All times are microseconds of the trace's own clock.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from sys import intern
from typing import Any, NamedTuple

from eagle3.errors import Problem, ProblemsError, problem_error, raise_problems
from eagle3.serve.profile import names
from eagle3.serve.profile.trace_file import FIX, TraceFile

GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
RANGES = ("user_annotation", "cpu_op", "python_function")
SEVERAL = 2
"""So many pieces of work of one launch are a graph's."""
_LATEST = 1e16
"""Microseconds since 1970 are below it for three centuries."""
_RANK = re.compile(r"TP-(\d+)")
_SHOWN = 5


class Work(NamedTuple):
    """A kernel, copy or fill on the GPU."""

    start: float
    end: float
    name: str
    correlation: int | None


class Launch(NamedTuple):
    """The call on the CPU that launched work."""

    thread: str
    at: float
    graph: bool


class Span(NamedTuple):
    """A range on the CPU."""

    start: float
    end: float
    thread: str
    name: str


@dataclass
class Trace:
    """One rank's trace.

    Attributes:
        work: in order of its start.
        launches: by correlation id.
        spans: named ranges of SGLang, in order of their start.
        frames: Python functions of SGLang's workers, where the trace has stacks.
        collectives: operators and ranges on the CPU that communicate.
        rank: as the file says, by its name or inside.
        on_gpu: it has a GPU's work.
        threads: that had a range of SGLang's.
    """

    path: Path
    work: list[Work] = field(default_factory=list)
    launches: dict[int, Launch] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    frames: list[Span] = field(default_factory=list)
    collectives: list[Span] = field(default_factory=list)
    rank: int | None = None
    events: int = 0

    @property
    def on_gpu(self) -> bool:
        return bool(self.work)

    def graph_launches(self) -> set[int]:
        """Correlation ids of CUDA graphs: all work of one has its launch's, so that one of several pieces is one."""
        counts = Counter(work.correlation for work in self.work)
        several = {key for key, count in counts.items() if key is not None and count >= SEVERAL}
        return several | {key for key, launch in self.launches.items() if launch.graph}


def read_trace(path: Path) -> Trace:
    """Reads a trace of torch's profiler, `.json` or `.json.gz`.

    Raises:
        ProblemsError: kinds `file.*` and `trace.*`: it is not there, cut off, damaged, or no such trace.
    """
    trace, file = Trace(path), TraceFile(path)
    wrong: list[str] = []
    for event in file:
        trace.events += 1
        if str(event.get("pid")).startswith("[TP"):
            fix = "pass the files of the ranks, which lie beside it, or profile without merge_profiles"
            raise problem_error(
                str(path), "trace.merged", "holds several ranks, whose launches cannot be told apart", fix
            )
        if event.get("ph") == "X":
            try:
                _take(trace, event)
            except ValueError as error:
                wrong.append(f"event {trace.events} ({str(event.get('name'))[:60]!r}): {error}")
        if len(wrong) > _SHOWN:
            break
    raise_problems(Problem(str(path), "trace.value", text, FIX) for text in wrong[:_SHOWN])
    if not trace.work and not trace.spans and not trace.frames:
        message = f"none of its {trace.events:,} events is GPU work or a range of SGLang's"
        fix = "profile the server's scheduler with the activities CPU and GPU, while it decodes"
        raise problem_error(str(path), "trace.nothing", message, fix)
    trace.work.sort()
    trace.spans.sort()
    trace.frames.sort()
    trace.collectives.sort()
    trace.rank = _rank(path, file.facts)
    return trace


def read_traces(paths: list[Path]) -> list[Trace]:
    """One trace a rank, in order of rank; every file that cannot be read is named.

    Raises:
        ProblemsError: as `read_trace`; kind `trace.ranks`: two files of one rank, or a rank that is not said.
    """
    traces: list[Trace] = []
    problems: list[Problem] = []
    for path in paths:
        try:
            traces.append(read_trace(path))
        except ProblemsError as error:
            problems += error.problems
    raise_problems(problems)
    if len(traces) < 2:
        return traces
    fix = "pass one file a rank of one run, named ..-TP-0.. as SGLang names them"
    seen: dict[int, Path] = {}
    for trace in traces:
        if trace.rank is None:
            problems.append(Problem(str(trace.path), "trace.ranks", "does not say of which rank it is", fix))
        elif trace.rank in seen:
            message = f"is of rank {trace.rank}, as {seen[trace.rank]} is"
            problems.append(Problem(str(trace.path), "trace.ranks", message, fix))
        else:
            seen[trace.rank] = trace.path
    raise_problems(problems)
    return sorted(traces, key=lambda trace: trace.rank or 0)


def _take(trace: Trace, event: dict[str, Any]) -> None:
    """Keeps what is needed of one event.

    Raises:
        ValueError: a number that cannot be.
    """
    kind, name = event.get("cat"), event.get("name")
    if not isinstance(kind, str) or not isinstance(name, str):
        return
    if kind in GPU_WORK:
        start, end = _times(event)
        trace.work.append(Work(start, end, intern(name), _correlation(event)))
    elif kind in LAUNCHES:
        correlation = _correlation(event)
        if correlation is not None:
            start, _ = _times(event)
            graph = names.GRAPH_LAUNCH.match(name) is not None
            trace.launches[correlation] = Launch(_thread(event), start, graph)
    elif kind in RANGES:
        _take_range(trace, kind, name, event)


def _take_range(trace: Trace, kind: str, name: str, event: dict[str, Any]) -> None:
    if kind == "python_function":
        kept = trace.frames if any(pattern.search(name) for pattern in names.STACK) else None
    elif names.CPU_COMMUNICATION.match(name):
        kept = trace.collectives
    elif kind == "user_annotation" and (name in (names.DRAFT, names.DRAFT_EXTEND) or names.STEP.match(name)):
        kept = trace.spans
    else:
        kept = None
    if kept is not None:
        start, end = _times(event)
        kept.append(Span(start, end, _thread(event), intern(name)))


def _times(event: dict[str, Any]) -> tuple[float, float]:
    start, length = (_number(event.get(key, 0 if key == "dur" else None), key) for key in ("ts", "dur"))
    if length < 0:
        raise ValueError(f"dur is {length:g}, expected microseconds of 0 or more")
    return start, start + length


def _number(value: Any, key: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LATEST:
        return float(value)
    raise ValueError(f"{key} is {str(value)[:30]}, expected microseconds, a finite number below {_LATEST:g}")


def _correlation(event: dict[str, Any]) -> int | None:
    """Joins a launch to its work; 0 and what is no number join nothing."""
    arguments = event.get("args")
    value = arguments.get("correlation") if isinstance(arguments, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value != 0 else None


def _thread(event: dict[str, Any]) -> str:
    return intern(f"{event.get('pid')}/{event.get('tid')}")


def _rank(path: Path, facts: dict[str, Any]) -> int | None:
    named = _RANK.search(path.name)
    if named is not None:
        return int(named[1])
    told = facts.get("distributedInfo")
    rank = told.get("rank") if isinstance(told, dict) else None
    return rank if isinstance(rank, int) else None
