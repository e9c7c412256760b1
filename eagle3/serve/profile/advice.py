"""Which change is worth trying first, by arithmetic: what each part of the cycle could give.

If a part with share s of the cycle takes a factor f of its time, decoding gets 1 / (1 - s (1 - f)) times as fast, as
long as acceptance stays (Amdahl). Nothing here knows how hard a change is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from eagle3.serve.profile.phases import (
    BETWEEN,
    COMMUNICATION,
    DRAFT,
    DRAFT_EXTEND,
    IDLE,
    SAMPLING,
    UNATTRIBUTED,
    VERIFY,
)
from eagle3.serve.profile.ranks import Waiting
from eagle3.serve.profile.summary import Split

FEW_GRAPHS = 0.5
"""A phase with fewer pieces of work a cycle from graphs runs without them. Not its share: SGLang 0.5.16 prepares a
draft extend by 25 kernels of its own and then launches a graph of 26."""
_WORDS = {BETWEEN: "the scheduler's work between phases", DRAFT_EXTEND: "draft extend"}
LITTLE = 0.01
"""Below this share of the cycle a part is not spoken of."""


@dataclass(frozen=True)
class Lever:
    """Something that could be made cheaper.

    Attributes:
        name: of the lever.
        parts: of the cycle that it is made of.
        ms: mean time a cycle.
        share: of the cycle.
        halved: how much faster decoding would be if it took half its time, as a share.
        free: the same if it took no time: the most that there is to win; None where nothing else is in the cycle.
        what: what to try, with what the trace says about it.
    """

    name: str
    parts: tuple[str, ...]
    ms: float
    share: float
    halved: float
    free: float | None
    what: str


def speedup(share: float, factor: float) -> float | None:
    """Gain in speed, as a share, if a part of the cycle takes `factor` of its time; None where it is without end."""
    left = 1 - share * (1 - factor)
    return None if left <= 1e-9 else max(0.0, 1 / left - 1)


def levers(split: Split, waited: Waiting | str, idle: float | None = None) -> list[Lever]:
    """Every lever that has a share of the cycle, the largest win first.

    Args:
        idle: milliseconds a cycle that the GPU idles without the profiler, which shortens the cycle; default: as
            traced.
    """
    communication = split.communication
    drafter = (DRAFT, DRAFT_EXTEND)
    found = [
        _lever(split, idle, "verify", (VERIFY,), _verify(split)),
        _lever(split, idle, "drafter", drafter, _graphs_off(split, drafter) or "a smaller drafter, or fewer steps"),
        _lever(split, idle, "sampling", (SAMPLING,), "fewer and cheaper kernels between verify and draft extend"),
        _lever(split, idle, "communication", (COMMUNICATION,), _communication(communication, split, waited)),
        _lever(split, idle, "overhead", (IDLE, BETWEEN), _overhead(split, idle)),
        _lever(split, idle, "unattributed", (UNATTRIBUTED,), "find out what it is: its launches are not in the trace"),
    ]
    return sorted((lever for lever in found if lever.ms > 0), key=lambda lever: -lever.share)


def cycle_ms(split: Split, idle: float | None) -> float:
    """Milliseconds of the cycle that the levers are shares of."""
    return split.cycle.mean - (0.0 if idle is None else split.parts[IDLE].mean - idle)


def _lever(split: Split, idle: float | None, name: str, parts: tuple[str, ...], what: str) -> Lever:
    ms = sum(idle if part == IDLE and idle is not None else split.parts[part].mean for part in parts)
    share = ms / cycle_ms(split, idle)
    halved = speedup(share, 0.5)
    assert halved is not None
    return Lever(name, parts, ms, share, halved, speedup(share, 0.0), what)


def _verify(split: Split) -> str:
    return _graphs_off(split, (VERIFY,)) or (
        "a cheaper forward of the target (kernels, quantization, more GPUs), or fewer tokens verified; "
        "`eagle3 serve plan` says what fewer steps give"
    )


def _graphs_off(split: Split, phases: tuple[str, ...]) -> str | None:
    """Says so if these phases' work was launched piece by piece."""
    by_graph = sum(split.launches.get((phase, True), 0.0) for phase in phases)
    one_by_one = sum(split.launches.get((phase, False), 0.0) for phase in phases)
    if not split.on_gpu or not one_by_one or by_graph >= FEW_GRAPHS:
        return None
    return (
        f"CUDA graphs: {one_by_one:.0f} of {by_graph + one_by_one:.0f} pieces of its work a cycle were launched one by "
        "one"
    )


def _communication(by_phase: dict[str, float], split: Split, waited: Waiting | str) -> str:
    most = max(by_phase, key=lambda phase: by_phase[phase], default=VERIFY)
    share = by_phase.get(most, 0.0) / max(split.parts[COMMUNICATION].mean, 1e-12)
    where = f"{share:.0%} of it is in {most.replace('_', ' ')}"
    if isinstance(waited, str):
        return f"the collectives (algorithm, fewer ranks): {where}"
    total = waited.transfer + waited.mean_wait
    waits = waited.mean_wait / total if total else 0.0
    if waits > 0.5:
        return f"what makes ranks late: {waits:.0%} of communication is waiting for another rank; {where}"
    return f"the transfers (algorithm, NCCL settings, links): waiting for another rank is only {waits:.0%}; {where}"


def _overhead(split: Split, untraced: float | None) -> str:
    idle = split.parts[IDLE].mean if untraced is None else untraced
    between = split.parts[BETWEEN].mean
    if not split.on_gpu:
        return "the scheduler between two cycles"
    off = [phase for phase in (VERIFY, DRAFT, DRAFT_EXTEND) if _graphs_off(split, (phase,))]
    before = max(split.idle_before, key=lambda phase: split.idle_before[phase], default=DRAFT)
    waits = f"the GPU waits {idle:.3f} ms a cycle for the CPU, most of it before {_WORDS.get(before, before)}"
    if off:
        return f"CUDA graphs for {', '.join(off).replace('_', ' ')}, which is launched piece by piece: {waits}"
    if between > idle:
        return f"the scheduler's own work on the GPU between phases, {between:.3f} ms a cycle"
    return f"the overlap schedule, a faster CPU, less work on it: {waits}"


def sentences(found: Sequence[Lever], split: Split, idle: float | None = None) -> list[str]:
    """What follows, the largest win first; `idle` as for `levers`."""
    cycle = cycle_ms(split, idle)
    lines = []
    for place, lever in enumerate(lever for lever in found if lever.share >= LITTLE):
        most = "" if lever.free is None or not math.isfinite(lever.free) else f", free {lever.free:.1%}"
        head = "first" if place == 0 else "then"
        lines.append(
            f"{head} {lever.name}: {lever.share:.1%} of the cycle; at half its time decoding would be "
            f"{lever.halved:.1%} faster{most}. Try: {lever.what}"
        )
    small = [lever.name for lever in found if lever.share < LITTLE]
    if small:
        lines.append(f"not worth a question: {', '.join(small)}, each below {LITTLE:.0%} of the cycle")
    drafter = next((lever for lever in found if lever.name == "drafter"), None)
    if drafter is not None and drafter.free is not None:
        verify = split.verify_ms / cycle
        lines.append(
            f"verify with its communication is {verify:.0%} of the cycle: a drafter that cost nothing would win at "
            f"most {speedup(split.draft_ms / cycle, 0.0) or 0.0:.1%}"
        )
    return lines
