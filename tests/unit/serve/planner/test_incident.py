"""The incident, from its profile, two speeds and the baseline alone: what was found by sweeping follows from them."""

from __future__ import annotations

import pytest

from eagle3.serve.planner import BatchPlan, Plan, make_plan
from eagle3.serve.planner.report import findings

from .cases import INCIDENT, config


def incident(**more: object) -> tuple[Plan, BatchPlan]:
    plan = make_plan(config(**INCIDENT, **more))
    (batch,) = plan.batches
    return plan, batch


def test_no_step_count_beats_no_drafter_and_verify_is_why() -> None:
    _, batch = incident()
    said = " ".join(findings(batch))
    assert all(row.tok_s < 90 and row.beats == 0 for row in batch.rows) and batch.wins is False
    assert (batch.best.steps, round(batch.best.tok_s)) == (3, 73)
    assert "no step count beats the 90.0 tokens/s" in said
    assert "the target's verify limits" in said
    profiled = {part.name: part for part in batch.rows[4].parts}
    assert profiled["verify"].share == pytest.approx(28.7 / (28.7 + 0.87))
    assert profiled["draft"].most_gain == pytest.approx(0.0303, abs=1e-4), "the drafter on one GPU: 3% at most"


def test_it_says_how_much_cheaper_verify_must_get() -> None:
    _, batch = incident()
    assert batch.break_even is not None
    factor, (low, high) = batch.break_even
    assert factor == pytest.approx(0.81, abs=0.01) and low < factor < high < 1
    assert "to break even verify must get 19% cheaper" in " ".join(findings(batch))
    _, after = incident(scale={"verify": factor})
    assert after.best.tok_s == pytest.approx(90), "and with exactly that it does"


def test_the_fit_is_the_arithmetic() -> None:
    plan, batch = incident()
    found = {item.name: item.value for item in plan.inputs if item.kind == "fitted"}
    assert found["acceptance"] == pytest.approx(0.537, abs=0.001)
    assert found["verify_fixed_ms"] + 11 * found["verify_per_token_ms"] == pytest.approx(34.2, abs=0.1)
    assert found["draft_ms_per_step"] == pytest.approx(0.174)
    assert batch.rows[1].verify_ms == pytest.approx(25.4, abs=0.1), "14 ms was the guess"
    assert plan.freedom == 0 and all(abs(item.relative) < 1e-6 for item in plan.residuals)


def test_with_verify_27_percent_cheaper_it_foresees_the_sweep() -> None:
    _, batch = incident(scale={"verify": 0.73})
    two = batch.rows[1]
    assert two.tok_s == pytest.approx(94, rel=0.05) and two.interval[0] < 94 < two.interval[1]
    assert two.gain is not None and two.gain > 0
    ten = batch.rows[9]
    assert ten.gain is not None and ten.gain < -0.05 and ten.beats is not None and ten.beats < 0.01
    assert [row.steps for row in batch.near] == [2, 3, 4, 5]
    speeds = [row.tok_s for row in batch.near]
    assert min(speeds) > 0.96 * max(speeds)
    assert "10 steps (-10.3%)" in " ".join(findings(batch))


def test_it_says_what_acceptance_by_depth_would_decide_between_two_and_three_steps() -> None:
    _, batch = incident(scale={"verify": 0.73})
    decider = batch.deciders[0]
    assert (decider.steps, round(decider.taken, 2)) == (2, 0.54) and 0.30 < decider.needed < 0.36
    first, second = batch.rows[0].acceptance_length - 1, decider.taken
    for third, best in ((decider.needed - 0.02, 2), (decider.needed + 0.02, 3)):
        given = {**INCIDENT, "acceptance": [first, second, third, 0.0]}
        fitted = {item.name: item.value for item in incident()[0].inputs if item.kind == "fitted"}
        cost = {name: fitted[name] for name in ("verify_fixed_ms", "verify_per_token_ms", "draft_ms_per_step")}
        (other,) = make_plan(config(**{**given, "points": []}, cost=cost, scale={"verify": 0.73})).batches
        assert other.best.steps == best


def test_it_says_what_was_given_fitted_assumed_and_extrapolated() -> None:
    plan, batch = incident()
    kinds = {kind: [item.name for item in plan.inputs if item.kind == kind] for kind in ("given", "fitted", "assumed")}
    assert kinds["fitted"] == ["acceptance", "verify_fixed_ms", "verify_per_token_ms", "draft_ms_per_step"]
    assert kinds["assumed"] == ["acceptance_fall", "overhead_ms"]
    assert len(kinds["given"]) == 5
    assert [bool(row.extrapolated) for row in batch.rows] == [True] * 4 + [False] * 6
    assert "fewer tokens than the 6 to 11" in batch.rows[0].extrapolated[0]
