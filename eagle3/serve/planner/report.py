"""A plan for people (a table and sentences) and for programs (JSON, docs/schemas/plan.schema.json)."""

from __future__ import annotations

import json
import math
import textwrap
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from eagle3.serve.planner.basis import Input
from eagle3.serve.planner.plan import Plan
from eagle3.serve.planner.rows import BatchPlan, Decider, Row

UNLIKE_A_STEP = 1.25
"""A verify of one token that takes so many plain decoding steps is worth a look."""
PART_WORDS = {"verify": "the target's verify", "draft": "the drafter", "overhead": "the overhead"}


def findings(plan: BatchPlan) -> list[str]:
    """What follows from one batch's rows, in sentences."""
    return [
        _verdict(plan),
        *_limit(plan),
        *_line(plan),
        *_break_even(plan),
        *_break_even_cycle(plan),
        *_plain(plan),
        *_near(plan),
        *_losers(plan),
    ]


def _verdict(plan: BatchPlan) -> str:
    best = plan.best
    speed = f"{best.tok_s:.1f} tokens/s (95% interval {best.interval[0]:.1f} to {best.interval[1]:.1f})"
    if plan.baseline is None:
        return f"best: {best.name} with {speed}; without a baseline nothing says whether that beats no drafter"
    assert best.gain is not None and best.beats is not None
    if best.gain > 0:
        return (
            f"best: {best.name} with {speed}, {best.gain:.1%} above the {plan.baseline:.1f} without a drafter; it "
            f"beats that in {best.beats:.0%} of the draws and is the best setting in {best.best:.0%}"
        )
    return (
        f"no step count beats the {plan.baseline:.1f} tokens/s without a drafter: the best is {best.name} with "
        f"{speed}, {-best.gain:.1%} below, and beats it in {best.beats:.0%} of the draws"
    )


def _limit(plan: BatchPlan) -> list[str]:
    if not plan.best.parts:
        return []
    first, *others = plan.best.parts
    words = [
        f"a free {'drafter' if part.name == 'draft' else part.name} would win at most {part.most_gain:.1%}"
        for part in others
        if part.share > 0
    ]
    rest = f": {', '.join(words)}" if words else ""
    return [f"{PART_WORDS[first.name]} limits: it is {first.share:.0%} of the cycle at {plan.best.name}{rest}"]


def _line(plan: BatchPlan) -> list[str]:
    if plan.line is None:
        return []
    line = plan.line
    low, high = line.per_step_interval
    said = (
        f"a cycle takes {line.fixed_ms:.3g} ms and {line.per_step_ms:+.3g} ms for each draft step "
        f"(95% interval {low:+.3g} to {high:+.3g}), drafting and verifying together"
    )
    if line.per_step_ms < 0:
        said += (
            ": less than nothing, which no step can take, and is taken as it came out; either it is an error of "
            "measurement, or something else than the GPU's work, as a rule the CPU, sets the pace"
        )
    elif low <= 0:
        said += ": not to be told from nothing"
    return [said]


def _break_even_cycle(plan: BatchPlan) -> list[str]:
    if plan.line is None or plan.break_even_cycle is None or plan.baseline is None:
        return []
    factor, (low, high) = plan.break_even_cycle
    spread = f"({low:.2f} to {high:.2f} of its time)"
    row = max(plan.rows, key=lambda row: row.tok_s)
    at = f"at {row.name}: {factor * row.cycle_ms:.2f} ms in place of {row.cycle_ms:.2f}"
    if factor < 1:
        return [
            f"to break even the whole cycle must get {1 - factor:.0%} shorter {spread}, {at}; verify or drafts alone, "
            "parts of it, by more than that"
        ]
    return [f"it breaks even until the whole cycle gets {factor - 1:.0%} longer {spread}, {at}"]


def _break_even(plan: BatchPlan) -> list[str]:
    if plan.break_even is None:
        return []
    factor, (low, high) = plan.break_even
    row = max(plan.rows, key=lambda row: row.break_even_verify or 0)
    assert row.verify_ms is not None
    if factor == 0:
        return ["even a verify of no time would not break even: drafts and overhead take longer than they give"]
    spread = f"({low:.2f} to {high:.2f} of its time)"
    at = f"at {row.name}: {factor * row.verify_ms:.1f} ms in place of {row.verify_ms:.1f}"
    if factor < 1:
        return [f"to break even verify must get {1 - factor:.0%} cheaper {spread}, {at}"]
    return [f"it breaks even until verify gets {factor - 1:.0%} dearer {spread}, {at}"]


def _plain(plan: BatchPlan) -> list[str]:
    if plan.plain_step is None or plan.baseline is None or plan.plain_step < UNLIKE_A_STEP:
        return []
    plain = 1000 * plan.batch / plan.baseline
    return [
        f"a verify of one token a request would take {plan.plain_step * plain:.1f} ms by this line, a step of plain "
        f"decoding takes {plain:.1f}: {plan.plain_step:.1f} times as long for the same work, so look there first"
    ]


def _near(plan: BatchPlan) -> list[str]:
    if len(plan.near) < 2:
        return []
    slowest = min(row.tok_s for row in plan.near)
    names = ", ".join(row.name.removesuffix(" steps") if row.topk == 1 else row.name for row in plan.near)
    sentence = f"{names} steps are within {1 - slowest / plan.best.tok_s:.1%} of each other"
    return [sentence, *map(_decider, plan.deciders), *_falling(plan)]


def _decider(decider: Decider) -> str:
    deeper = decider.steps + 1
    if decider.needed <= 0:
        return (
            f"{deeper} steps are no slower than {decider.steps}, whatever is accepted at depth {deeper}, by the points"
        )
    if decider.needed >= 1:
        return f"{deeper} steps cannot beat {decider.steps}, whatever is accepted at depth {deeper}"
    return (
        f"{deeper} steps beat {decider.steps} only if, of the cycles that get to depth {deeper}, more than "
        f"{decider.needed:.0%} accept the draft there (taken: {decider.taken:.0%})"
    )


def _falling(plan: BatchPlan) -> list[str]:
    if plan.if_falling is None:
        return []
    fall, row = plan.if_falling
    alike = "too" if row is plan.best else f"and {plan.best.name} where it does not fall"
    return [
        f"if each depth accepts only {fall:.2f} of what the one before does, {row.name} would be best, {alike}; "
        f"`eagle3 evaluate` measures acceptance by depth without a server"
    ]


def _losers(plan: BatchPlan) -> list[str]:
    if not plan.wins:
        return []
    lost = [row for row in plan.rows if row.gain is not None and row.gain <= 0]
    if not lost:
        return []
    return ["slower than no drafter: " + ", ".join(f"{row.name} ({row.gain:+.1%})" for row in lost)]


def render_plan(plan: Plan, width: int = 120) -> str:
    """Text: for each batch a table and what follows; then what it rests on."""
    parts: list[Any] = []
    for batch in plan.batches:
        reasons = dict.fromkeys(reason for row in batch.rows for reason in row.extrapolated)
        marked = [f"*: extrapolated: {'; '.join(reasons)}"] if reasons else []
        parts += [_table(plan, batch), *_items([*marked, *findings(batch)], width), Text("")]
    if plan.open is not None:
        what = ["left open by these points:", *(f"- {one}" for one in plan.open.what)]
        parts += [Text("\n  ".join(what)), *_items([f"what would supply it, cheapest: {plan.open.cheapest}"], width)]
        parts.append(Text(""))
    key = "length: acceptance length; gain: against no drafter"
    if any(batch.line is None for batch in plan.batches):
        key += "; verify x: factor on verify's time that would equal none"
    parts += [Text(key), Text(""), _inputs_table(plan), *_items(_fit_lines(plan), width)]
    console = Console(width=width, color_system=None, force_terminal=False, markup=False, highlight=False)
    with console.capture() as captured:
        console.print(Group(*parts))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _items(lines: list[str], width: int) -> list[Text]:
    return [Text(textwrap.fill(f"  - {line}", width, subsequent_indent="    ")) for line in lines]


def _table(plan: Plan, batch: BatchPlan) -> Table:
    scaled = [f"{name} x {value:g}" for name, value in plan.scale.model_dump().items() if value != 1]
    title = f"batch {batch.batch}" + (f", with {', '.join(scaled)}" if scaled else "")
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    costs, factor = (("verify ms", "draft ms"), ("verify x",)) if batch.line is None else (("cycle ms",), ())
    for name in ("setting", "length", *costs, "tok/s", "95% interval", "gain", *factor, ""):
        table.add_column(name, justify="left" if name in ("setting", "") else "right", no_wrap=True)
    for row in batch.rows:
        marks = ("best " if row is batch.best else "") + ("*" if row.extrapolated else "")
        table.add_row(*_cells(row), marks)
    return table


def _cells(row: Row) -> list[str]:
    if row.verify_ms is None or row.draft_ms is None:
        costs, factor = [f"{row.cycle_ms:.3f}"], []
    else:
        costs = [f"{row.verify_ms:.2f}", f"{row.draft_ms:.2f}"]
        factor = ["" if row.break_even_verify is None else f"{row.break_even_verify:.2f}"]
    return [
        row.name,
        f"{row.acceptance_length:.3f}",
        *costs,
        f"{row.tok_s:.1f}",
        f"{row.interval[0]:.1f} to {row.interval[1]:.1f}",
        "" if row.gain is None else f"{row.gain:+.1%}",
        *factor,
    ]


def _inputs_table(plan: Plan) -> Table:
    table = Table(title="rests on", title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("input", "kind", "value", "95% interval", "from"):
        table.add_column(name)
    for item in plan.inputs:
        spread = "" if item.interval is None else f"{item.interval[0]:.4g} to {item.interval[1]:.4g}"
        table.add_row(item.name, item.kind, _value(item), spread, item.source)
    return table


def _value(item: Input) -> str:
    if isinstance(item.value, tuple):
        return ", ".join(f"{share:.3f}" for share in item.value)
    return f"{item.value:.4g}"


def _fit_lines(plan: Plan) -> list[str]:
    lines = []
    if plan.residuals:
        worst = max(abs(item.relative) for item in plan.residuals)
        count = f"{len(plan.residuals)} measurements"
        if plan.freedom <= 0:
            lines.append(f"{count} determine the fit exactly: no residual says whether the model holds")
        else:
            lines.append(f"{count}, {plan.freedom} more than unknowns: largest residual {worst:.1%}")
    lines.append(f"intervals: each measurement is taken to have a standard error of {plan.error:.1%}")
    return [*lines, *plan.notes]


def plan_json(plan: Plan) -> str:
    """The whole plan; see docs/schemas/plan.schema.json."""
    value = {
        "format": "eagle3-plan",
        "format_version": 1,
        "scale": plan.scale.model_dump(),
        "batches": [_batch_dict(batch) for batch in plan.batches],
        "open": None if plan.open is None else asdict(plan.open),
        "inputs": [asdict(item) for item in plan.inputs],
        "fit": {
            "measurements": len(plan.residuals),
            "degrees_of_freedom": plan.freedom,
            "relative_error": plan.error,
            "residuals": [
                {
                    "steps": item.seen.point.steps,
                    "draft_tokens": item.seen.point.tokens,
                    "batch": item.seen.point.batch,
                    "quantity": item.seen.quantity,
                    "measured": item.seen.measured,
                    "predicted": item.predicted,
                }
                for item in plan.residuals
            ],
        },
        "notes": list(plan.notes),
    }
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)


def _batch_dict(plan: BatchPlan) -> dict[str, Any]:
    return {
        "batch": plan.batch,
        "baseline_tok_s": plan.baseline,
        "beats_baseline": plan.wins,
        "best": plan.rows.index(plan.best),
        "near_best": [plan.rows.index(row) for row in plan.near],
        "rows": [_row_dict(row) for row in plan.rows],
        "deciders": [asdict(item) for item in plan.deciders],
        "best_if_acceptance_falls": None
        if plan.if_falling is None
        else {"acceptance_fall": plan.if_falling[0], "best": plan.rows.index(plan.if_falling[1])},
        "break_even_verify": None if plan.break_even is None else plan.break_even[0],
        "break_even_verify_interval": None if plan.break_even is None else plan.break_even[1],
        "break_even_cycle": None if plan.break_even_cycle is None else plan.break_even_cycle[0],
        "break_even_cycle_interval": None if plan.break_even_cycle is None else plan.break_even_cycle[1],
        "line": None if plan.line is None else asdict(plan.line),
        "verify_of_one_token_in_plain_steps": plan.plain_step,
        "findings": findings(plan),
    }


def _row_dict(row: Row) -> dict[str, Any]:
    limits = [
        {**asdict(part), "most_gain": part.most_gain if math.isfinite(part.most_gain) else None} for part in row.parts
    ]
    return {**asdict(row), "limits": limits}
