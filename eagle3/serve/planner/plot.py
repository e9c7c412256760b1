"""A plan as a picture: tokens/s against draft steps, with the measured points. Needs the extra `plot`."""

from __future__ import annotations

from pathlib import Path

from eagle3.serve.picture import new_figure, save_figure
from eagle3.serve.planner.plan import Plan
from eagle3.serve.planner.rows import BatchPlan


def plot_plan(plan: Plan, path: Path) -> None:
    """Writes the picture, one panel a batch.

    Raises:
        ProblemsError: matplotlib is not installed, or the file's name does not say a kind that it writes.
    """
    figure = new_figure(path, "plan.plot", 7, 4.2 * len(plan.batches))
    panels = figure.subplots(len(plan.batches), 1, squeeze=False)[:, 0]
    for panel, batch in zip(panels, plan.batches, strict=True):
        _panel(panel, plan, batch)
    save_figure(figure, path)


def _panel(panel: object, plan: Plan, batch: BatchPlan) -> None:
    from matplotlib.axes import Axes

    assert isinstance(panel, Axes)
    chains = [row for row in batch.rows if row.topk == 1]
    steps = [row.steps for row in chains]
    panel.plot(steps, [row.tok_s for row in chains], "-o", markersize=4, label="predicted")
    panel.fill_between(
        steps, [row.interval[0] for row in chains], [row.interval[1] for row in chains], alpha=0.2, label="95% interval"
    )
    for row in batch.rows:
        if row.topk > 1:
            label = f"topk {row.topk}, {row.draft_tokens} tokens"
            below, above = row.tok_s - row.interval[0], row.interval[1] - row.tok_s
            panel.errorbar([row.steps], [row.tok_s], [[below], [above]], fmt="^", capsize=3, label=label)
    measured = [
        (item.seen.point.steps, item.seen.measured)
        for item in plan.residuals
        if item.seen.quantity == "tok_s" and item.seen.point.batch == batch.batch
    ]
    scaled = any(value != 1 for value in plan.scale.model_dump().values())
    if measured:
        label = "measured, before the change" if scaled else "measured"
        panel.plot(*zip(*measured, strict=True), "x", color="black", markersize=8, label=label)
    if batch.baseline is not None:
        panel.axhline(batch.baseline, color="grey", linestyle="--", label="no drafter")
    panel.set_xlabel("draft steps")
    panel.set_ylabel("tokens/s")
    panel.set_title(f"batch {batch.batch}")
    panel.set_ylim(bottom=0)
    panel.legend(fontsize="small")
