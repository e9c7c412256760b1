"""What the cycles of a trace have in common: means that add up, medians and spread, and what was left out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median, quantiles

from eagle3.errors import Eagle3Error, problem_error
from eagle3.serve.profile.cycles import Cycle, split_cpu, split_gpu
from eagle3.serve.profile.graphs import label_by_graphs
from eagle3.serve.profile.phases import DRAFT, DRAFT_EXTEND, PARTS, VERIFY, Found, Method
from eagle3.serve.profile.ranges import find_timeline, label_by_ranges
from eagle3.serve.profile.trace import Trace

OUTLIER = 2.0
"""A cycle of more than so many times the median's length is left out."""
FEW = 10
CPU_ONLY = (
    "the trace has no GPU work: these are times of the CPU; of a server that runs on a GPU they say how long launching "
    "takes, not computing"
)


@dataclass(frozen=True)
class Spread:
    """Milliseconds over the cycles. The means of the parts add up to that of the cycle, the medians need not."""

    mean: float
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, microseconds: Sequence[float]) -> Spread:
        """`low` and `high` are the quartiles."""
        values = [value / 1000 for value in microseconds]
        low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
        return cls(mean(values), median(values), low, high)


@dataclass(frozen=True)
class Split:
    """One rank's decode cycles.

    Attributes:
        on_gpu: times are the GPU's.
        batch: requests in the cycles, where the trace says so.
        cycles: that were used.
        left_out: others, by reason.
        outlier_share: of the time of used cycles and outliers, that of the outliers.
        cycle: its length.
        parts: by part, in the order of `phases.PARTS`.
        communication, idle_before: mean milliseconds by phase.
        overlapped: mean milliseconds of work beside other work.
        launches: mean number by (phase, by a graph).
    """

    path: Path
    rank: int | None
    method: Method
    on_gpu: bool
    batch: int | None
    cycles: list[Cycle]
    left_out: dict[str, int]
    outlier_share: float
    cycle: Spread
    parts: dict[str, Spread]
    communication: dict[str, float]
    idle_before: dict[str, float]
    overlapped: float
    launches: dict[tuple[str, bool], float]
    notes: list[str] = field(default_factory=list)

    def share(self, part: str) -> float:
        return self.parts[part].mean / self.cycle.mean

    def phase_ms(self, *phases: str) -> float:
        """Mean milliseconds of phases, their communication included."""
        return sum(self.parts[phase].mean + self.communication.get(phase, 0.0) for phase in phases)

    @property
    def draft_ms(self) -> float:
        """Of all draft steps: the draft extend is the first."""
        return self.phase_ms(DRAFT, DRAFT_EXTEND)

    @property
    def verify_ms(self) -> float:
        return self.phase_ms(VERIFY)


def split_trace(trace: Trace) -> Split:
    """Splits one rank's decode cycles.

    Raises:
        ProblemsError: kinds `trace.phases`: nothing tells them apart; `trace.no_cycle`: none is whole.
    """
    timeline = find_timeline(trace)
    notes: list[str] = []
    if not trace.on_gpu:
        if timeline is None:
            raise _no_phases(trace)
        cycles, found, method = split_cpu(timeline, trace.collectives), timeline.cycles, timeline.method
        notes.append(CPU_ONLY)
    else:
        labelled = label_by_ranges(trace, timeline) if timeline is not None else label_by_graphs(trace)
        if labelled is None:
            raise _no_phases(trace)
        cycles, found, method = split_gpu(trace, labelled), labelled.cycles, labelled.method
        notes += labelled.notes
    return _summary(trace, method, cycles, found, notes)


def _summary(trace: Trace, method: Method, cycles: list[Cycle], found: Sequence[Found], notes: list[str]) -> Split:
    left_out: Counter[str] = Counter(one.fate for one in found if one.fate != "whole")
    if not cycles:
        reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items()) or "none begins"
        message = f"holds no whole decode cycle ({reasons})"
        fix = "profile more cycles, with longer answers: a cycle counts if another follows without a prefill in between"
        raise problem_error(str(trace.path), "trace.no_cycle", message, fix)
    batch = Counter(cycle.batch for cycle in cycles).most_common(1)[0][0]
    same = [cycle for cycle in cycles if cycle.batch == batch]
    most = OUTLIER * median(cycle.length for cycle in same)
    used = [cycle for cycle in same if cycle.length <= most]
    reasons_left: dict[str, int] = {
        **left_out,
        "other batch": len(cycles) - len(same),
        "outlier": len(same) - len(used),
    }
    if len(used) < FEW:
        notes.append(f"only {len(used)} cycles: the figures may be off; profile more")
    return Split(
        path=trace.path,
        rank=trace.rank,
        method=method,
        on_gpu=trace.on_gpu,
        batch=batch,
        cycles=used,
        left_out={reason: count for reason, count in reasons_left.items() if count},
        outlier_share=1 - sum(cycle.length for cycle in used) / sum(cycle.length for cycle in same),
        cycle=Spread.of([cycle.length for cycle in used]),
        parts={part: Spread.of([cycle.parts.get(part, 0.0) for cycle in used]) for part in PARTS},
        communication=_mean_by_phase(used, lambda cycle: cycle.communication),
        idle_before=_mean_by_phase(used, lambda cycle: cycle.idle_before),
        overlapped=mean(cycle.overlapped for cycle in used) / 1000,
        launches=_mean_launches(used),
        notes=notes,
    )


def _mean_by_phase(cycles: Sequence[Cycle], of: Callable[[Cycle], dict[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for cycle in cycles:
        for phase, value in of(cycle).items():
            sums[phase] += value / 1000 / len(cycles)
    return dict(sums)


def _mean_launches(cycles: Sequence[Cycle]) -> dict[tuple[str, bool], float]:
    total: Counter[tuple[str, bool]] = Counter()
    for cycle in cycles:
        total.update(cycle.launches)
    return {key: count / len(cycles) for key, count in total.items()}


def _no_phases(trace: Trace) -> Eagle3Error:
    what = f"{len(trace.work):,} pieces of GPU work, {len(trace.launches):,} launches, {len(trace.spans):,} ranges"
    message = f"nothing in it tells draft and verify apart ({what})"
    fix = (
        "profile a server that speculates with EAGLE, while it decodes, with the activities CPU and GPU (and "
        "with_stack where its version writes no ranges)"
    )
    return problem_error(str(trace.path), "trace.phases", message, fix)
