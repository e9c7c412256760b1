"""A sweep for people: for each concurrency the rows by speed, with what the plan said."""

from __future__ import annotations

import json
import textwrap
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from eagle3.data.show.printable import printable, printable_name
from eagle3.serve.bench.findings import broken
from eagle3.serve.bench.report import rendered, table
from eagle3.serve.sweep.compare import Comparison
from eagle3.serve.sweep.result import SweepResult


def sweep_json(result: SweepResult) -> str:
    """See docs/schemas/sweep.schema.json."""
    return json.dumps(result.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)


def render_sweep(result: SweepResult, width: int = 120) -> str:
    """Text."""
    parts: list[Any] = [Text(printable_name(result.target)), Text("")]
    for concurrency in result.concurrencies:
        comparison = next((one for one in result.comparisons if one.concurrency == concurrency), None)
        parts += [_ranked(result, concurrency, comparison), Text("")]
    failed = [row for row in result.sweep_rows if row.failed]
    lines = [f"  - not ranked: {row.setting.name}: failed, see {row.log}" for row in failed]
    lines += [
        f"  - not ranked: {row.name}, concurrency {row.concurrency}: broken" for row in result.flat if broken(row)
    ]
    lines += [f"  - {printable(note)}" for note in result.notes]
    lines += [f"  ! [{item.kind}] {item.where}: {printable(item.message)}; {item.fix}" for item in result.problems]
    parts += [Text(textwrap.fill(line, width, subsequent_indent="    ")) for line in lines]
    return rendered(Group(*parts), width)


def _ranked(result: SweepResult, concurrency: int, comparison: Comparison | None) -> Table:
    columns = (
        "server",
        "tok/s",
        "95% interval",
        "over baseline",
        "length",
        "cycle ms",
        "decode tok/s",
        "plan",
        "off by",
    )
    made = table(f"concurrency {concurrency}, the fastest first", columns)
    held = {} if comparison is None else {item.name: item for item in comparison.held}
    for row in result.ranking(concurrency):
        assert row.speed is not None
        speed, said = row.speed, held.get(row.name)
        low, high = speed.tok_s.interval
        made.add_row(
            row.name,
            f"{speed.tok_s.value:.1f}",
            f"{low:.1f} to {high:.1f}",
            "" if row.speedup is None else f"{row.speedup.value:.3f}x",
            "" if row.acceptance is None else f"{row.acceptance.length.value:.3f}",
            "" if row.cycle_ms is None else f"{row.cycle_ms:.2f}",
            f"{speed.decode_tok_s.value:.1f}",
            "" if said is None else f"{said.predicted:.1f}",
            "" if said is None else "used" if said.used else f"{said.deviation:+.1%}",
        )
    return made
