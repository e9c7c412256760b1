"""Chains from two step counts at a batch, where how a cycle splits is open.

The figures are SGLang 0.5.16's on one H200 with SmolLM2-135M, batch 1, CUDA graphs: decode tokens/s of two passes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from eagle3.errors import ProblemsError
from eagle3.serve.planner import Plan, Row, make_plan, plan_json, render_plan

from .cases import World, config

SCHEMA = json.loads((Path(__file__).parents[4] / "docs/schemas/plan.schema.json").read_text(encoding="utf-8"))
SPEEDS = {1: [492.0], 2: [610.8], 3: [650.5, 681.9], 4: [637.1, 693.2], 5: [689.8, 702.1]}
LENGTHS = {1: 1.593, 2: 1.897, 3: 2.083, 4: 2.123, 5: 2.177}
OFFLINE = [1.578, 1.901, 2.071, 2.174, 2.222]
PLAIN = (787.5 + 734.4) / 2
PROFILE = {
    "steps": 3,
    "draft_tokens": 4,
    "verify_ms": 1.559511,
    "draft_ms": 0.302974,
    "cycle_ms": 3.132518,
    "acceptance_length": 2.213115,
}
TREE = {"steps": 3, "topk": 2, "draft_tokens": 5}


def measured(steps: int, lengths: bool = True) -> dict[str, Any]:
    point = {"steps": steps, "draft_tokens": steps + 1, "tok_s": float(np.mean(SPEEDS[steps]))}
    return {**point, "acceptance_length": LENGTHS[steps]} if lengths else point


def offline(folder: Path) -> str:
    rows = [
        {"steps": steps, "length": length, "interval": [length - 0.03, length + 0.03]}
        for steps, length in enumerate(OFFLINE, 1)
    ]
    path = folder / "evaluation.json"
    path.write_text(json.dumps({"format": "eagle3-evaluation", "format_version": 1, "by_steps": rows}))
    return str(path)


def by_steps(plan: Plan, place: int = 0) -> dict[int, Row]:
    return {row.steps: row for row in plan.batches[place].rows}


@pytest.mark.parametrize("source", ["points", "both", "file"])
def test_two_measured_points_and_the_baseline_foresee_the_other_step_counts(tmp_path: Path, source: str) -> None:
    given = {} if source == "points" else {"acceptance_file": offline(tmp_path)}
    points = [measured(steps, lengths=source != "file") for steps in (1, 4)]
    plan = make_plan(config(points=points, baseline=PLAIN, **given))
    rows = by_steps(plan)
    for steps in (2, 3, 5):
        for speed in SPEEDS[steps]:
            assert rows[steps].tok_s == pytest.approx(speed, rel=0.1)
            assert rows[steps].interval[0] < rows[steps].tok_s < rows[steps].interval[1]
    (batch,) = plan.batches
    assert batch.wins is False and all(row.tok_s < PLAIN for row in batch.rows)
    assert "no step count beats the 761.0 tokens/s" in render_plan(plan)
    assert [bool(row.extrapolated) for row in batch.rows] == [False] * 4 + [True] * 6


def test_the_cycles_are_the_arithmetic_and_a_negative_slope_is_said_not_clipped() -> None:
    plan = make_plan(config(points=[measured(1), measured(4)], baseline=PLAIN))
    first, last = (1000 * LENGTHS[steps] / float(np.mean(SPEEDS[steps])) for steps in (1, 4))
    rows, line = by_steps(plan), plan.batches[0].line
    assert rows[3].cycle_ms == pytest.approx(first + (last - first) * 2 / 3)
    assert line is not None and line.per_step_ms == pytest.approx((last - first) / 3) and line.per_step_ms < -0.01
    assert line.per_step_interval[0] < line.per_step_ms < 0 < line.per_step_interval[1]
    assert line.fixed_ms == pytest.approx(first - (last - first) / 3)
    text = render_plan(plan)
    assert "less than nothing" in text and "-0.0153 ms for each draft step" in text
    assert "more than -" not in text, "no negative share is asked for"


def test_what_needs_the_split_is_left_open_with_what_would_supply_it() -> None:
    plan = make_plan(config(points=[measured(1), measured(4)], baseline=PLAIN, trees=[TREE], batches=[1, 8]))
    assert [batch.batch for batch in plan.batches] == [1] and all(row.topk == 1 for row in plan.batches[0].rows)
    assert (
        plan.open is not None and plan.open.cheapest == "verify_ms and draft_ms at 1 step, from a profile of one cycle"
    )
    limits, trees, batch = plan.open.what
    assert "what limits" in limits and "verify must get" in limits
    assert "3 steps, topk 2, 5 draft tokens" in trees and batch.startswith("batch 8: ")
    row = plan.batches[0].rows[0]
    assert (row.verify_ms, row.draft_ms, row.overhead_ms, row.break_even_verify, row.parts) == (None,) * 4 + ((),)
    value = json.loads(plan_json(plan))
    jsonschema.validate(value, SCHEMA)
    assert value["open"]["what"] == list(plan.open.what) and value["batches"][0]["line"]["steps"] == [1, 4]
    text = render_plan(plan)
    assert "left open by these points" in text and "the whole cycle must get" in text and "verify limits" not in text
    assert all(len(line) <= 120 for line in text.splitlines())


def test_the_whole_cycles_break_even_is_what_it_says() -> None:
    (batch,) = make_plan(config(points=[measured(1), measured(4)], baseline=PLAIN, steps=[1, 2, 3, 4])).batches
    assert batch.break_even_cycle is not None and batch.break_even is None and batch.plain_step is None
    factor, (low, high) = batch.break_even_cycle
    shorter = factor * batch.best.cycle_ms
    assert 1000 * batch.best.acceptance_length / shorter == pytest.approx(PLAIN) and low < factor < high


def test_the_proposed_profile_supplies_what_was_open() -> None:
    world = World([0.7], fixed=12, per_token=0.9, draft=0.4, overhead=0.6)
    points = [world.point(1, "tok_s"), world.point(4, "tok_s")]
    assert make_plan(config(points=points, acceptance=0.7)).open is not None
    points[0] = world.point(1, "tok_s", "verify_ms", "draft_ms")
    plan = make_plan(config(points=points, acceptance=0.7, trees=[TREE], batches=[1, 8]))
    assert plan.open is None and len(plan.batches) == 2
    expected = [world.tok_s(steps, 8) for steps in range(1, 11)]
    assert [row.tok_s for row in plan.batches[1].rows if row.topk == 1] == pytest.approx(expected, rel=1e-4)


def test_a_measured_profile_identifies_the_split_and_the_overhead() -> None:
    plan = make_plan(config(points=[measured(1), measured(4), PROFILE], baseline=PLAIN))
    fitted = {item.name: item.value for item in plan.inputs if item.kind == "fitted"}
    assert plan.open is None and plan.batches[0].line is None
    assert fitted["overhead_ms"] == pytest.approx(3.132518 - 1.559511 - 0.302974, rel=0.15)
    assert fitted["draft_ms_per_step"] == pytest.approx(0.101, rel=0.02)
    for steps in (2, 3, 5):
        assert by_steps(plan)[steps].tok_s == pytest.approx(np.mean(SPEEDS[steps]), rel=0.1)
    jsonschema.validate(json.loads(plan_json(plan)), SCHEMA)


def test_one_point_is_refused_with_the_cheapest_run(tmp_path: Path) -> None:
    for values in ({"points": [measured(1)]}, {"points": [measured(1)] * 2}):
        with pytest.raises(ProblemsError) as caught:
            make_plan(config(baseline=PLAIN, **values, acceptance_file=offline(tmp_path)))
        (one,) = caught.value.problems
        assert one.kind == "plan.missing"
        assert one.fix.endswith("; for the chains at batch 1 alone: one more run at 5 steps: its tok_s")
    make_plan(config(points=[measured(1), measured(5)], acceptance_file=offline(tmp_path)))


def test_a_part_that_is_to_be_scaled_needs_the_split() -> None:
    with pytest.raises(ProblemsError, match=r"plan\.missing") as caught:
        make_plan(config(points=[measured(1), measured(4)], scale={"verify": 0.8}))
    assert "alone" not in caught.value.problems[0].fix


def of_two_batches() -> tuple[World, World, list[dict[str, Any]]]:
    """A server whose verify is dearer at batch 8, but not by the token: no one model of both."""
    one = World([0.6, 0.5, 0.5, 0.4], fixed=3, per_token=0.0, draft=0.0)
    eight = World([0.6, 0.5, 0.5, 0.4], fixed=6, per_token=0.0, draft=0.05)
    names = ("tok_s", "acceptance_length")
    points = [one.point(steps, *names) for steps in (1, 4)] + [eight.point(steps, *names, batch=8) for steps in (1, 4)]
    return one, eight, points


def test_each_batch_of_a_bench_has_its_own_line(tmp_path: Path) -> None:
    one, eight, points = of_two_batches()
    file = tmp_path / "bench.json"
    baseline = [{"batch": 1, "tok_s": 760}, {"batch": 8, "tok_s": 3000}]
    head = {"format": "eagle3-bench", "format_version": 1}
    file.write_text(json.dumps({**head, "points": points, "baseline": baseline}))
    rates = [0.6, 0.5, 0.5, 0.4]
    plan = make_plan(config(bench_files=[str(file)], acceptance=rates, steps=[1, 2, 3, 4, 5]))
    assert [batch.batch for batch in plan.batches] == [1, 8] and plan.open is not None
    for place, world, batch in ((0, one, 1), (1, eight, 8)):
        expected = [world.tok_s(steps, batch) for steps in range(1, 6)]
        assert [row.tok_s for row in plan.batches[place].rows] == pytest.approx(expected, rel=1e-4)
        assert plan.batches[place].baseline == baseline[place]["tok_s"]
    assert any("do not fit one model of all batches" in note for note in plan.notes)
    alone = make_plan(config(bench_files=[str(file)], acceptance=rates, steps=[3], batches=[8]))
    assert alone.batches[0].rows[0].tok_s == pytest.approx(eight.tok_s(3, 8), rel=1e-4)
    assert len([item for item in alone.residuals if item.seen.point.batch == 1]) == 0


def test_batches_that_fit_one_model_share_it() -> None:
    world = World([0.7], fixed=12, per_token=0.2, draft=0.4)
    points = [world.point(steps, "tok_s", batch=batch) for steps in (1, 4) for batch in (1, 8)]
    plan = make_plan(config(points=points, acceptance=0.7, batches=[1, 4]))
    assert plan.open is None
    assert [row.tok_s for row in plan.batches[1].rows] == pytest.approx(
        [world.tok_s(steps, 4) for steps in range(1, 11)], rel=1e-3
    )


def test_a_line_that_ends_in_no_time_leaves_those_steps_out() -> None:
    points = [{"steps": 1, "cycle_ms": 3.0}, {"steps": 4, "cycle_ms": 1.5}]
    plan = make_plan(config(points=points, acceptance=0.5, baseline=760, steps=[2, 5, 6, 7, 10]))
    jsonschema.validate(json.loads(plan_json(plan)), SCHEMA)
    assert [row.steps for row in plan.batches[0].rows] == [2, 5, 6]
    assert any("not predicted at batch 1: 7, 10 steps" in note for note in plan.notes)
    assert plan.batches[0].rows[-1].cycle_ms == pytest.approx(0.5)
    with pytest.raises(ProblemsError, match=r"plan\.cost"):
        make_plan(config(points=points, acceptance=0.5, steps=[10]))


def test_intervals_of_a_line_hold_a_new_run_about_as_often_as_they_say() -> None:
    generator = np.random.default_rng(5)
    inside = total = 0
    world = World([0.7], 3.0, 0.02, 0.05)
    for trial in range(60):
        points = [world.noisy(world.point(steps, "tok_s"), 0.02, generator) for steps in (1, 4)]
        for row in (
            make_plan(config(points=points, acceptance=0.7, steps=[2, 3, 6], draws=300, seed=trial)).batches[0].rows
        ):
            ran = world.tok_s(row.steps) * float(np.exp(0.02 * generator.standard_normal()))
            inside += row.interval[0] <= ran <= row.interval[1]
            total += 1
    assert 0.88 <= inside / total <= 0.995
