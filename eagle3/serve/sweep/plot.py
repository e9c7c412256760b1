"""A sweep as a picture: decode tokens/s against draft steps, with the plan's curve. Needs the extra `plot`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3.serve.bench.result import usable
from eagle3.serve.bench.rows import Row
from eagle3.serve.picture import new_figure, save_figure
from eagle3.serve.sweep.compare import Comparison
from eagle3.serve.sweep.result import SweepResult


def plot_sweep(result: SweepResult, path: Path) -> None:
    """Writes the picture, one panel a concurrency; rows that failed or are broken are left out.

    Raises:
        ProblemsError: kind `sweep.plot`, see `new_figure`.
    """
    count = len(result.concurrencies)
    figure = new_figure(path, "sweep.plot", 7, 4.2 * count)
    panels = figure.subplots(count, 1, squeeze=False)[:, 0]
    for panel, concurrency in zip(panels, result.concurrencies, strict=True):
        rows = [row for row in result.flat if row.concurrency == concurrency and usable(row)]
        plan = next((one for one in result.comparisons if one.concurrency == concurrency), None)
        _panel(panel, concurrency, rows, plan)
    save_figure(figure, path)


def _panel(panel: Any, concurrency: int, rows: Sequence[Row], comparison: Comparison | None) -> None:
    if comparison is not None and comparison.plan is not None:
        chains = [row for row in comparison.plan.batches[0].rows if row.topk == 1]
        steps = [row.steps for row in chains]
        panel.plot(steps, [row.tok_s for row in chains], "-", label="plan")
        low, high = [row.interval[0] for row in chains], [row.interval[1] for row in chains]
        panel.fill_between(steps, low, high, alpha=0.2, label="its 95% interval")
    used = set() if comparison is None else {item.name for item in comparison.held if item.used}
    for label, marker, chosen in (
        ("measured", "o", [row for row in rows if row.facts.topk in (None, 1) and row.name not in used]),
        ("measured, the plan's points", "x", [row for row in rows if row.name in used]),
        ("measured trees", "^", [row for row in rows if row.facts.topk not in (None, 1)]),
    ):
        points = [(row.facts.steps, row.speed.decode_tok_s) for row in chosen if row.facts.steps and row.speed]
        if points:
            values = [figure.value for _, figure in points]
            errors = [
                [figure.value - figure.interval[0] for _, figure in points],
                [figure.interval[1] - figure.value for _, figure in points],
            ]
            panel.errorbar([steps for steps, _ in points], values, errors, fmt=marker, capsize=3, label=label)
    plain = next((row for row in rows if row.baseline and row.speed is not None), None)
    if plain is not None and plain.speed is not None:
        panel.axhline(plain.speed.decode_tok_s.value, color="grey", linestyle="--", label="no drafter")
    panel.set(xlabel="draft steps", ylabel="decode tokens/s", title=f"concurrency {concurrency}")
    panel.set_ylim(bottom=0)
    if panel.get_legend_handles_labels()[0]:
        panel.legend(fontsize="small")
