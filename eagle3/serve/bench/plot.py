"""A bench as a picture: tokens/s against concurrency, and acceptance by depth. Needs the extra `plot`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3.serve.bench.figures import Acceptance
from eagle3.serve.bench.findings import broken
from eagle3.serve.bench.report import label
from eagle3.serve.bench.result import BenchResult
from eagle3.serve.bench.rows import Row
from eagle3.serve.picture import new_figure, save_figure


def plot_bench(result: BenchResult, path: Path) -> None:
    """Writes the picture; rows that are lost or broken are left out.

    Raises:
        ProblemsError: kind `bench.plot`, see `new_figure`.
    """
    figure = new_figure(path, "bench.plot", 12, 4.2)
    rows = [row for row in result.rows if row.speed is not None and not broken(row) and not row.lost]
    speed, depth = figure.subplots(1, 2)
    for url in dict.fromkeys(row.url for row in rows):
        of_url = [row for row in rows if row.url == url]
        _speed(speed, of_url)
        deepest = [(row, row.acceptance) for row in of_url if row.acceptance is not None and row.acceptance.by_depth]
        if deepest:
            _depths(depth, *deepest[0])
    speed.set(xlabel="conversations in flight", ylabel="tokens/s", title="speed")
    speed.set_ylim(bottom=0)
    depth.set(xlabel="depth", ylabel="accepted, of those that get there", title="acceptance by depth", ylim=(0, 1))
    for panel in (speed, depth):
        if panel.get_legend_handles_labels()[0]:
            panel.legend(fontsize="small")
    save_figure(figure, path)


def _speed(panel: Any, rows: Sequence[Row]) -> None:
    rows = sorted(rows, key=lambda row: row.concurrency)
    figures = [row.speed.tok_s for row in rows if row.speed is not None]
    values = [item.value for item in figures]
    errors = [[item.value - item.interval[0] for item in figures], [item.interval[1] - item.value for item in figures]]
    concurrency = [row.concurrency for row in rows]
    style = "--o" if rows[0].baseline else "-o"
    panel.errorbar(concurrency, values, errors, fmt=style, markersize=4, capsize=3, label=label(rows[0]))


def _depths(panel: Any, row: Row, found: Acceptance) -> None:
    depths = [item for item in found.by_depth if item.reached]
    errors = [0.0 if math.isnan(item.standard_error) else 1.96 * item.standard_error for item in depths]
    shares = [item.share for item in depths]
    name = f"{label(row)}, concurrency {row.concurrency}"
    panel.errorbar([item.depth for item in depths], shares, errors, fmt="-o", markersize=4, capsize=3, label=name)
