from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from eagle3.cli import main
from eagle3.serve.planner import make_plan, plan_json, render_plan

from .cases import INCIDENT, World, config

SCHEMAS = Path(__file__).parents[4] / "docs/schemas"
KIMI = str(Path(__file__).parents[4] / "configs/kimi-k2.5/plan.yaml")
TREES = [{"steps": 3, "topk": 4, "draft_tokens": 13}, {"steps": 2, "topk": 2, "draft_tokens": 4, "acceptance": [0.7]}]
COST = {"verify_fixed_ms": 12, "verify_per_token_ms": 0.0, "draft_ms_per_step": 0.0, "overhead_ms": 0}


def validated(text: str, name: str = "plan") -> dict[str, Any]:
    value = json.loads(text)
    jsonschema.validate(value, json.loads((SCHEMAS / f"{name}.schema.json").read_text(encoding="utf-8")))
    return value


@pytest.mark.parametrize(
    "values",
    [
        INCIDENT,
        {**INCIDENT, "batches": [1, 8], "trees": TREES, "scale": {"verify": 0.5}},
        {"cost": COST, "acceptance": [0.5, 0.0]},
        {"cost": COST, "acceptance": 0.0, "baseline": 90},
    ],
)
def test_json_is_what_the_schema_says(values: dict[str, Any]) -> None:
    plan = make_plan(config(**values))
    value = validated(plan_json(plan))
    first = value["batches"][0]
    assert first["rows"][first["best"]]["tok_s"] == max(row["tok_s"] for row in first["rows"])
    assert render_plan(plan)


def test_the_table_has_every_setting_and_what_follows() -> None:
    text = render_plan(make_plan(config(**INCIDENT, trees=TREES)))
    lines = text.splitlines()
    assert [line.split()[0] for line in lines[2:12]] == [str(steps) for steps in range(1, 11)]
    assert lines[12].startswith("3 steps, topk 4, 13 draft tokens")
    assert "*: extrapolated" in text and "determine the fit exactly" in text
    assert all(len(line) <= 120 for line in lines)


def test_a_free_part_that_is_the_whole_cycle_and_drafts_never_accepted_are_said() -> None:
    text = render_plan(make_plan(config(cost=COST, acceptance=0.0, baseline=10)))
    assert "it is 100% of the cycle" in text
    cost = {**COST, "overhead_ms": 1000}
    text = render_plan(make_plan(config(cost=cost, acceptance=0.0, baseline=90)))
    assert "even a verify of no time would not break even" in text and "the overhead limits" in text


def test_a_wide_tree_lies_between_a_chain_and_independent_guesses() -> None:
    world = World([0.6], fixed=12, per_token=0.9, draft=0.4)
    points = [world.point(5, "tok_s", "verify_ms", "draft_ms"), world.point(9, "tok_s")]
    tree = {"steps": 3, "topk": 4, "draft_tokens": 7}  # two tokens a depth
    plan = make_plan(config(points=points, steps=[3], trees=[tree, {**tree, "acceptance": [0.7, 0.6, 0.6]}]))
    chain, guessed, given = plan.batches[0].rows
    most = sum((1 - 0.4**2) ** depth for depth in range(4))
    assert chain.acceptance_length < guessed.acceptance_length < most
    assert given.acceptance_length == pytest.approx(1 + 0.7 + 0.42 + 0.252)
    assert guessed.verify_ms == pytest.approx(12 + 0.9 * 7, rel=1e-5)
    assert any("tree" in reason for reason in guessed.extrapolated) and not given.extrapolated
    wide, narrow = (row.interval[1] / row.interval[0] for row in (guessed, given))
    assert wide > narrow


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["serve", "plan", *args])
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--config", KIMI, "scale.verify=0.73")
    assert code == 0 and "batch 1, with verify x 0.73" in out and "best: 3 steps" in out
    code, out, _ = run(capsys, "--config", KIMI, "--json", "steps=[2,5]")
    assert code == 0 and [row["steps"] for row in validated(out)["batches"][0]["rows"]] == [2, 5]


def test_too_little_is_exit_code_2_in_words_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "baseline=90")
    assert (code, out) == (2, "") and "plan.missing" in err and "cheapest" in err
    code, out, _ = run(capsys, "baseline=90", "--json")
    assert code == 2 and validated(out, "problems")["problems"][0]["kind"] == "plan.missing"


def test_help_lists_the_keys(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0 and "acceptance_file" in out and "scale.verify" in out


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_the_picture_is_written(capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plan.{kind}"
    code, _, _ = run(capsys, "--config", KIMI, "--plot", str(path), f"trees={json.dumps(TREES)}", "batches=[1,2]")
    assert code == 0 and path.stat().st_size > 1000
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


def test_a_picture_of_no_known_kind_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = run(capsys, "--config", KIMI, "--plot", str(tmp_path / "plan.gif"))
    assert code == 2 and "plan.plot" in err


def test_without_matplotlib_the_extra_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    code, _, err = run(capsys, "--config", KIMI, "--plot", str(tmp_path / "plan.png"))
    assert code == 2 and "eagle3[plot]" in err and list(tmp_path.iterdir()) == []
