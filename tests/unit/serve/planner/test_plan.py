from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle3.errors import ProblemsError
from eagle3.serve.planner import Plan, make_plan

from .cases import INCIDENT, World, config

FALLING = World([0.8, 0.7, 0.6, 0.5], fixed=12, per_token=0.9, draft=0.4, overhead=0.6)
HEAD = '{"format": "eagle3-evaluation", "format_version": 1, "by_steps": '
FLAT = World([0.7], fixed=12, per_token=0.9, draft=0.4)


def speeds(plan: Plan, place: int = 0) -> list[float]:
    return [row.tok_s for row in plan.batches[place].rows if row.topk == 1]


@pytest.mark.parametrize(
    "points",
    [
        [FLAT.point(5, "tok_s", "verify_ms", "draft_ms"), FLAT.point(10, "tok_s")],
        [FLAT.point(1, "tok_s", "acceptance_length"), FLAT.point(4, "tok_s"), FLAT.point(3, "draft_ms")],
        [FLAT.point(2, "verify_ms", "draft_ms", "acceptance_length"), FLAT.point(6, "verify_ms")],
        [FLAT.point(2, "tok_s", "verify_ms", "draft_ms"), FLAT.point(2, "tok_s", batch=8)],
        [FLAT.point(steps, "tok_s", "verify_ms", "draft_ms") for steps in (1, 3, 6)],
    ],
)
def test_a_server_that_obeys_the_model_is_found_from_any_sufficient_points(points: list[dict[str, Any]]) -> None:
    plan = make_plan(config(points=points, batches=[1, 4]))
    assert speeds(plan) == pytest.approx([FLAT.tok_s(steps) for steps in range(1, 11)], rel=1e-5)
    assert speeds(plan, 1) == pytest.approx([FLAT.tok_s(steps, 4) for steps in range(1, 11)], rel=1e-5)
    assert plan.freedom == sum(len(point) - 2 for point in points) - 4


def test_acceptance_by_depth_and_overhead_are_used_as_given_or_shown() -> None:
    points = [FALLING.point(2, "tok_s", "verify_ms", "draft_ms"), FALLING.point(7, "cycle_ms")]
    plan = make_plan(config(points=points, acceptance=FALLING.rates))
    assert speeds(plan) == pytest.approx([FALLING.tok_s(steps) for steps in range(1, 11)], rel=1e-5)
    overhead = next(item for item in plan.inputs if item.name == "overhead_ms")
    assert overhead.kind == "fitted" and overhead.value == pytest.approx(0.6, rel=1e-4)
    deep = [any("acceptance deeper" in reason for reason in row.extrapolated) for row in plan.batches[0].rows]
    assert deep == [False] * 4 + [True] * 6


def test_acceptance_lengths_at_two_step_counts_give_its_fall() -> None:
    world = World([0.8 * 0.9**depth for depth in range(10)], fixed=12, per_token=0.9, draft=0.4)
    points = [
        world.point(2, "acceptance_length", "verify_ms", "draft_ms"),
        world.point(6, "acceptance_length", "tok_s"),
    ]
    plan = make_plan(config(points=points))
    assert speeds(plan) == pytest.approx([world.tok_s(steps) for steps in range(1, 11)], rel=1e-4)
    fall = next(item for item in plan.inputs if item.name == "acceptance_fall")
    assert fall.kind == "fitted" and fall.value == pytest.approx(0.9, rel=1e-4)


def test_all_costs_given_need_no_point() -> None:
    cost = {"verify_fixed_ms": 12, "verify_per_token_ms": 0.9, "draft_ms_per_step": 0.4, "overhead_ms": 0}
    plan = make_plan(config(cost=cost, acceptance=0.7))
    assert speeds(plan) == pytest.approx([FLAT.tok_s(steps) for steps in range(1, 11)])
    assert not any(row.extrapolated for row in plan.batches[0].rows)
    assert plan.batches[0].wins is None and "no baseline" in " ".join(plan.notes)


def test_each_batch_is_held_against_its_own_baseline() -> None:
    plan = make_plan(
        config(**{**INCIDENT, "baseline": [{"tok_s": 90}, {"batch": 8, "tok_s": 400}]}, batches=[1, 8, 16])
    )
    one, eight, sixteen = plan.batches
    assert (one.baseline, eight.baseline, sixteen.baseline) == (90, 400, None)
    assert eight.best.gain == pytest.approx(eight.best.tok_s / 400 - 1) and sixteen.best.gain is None
    per_token = next(item.value for item in plan.inputs if item.name == "verify_per_token_ms")
    assert eight.rows[1].verify_ms - one.rows[1].verify_ms == pytest.approx((24 - 3) * per_token)
    assert any("batch 16" in note for note in plan.notes)


def test_intervals_hold_a_new_run_about_as_often_as_they_say() -> None:
    """Over servers and measurements drawn as the plan takes them to be."""
    generator = np.random.default_rng(5)
    inside = total = 0
    for trial in range(60):
        fall = generator.uniform(0.7, 1)
        world = World([0.75 * fall**depth for depth in range(10)], 15, 0.8, 0.3)
        points = [world.point(4, "tok_s", "verify_ms", "draft_ms"), world.point(8, "tok_s")]
        points = [world.noisy(point, 0.02, generator) for point in points]
        plan = make_plan(config(points=points, steps=[1, 2, 3, 6], draws=300, seed=trial))
        for row in plan.batches[0].rows:
            ran = world.tok_s(row.steps) * float(np.exp(0.02 * generator.standard_normal()))
            inside += row.interval[0] <= ran <= row.interval[1]
            total += 1
    assert 0.88 <= inside / total <= 0.995


def test_the_assumed_fall_of_acceptance_widens_the_interval_and_leaves_the_estimate() -> None:
    flat, falling = (
        make_plan(config(**INCIDENT, acceptance_fall=fall)).batches[0].rows[0] for fall in ([1, 1], [0.6, 1])
    )
    assert flat.tok_s == falling.tok_s
    assert falling.interval[1] > flat.interval[1] + 1, "fewer deep drafts at the same speed are more shallow ones"


def test_points_that_disagree_are_said_and_widen_the_intervals() -> None:
    points = [FLAT.point(steps, "tok_s", "verify_ms", "draft_ms") for steps in (1, 3, 6)]
    points[1]["tok_s"] *= 1.25
    plan, clean = make_plan(config(points=points)), make_plan(config(points=points[::2]))
    assert any("do not fit" in note and "3 steps" in note for note in plan.notes)
    assert plan.error > 0.05 and clean.error == 0.02 and not any("do not fit" in note for note in clean.notes)


def test_the_same_seed_gives_the_same_plan() -> None:
    assert make_plan(config(**INCIDENT)) == make_plan(config(**INCIDENT))
    assert make_plan(config(**INCIDENT)) != make_plan(config(**INCIDENT, seed=1))


def test_a_servers_acceptance_far_from_the_given_one_is_said() -> None:
    points = [FLAT.point(3, "tok_s", "verify_ms", "draft_ms", "acceptance_length"), FLAT.point(7, "verify_ms")]
    assert not any("check the wiring" in note for note in make_plan(config(points=points, acceptance=0.7)).notes)
    points[0]["acceptance_length"] = 1.1
    assert any("check the wiring" in note for note in make_plan(config(points=points, acceptance=0.7)).notes)


def test_verify_that_seems_to_fall_with_tokens_is_taken_as_flat_and_said() -> None:
    points = [
        {"steps": 2, "verify_ms": 20, "draft_ms": 1, "acceptance_length": 2},
        {"steps": 8, "verify_ms": 15},
    ]
    plan = make_plan(config(points=points))
    assert any("less than nothing" in note for note in plan.notes)
    assert all(np.isfinite(speeds(plan)))


def evaluation(path: Path, lengths: list[float], spread: float = 0.1) -> str:
    rows = [
        {"steps": steps, "length": length, "interval": [max(length - spread, 1), length + spread]}
        for steps, length in enumerate(lengths, 1)
    ]
    path.write_text(json.dumps({"format": "eagle3-evaluation", "format_version": 1, "by_steps": rows}))
    return str(path)


def test_an_evaluations_lengths_are_taken_as_they_are(tmp_path: Path) -> None:
    lengths = [1.7, 2.1, 2.3, 2.4]
    points = [FLAT.point(2, "verify_ms", "draft_ms"), FLAT.point(6, "verify_ms")]
    narrow = make_plan(config(points=points, acceptance_file=evaluation(tmp_path / "a.json", lengths, 0.01)))
    assert [row.acceptance_length for row in narrow.batches[0].rows[:4]] == pytest.approx(lengths)
    assert narrow.batches[0].rows[4].acceptance_length == pytest.approx(2.45), "half of depth 3's were left at depth 4"
    wide = make_plan(config(points=points, acceptance_file=evaluation(tmp_path / "b.json", lengths, 0.4)))
    widths = [plan.batches[0].rows[3].interval[1] - plan.batches[0].rows[3].interval[0] for plan in (narrow, wide)]
    assert widths[1] > 1.5 * widths[0]


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        "nonsense",
        '{"format": "eagle3-evaluation", "format_version": 2, "by_steps": []}',
        HEAD + "[]}",
        HEAD + '[{"steps": 1, "length": null, "interval": []}]}',
        HEAD + '[{"steps": 2, "length": 2, "interval": [1, 3]}]}',
        HEAD + '[{"steps": 1, "length": 2, "interval": [0.5, 3]}]}',
        HEAD + "[7]}",
    ],
)
def test_a_file_that_is_no_evaluation_is_a_problem_with_its_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "evaluation.json"
    path.write_text(text)
    with pytest.raises(ProblemsError) as caught:
        make_plan(config(acceptance_file=str(path)))
    assert all(problem.where == str(path) for problem in caught.value.problems)


def test_a_cycle_of_no_time_is_a_problem() -> None:
    cost = {"verify_fixed_ms": 0, "verify_per_token_ms": 0, "draft_ms_per_step": 0, "overhead_ms": 0}
    with pytest.raises(ProblemsError, match=r"plan\.cost"):
        make_plan(config(cost=cost, acceptance=0.5))


def test_it_is_imported_without_torch() -> None:
    code = "import sys, eagle3.serve.planner\nassert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
