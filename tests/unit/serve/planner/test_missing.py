"""Too few inputs: what is named, and that the measurement that is proposed is enough."""

from __future__ import annotations

import random
from typing import Any

import pytest

from eagle3.config.plan_schema import MEASURED
from eagle3.errors import ProblemsError
from eagle3.serve.planner import make_plan

from .cases import World, config

WORLD = World([0.7], fixed=12, per_token=0.9, draft=0.4)


def problem(**values: Any) -> tuple[str, str]:
    with pytest.raises(ProblemsError) as caught:
        make_plan(config(**values))
    (one,) = caught.value.problems
    assert one.kind == "plan.missing"
    return one.message.split("leave open ")[1], one.fix


def test_without_anything_everything_is_named() -> None:
    message, fix = problem()
    assert message == (
        "how often drafts are accepted, verify's fixed time, verify's time a token, the time of a draft step"
    )
    assert fix.count("one more run") == 2


def test_one_profile_leaves_verifys_line_open_and_one_run_supplies_it() -> None:
    profile = WORLD.point(5, "tok_s", "verify_ms", "draft_ms")
    message, fix = problem(points=[profile])
    assert message == "verify's fixed time, verify's time a token"
    assert fix == "cheapest: one more run at 2 steps: its tok_s"
    make_plan(config(points=[profile, WORLD.point(2, "tok_s")]))


def test_two_speeds_alone_want_a_profile() -> None:
    points = [WORLD.point(5, "tok_s"), WORLD.point(10, "tok_s")]
    _, fix = problem(points=points)
    assert fix == (
        "cheapest: verify_ms and draft_ms at 5 steps, from a profile of one cycle; for the chains at batch 1 alone: "
        "acceptance_length at 5 steps, which the server says of each request"
    )
    points[0] |= WORLD.point(5, "acceptance_length")
    assert make_plan(config(points=points)).open is not None, "and that is enough for the chains"


def test_costs_alone_want_an_evaluation() -> None:
    points = [WORLD.point(5, "verify_ms", "draft_ms"), WORLD.point(2, "verify_ms")]
    message, fix = problem(points=points)
    assert message == "how often drafts are accepted"
    assert fix.startswith("cheapest: acceptance_length at 5 steps")
    _, fix = problem(cost={"verify_fixed_ms": 12, "verify_per_token_ms": 0.9, "draft_ms_per_step": 0.4})
    assert "eagle3 evaluate --json" in fix


def test_two_measurements_of_one_setting_are_not_two() -> None:
    point = WORLD.point(5, "tok_s", "verify_ms", "draft_ms")
    message, _ = problem(points=[point, point, point])
    assert message == "verify's fixed time, verify's time a token"


def test_whatever_is_given_it_is_planned_or_something_can_be_proposed() -> None:
    """Over random subsets of points, costs and acceptance; and what is planned is the truth."""
    draw, planned = random.Random(0), 0
    for _ in range(150):
        points = [
            WORLD.point(steps, *draw.sample(MEASURED, draw.randint(1, 3)), batch=draw.choice((1, 1, 4)))
            for steps in draw.sample(range(1, 12), draw.randint(0, 3))
        ]
        costs = {"verify_fixed_ms": 12, "verify_per_token_ms": 0.9, "draft_ms_per_step": 0.4, "overhead_ms": 0}
        cost = {name: value for name, value in costs.items() if draw.random() < 0.2}
        acceptance = 0.7 if draw.random() < 0.3 else None
        try:
            plan = make_plan(config(points=points, cost=cost, acceptance=acceptance, draws=100))
        except ProblemsError as error:
            assert [one.kind for one in error.problems] == ["plan.missing"]
            continue
        planned += 1
        speeds = [row.tok_s for row in plan.batches[0].rows]
        assert speeds == pytest.approx([WORLD.tok_s(steps) for steps in range(1, 11)], rel=2e-3), (points, cost)
    assert 20 < planned < 130
