"""A bench for people: a table for each concurrency, acceptance by depth, and what to know."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from eagle3.data.show.printable import printable, printable_name
from eagle3.serve.bench.figures import Acceptance, Figure
from eagle3.serve.bench.findings import broken
from eagle3.serve.bench.result import BenchResult
from eagle3.serve.bench.rows import Percentiles, Row


def bench_json(result: BenchResult) -> str:
    """See docs/schemas/bench.schema.json."""
    return json.dumps(result.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)


def render_bench(result: BenchResult, width: int = 120) -> str:
    """Text."""
    sets = ", ".join(f"{printable_name(name)} {count}" for name, count in result.sets.items())
    parts: list[Any] = [Text(f"{printable_name(result.target)}; conversations: {sets}"), Text("")]
    for concurrency in dict.fromkeys(row.concurrency for row in result.rows):
        rows = [row for row in result.rows if row.concurrency == concurrency]
        parts += [_speeds(concurrency, rows), Text(""), _latencies(rows), Text("")]
        if any(row.acceptance is not None for row in rows):
            parts += [_acceptances(rows), Text("")]
        if any(len(row.by_set) > 1 for row in rows):
            parts += [_by_set(rows), Text("")]
    lines = [f"  - {printable(note)}" for note in result.notes]
    lines += [f"  ! [{item.kind}] {item.where}: {printable(item.message)}; {item.fix}" for item in result.problems]
    parts += [Text(textwrap.fill(line, width, subsequent_indent="    ")) for line in lines]
    return rendered(Group(*parts), width)


def rendered(what: Any, width: int = 120) -> str:
    """Plain text of something that rich can print."""
    console = Console(width=width, color_system=None, force_terminal=False, markup=False, highlight=False)
    with console.capture() as captured:
        console.print(what)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def table(title: str, columns: Sequence[str], left: int = 1) -> Table:
    """A bare table whose first `left` columns are text."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for place, name in enumerate(columns):
        made.add_column(name, justify="left" if place < left else "right", no_wrap=True)
    return made


def label(row: Row) -> str:
    """The server of a row; its address where it did not say what it is."""
    return f"{row.name} (baseline)" if row.baseline and row.name != "no drafter" else row.name


def _speeds(concurrency: int, rows: Sequence[Row]) -> Table:
    made = table(
        f"concurrency {concurrency}",
        (
            "server",
            "tok/s",
            "95% interval",
            "decode tok/s",
            "a request",
            "over baseline",
            "95% interval",
            "requests",
            "",
        ),
    )
    for row in rows:
        speed = row.speed
        state = "LOST" if row.lost else "BROKEN" if broken(row) else "disturbed" if row.foreign or row.failures else ""
        made.add_row(
            label(row),
            *(_both(None if speed is None else speed.tok_s, ".1f")),
            "" if speed is None else f"{speed.decode_tok_s.value:.1f}",
            "" if speed is None else f"{speed.by_request.value:.1f}",
            *(_both(row.speedup, ".3f", "x")),
            f"{row.requests:,}" + (f" + {len(row.failures)} failed" if row.failures else ""),
            state,
        )
    return made


def _latencies(rows: Sequence[Row]) -> Table:
    made = table(
        "milliseconds, p50 / p95 / p99", ("server", "first token", "between tokens", "between updates", "cycle")
    )
    for row in rows:
        if row.latency is None:
            continue
        found = row.latency
        cycle = "" if row.cycle_ms is None else f"{row.cycle_ms:.2f}"
        made.add_row(label(row), _three(found.ttft), _three(found.inter_token), _three(found.update), cycle)
    return made


def _acceptances(rows: Sequence[Row]) -> Table:
    made = table(
        "acceptance",
        ("server", "length", "95% interval", "rate", "verifies", "of those that get there, at depth 1, 2, .."),
    )
    for row in rows:
        found = row.acceptance or row.counted
        if found is None:
            continue
        rate = "" if found.rate is None else f"{found.rate:.1%}"
        made.add_row(label(row), *_both(found.length, ".3f"), rate, f"{found.verifies:,}", _depths(found))
    return made


def _by_set(rows: Sequence[Row]) -> Table:
    made = table("by set", ("server", "set", "tok/s", "95% interval", "length", "95% interval", "requests"), left=2)
    for row in rows:
        for name, item in row.by_set.items():
            length = _both(None if item.acceptance is None else item.acceptance.length, ".3f")
            made.add_row(label(row), printable_name(name), *_both(item.tok_s, ".1f"), *length, f"{item.requests:,}")
    return made


def _depths(found: Acceptance) -> str:
    if not found.by_depth:
        return "not told"
    return " ".join(
        "-" if math.isnan(item.share) else f"{item.share:.3f}"
        + ("" if math.isnan(item.standard_error) else f"±{item.standard_error:.3f}")
        for item in found.by_depth
    )  # fmt: skip


def _both(figure: Figure | None, form: str, unit: str = "") -> tuple[str, str]:
    if figure is None or math.isnan(figure.value):
        return "", ""
    low, high = figure.interval
    spread = "" if math.isnan(low) else f"{low:{form}} to {high:{form}}"
    return f"{figure.value:{form}}{unit}", spread


def _three(found: Percentiles) -> str:
    return "" if found is None else " / ".join(f"{figure.value:.2f}" for figure in found.values())
