"""A profile: the split of the ranks, what follows, and the point that it gives the planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from eagle3.config.plan_schema import MeasuredPoint
from eagle3.errors import Problem, ProblemsError, raise_problems
from eagle3.serve.profile.advice import Lever, levers
from eagle3.serve.profile.capture import Captured
from eagle3.serve.profile.load import Measured
from eagle3.serve.profile.phases import IDLE
from eagle3.serve.profile.ranks import Waiting, waiting
from eagle3.serve.profile.server import ServerFacts
from eagle3.serve.profile.summary import Split, split_trace
from eagle3.serve.profile.trace import read_traces

STRETCHED = 1.05
"""Times as long as without the profiler, from which on a traced cycle is called stretched."""


@dataclass(frozen=True)
class Profile:
    """
    Attributes:
        splits: of the ranks, in their order; the first one's parts are reported.
        waiting: transfer and wait of several ranks, or why they are not known.
        levers: the largest win first.
        facts, measured: of the server, where it was asked.
        point: for `points` of `eagle3 serve plan`; None with the reason in `notes`.
    """

    splits: list[Split]
    waiting: Waiting | str
    levers: list[Lever]
    facts: ServerFacts | None
    measured: Measured | None
    point: MeasuredPoint | None
    notes: list[str] = field(default_factory=list)

    @property
    def split(self) -> Split:
        return self.splits[0]

    @property
    def idle(self) -> float | None:
        """As `untraced_idle`."""
        return untraced_idle(self.split, self.measured)


def profile_traces(
    paths: Sequence[Path], steps: int | None = None, draft_tokens: int | None = None, batch: int | None = None
) -> Profile:
    """Splits the decode cycles of traces that are there.

    Args:
        paths: one file a rank.
        steps, draft_tokens: of the server, for the planner's point.
        batch: requests decoded together, where the trace does not say.

    Raises:
        ProblemsError: kinds `file.*` and `trace.*`.
    """
    return _profile(_splits(paths), steps, draft_tokens, batch, None, None, [])


def profile_captured(captured: Captured) -> Profile:
    """The same for traces that `capture` took.

    Raises:
        ProblemsError: as `profile_traces`.
    """
    facts = captured.facts
    return _profile(
        _splits(captured.traces),
        facts.steps,
        facts.draft_tokens,
        None,
        facts,
        captured.measured,
        captured.notes,
    )


def _splits(paths: Sequence[Path]) -> list[Split]:
    splits: list[Split] = []
    problems: list[Problem] = []
    for trace in read_traces(list(paths)):
        try:
            splits.append(split_trace(trace))
        except ProblemsError as error:
            problems += error.problems
    raise_problems(problems)
    return splits


def _profile(
    splits: list[Split],
    steps: int | None,
    draft_tokens: int | None,
    batch: int | None,
    facts: ServerFacts | None,
    measured: Measured | None,
    said: Sequence[str],
) -> Profile:
    split = splits[0]
    waited = waiting(splits)
    notes = [*said, *split.notes]
    if len(splits) > 1 and isinstance(waited, str):
        notes.append(waited)
    traced = split.cycle.mean
    if measured is not None:
        factor = traced / measured.cycle_ms
        if factor > STRETCHED:
            notes.append(
                f"a traced cycle takes {factor:.2f} times as long as one without the profiler ({traced:.3f} and "
                f"{measured.cycle_ms:.3f} ms), which makes the CPU slower: up to {traced - measured.cycle_ms:.3f} ms "
                "of overhead are the profiler's"
            )
    point = None
    found = batch if split.batch is None else split.batch
    if not split.on_gpu and (facts is None or facts.device != "cpu"):
        notes.append("no point for `eagle3 serve plan`: it needs the GPU's times, or a server that runs on the CPU")
    elif steps is None or found is None:
        missing = [name for name, value in (("--steps", steps), ("--batch", found)) if value is None]
        notes.append(f"no point for `eagle3 serve plan`: give {' and '.join(missing)}")
    else:
        point = _point(split, steps, draft_tokens, found, measured, notes)
    found_levers = levers(split, waited, untraced_idle(split, measured))
    return Profile(splits, waited, found_levers, facts, measured, point, notes)


def _point(
    split: Split,
    steps: int,
    draft_tokens: int | None,
    batch: int,
    measured: Measured | None,
    notes: list[str],
) -> MeasuredPoint | None:
    """What the planner takes; its cycle is that without the profiler, if it holds verify and drafts as traced."""
    busy = split.verify_ms + split.draft_ms
    cycle = split.cycle.mean
    if measured is not None and measured.cycle_ms >= busy:
        cycle = measured.cycle_ms
    elif measured is not None:
        notes.append(
            "a cycle without the profiler is shorter than verify and drafts as traced: the point's is the traced"
        )
    values = {
        "steps": steps,
        "draft_tokens": draft_tokens,
        "batch": batch,
        "verify_ms": round(split.verify_ms, 6) or None,
        "draft_ms": round(split.draft_ms, 6) or None,
        "cycle_ms": round(cycle, 6) or None,
        "acceptance_length": None if measured is None else round(max(1.0, measured.acceptance_length), 6),
    }
    try:
        return MeasuredPoint(**{key: value for key, value in values.items() if value is not None})
    except ValidationError as error:
        reasons = "; ".join(str(one["msg"]).removeprefix("Value error, ") for one in error.errors())
        notes.append(f"no point for `eagle3 serve plan`: {reasons}")
        return None


def untraced_idle(split: Split, measured: Measured | None) -> float | None:
    """Milliseconds a cycle that the GPU would idle without the profiler: the least; None where it is not known."""
    if measured is None or not split.on_gpu:
        return None
    return max(0.0, split.parts[IDLE].mean - max(0.0, split.cycle.mean - measured.cycle_ms))
