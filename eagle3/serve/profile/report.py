"""A profile for people (tables and sentences) and for programs (JSON, docs/schemas/profile.schema.json)."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from eagle3.serve.profile.advice import sentences
from eagle3.serve.profile.phases import METHODS, PARTS, PHASES, UNATTRIBUTED
from eagle3.serve.profile.ranks import Waiting
from eagle3.serve.profile.result import Profile
from eagle3.serve.profile.summary import Split

PART_WORDS = {
    "draft": "draft (all steps but the first)",
    "verify": "verify",
    "sampling": "sampling, acceptance",
    "draft_extend": "draft extend (the first step)",
    "communication": "communication",
    "between": "between phases (scheduler)",
    "idle": "GPU idle",
    "unattributed": "unattributed",
}


def render_profile(profile: Profile, width: int = 120) -> str:
    """Text: the split, what follows, and what it rests on."""
    split = profile.split
    parts: list[Any] = [_parts_table(profile), Text("")]
    if len(profile.splits) > 1:
        parts += [_ranks_table(profile), Text("")]
    parts += [*_items(sentences(profile.levers, split, profile.idle), width), Text("")]
    parts += [Text("rests on"), *_items([*_rests_on(profile), *profile.notes], width)]
    if profile.point is not None:
        values = profile.point.model_dump(exclude_none=True)
        inside = ", ".join(f"{key}: {value}" for key, value in values.items())
        parts += [Text(""), Text("for `points` of `eagle3 serve plan`:"), Text(f"  - {{{inside}}}")]
    console = Console(width=width, color_system=None, force_terminal=False, markup=False, highlight=False)
    with console.capture() as captured:
        console.print(Group(*parts))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _items(lines: list[str], width: int) -> list[Text]:
    return [
        Text(textwrap.fill(f"  - {line}", width, subsequent_indent="    ", break_on_hyphens=False)) for line in lines
    ]


def _parts_table(profile: Profile) -> Table:
    split = profile.split
    clock = "GPU" if split.on_gpu else "CPU"
    batch = "" if split.batch is None else f" at batch {split.batch}"
    title = f"a decode cycle{batch}, {clock} time, ms over {len(split.cycles)} cycles"
    table = _table(title, ("part", "mean", "share", "median", "quartiles"))
    for part in PARTS:
        spread = split.parts[part]
        if spread.mean == 0 and part != UNATTRIBUTED:
            continue
        if part == "idle" and not split.on_gpu:
            continue
        quartiles = f"{spread.low:.3f} to {spread.high:.3f}"
        table.add_row(
            PART_WORDS[part], f"{spread.mean:.3f}", f"{split.share(part):.1%}", f"{spread.median:.3f}", quartiles
        )
        if part == "communication":
            for phase in (one for one in PHASES if split.communication.get(one)):
                ms = split.communication[phase]
                table.add_row(f"  in {phase.replace('_', ' ')}", f"{ms:.3f}", f"{ms / split.cycle.mean:.1%}", "", "")
    whole = split.cycle
    table.add_row("cycle", f"{whole.mean:.3f}", "100.0%", f"{whole.median:.3f}", f"{whole.low:.3f} to {whole.high:.3f}")
    return table


def _ranks_table(profile: Profile) -> Table:
    table = _table("ranks", ("rank", "cycle", "verify", "draft", "communication", "idle", "waits for others"))
    for place, split in enumerate(profile.splits):
        wait = f"{profile.waiting.wait[place]:.3f}" if isinstance(profile.waiting, Waiting) else ""
        cells = [split.cycle.mean, split.verify_ms, split.draft_ms]
        cells += [split.parts["communication"].mean, split.parts["idle"].mean]
        table.add_row(str(split.rank), *(f"{cell:.3f}" for cell in cells), wait)
    return table


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for place, name in enumerate(columns):
        table.add_column(name, justify="right" if place else "left", no_wrap=True)
    return table


def _rests_on(profile: Profile) -> list[str]:
    split = profile.split
    lines = [f"trace kept: {one.path}" for one in profile.splits]
    lines.append(f"phases told apart by {METHODS[split.method]}")
    if split.left_out:
        lines.append(f"cycles left out: {', '.join(f'{count} {reason}' for reason, count in split.left_out.items())}")
    if split.outlier_share > 0:
        lines.append(f"outliers (over twice the median) took {split.outlier_share:.1%} of the time")
    if split.overlapped > 0:
        lines.append(f"{split.overlapped:.3f} ms a cycle of work ran beside other work and is in no part")
    if isinstance(profile.waiting, Waiting):
        waits = profile.waiting
        lines.append(
            f"communication: transfer {waits.transfer:.3f} ms, waiting {waits.mean_wait:.3f} ms (mean of ranks)"
        )
    measured, idle = profile.measured, profile.idle
    if measured is not None:
        lines.append(
            f"without the profiler, from what the server says: {measured.cycle_ms:.3f} ms a cycle, acceptance length "
            f"{measured.acceptance_length:.3f} ({measured.requests} answers, {measured.verifies} verifies)"
        )
    if idle is not None and idle < split.parts["idle"].mean:
        lines.append(
            f"without the profiler's share the GPU idles at least {idle:.3f} ms a cycle, and the shares above that are "
            "proposed from are of that cycle"
        )
    return lines


def profile_json(profile: Profile) -> str:
    """The whole profile; see docs/schemas/profile.schema.json."""
    split = profile.split
    waits = profile.waiting
    value = {
        "format": "eagle3-profile",
        "format_version": 1,
        "server": None if profile.facts is None else asdict(profile.facts),
        "untraced": None
        if profile.measured is None
        else {**asdict(profile.measured), "acceptance_length": profile.measured.acceptance_length},
        "method": split.method,
        "on_gpu": split.on_gpu,
        "batch": split.batch,
        "cycles": {"used": len(split.cycles), "left_out": split.left_out, "outlier_share": split.outlier_share},
        "cycle_ms": asdict(split.cycle),
        "parts": [{"name": part, "share": split.share(part), "ms": asdict(split.parts[part])} for part in PARTS],
        "communication_ms": split.communication,
        "idle_before_ms": split.idle_before,
        "overlapped_ms": split.overlapped,
        "launches": _launches(split.launches),
        "waiting": waits
        if isinstance(waits, str)
        else {
            "transfer_ms": waits.transfer,
            "wait_ms": list(waits.wait),
            "by_phase": {name: {"transfer_ms": a, "wait_ms": b} for name, (a, b) in waits.by_phase.items()},
        },
        "ranks": [_rank(one) for one in profile.splits],
        "levers": [asdict(lever) for lever in profile.levers],
        "findings": sentences(profile.levers, split, profile.idle),
        "point": None if profile.point is None else profile.point.model_dump(exclude_none=True),
        "notes": profile.notes,
    }
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)


def _launches(launches: Mapping[tuple[str, bool], float]) -> dict[str, dict[str, float]]:
    phases = sorted({phase for phase, _ in launches})
    return {
        phase: {"by_graph": launches.get((phase, True), 0.0), "one_by_one": launches.get((phase, False), 0.0)}
        for phase in phases
    }


def _rank(split: Split) -> dict[str, Any]:
    return {
        "rank": split.rank,
        "trace": str(split.path),
        "cycle_ms": split.cycle.mean,
        "verify_ms": split.verify_ms,
        "draft_ms": split.draft_ms,
        "communication_ms": split.parts["communication"].mean,
        "idle_ms": split.parts["idle"].mean,
    }
