"""A plan straight from the results of benches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle3.errors import ProblemsError
from eagle3.serve.planner import make_plan
from tests.unit.serve.planner.cases import config


def write(path: Path, points: list[Any], baseline: list[Any], **values: Any) -> str:
    head = {"format": "eagle3-bench", "format_version": 1, **values}
    path.write_text(json.dumps({**head, "points": points, "baseline": baseline}))
    return str(path)


def points(batch: int) -> list[dict[str, Any]]:
    return [
        {"steps": 1, "draft_tokens": 2, "batch": batch, "tok_s": 100.0 * batch, "acceptance_length": 1.5},
        {"steps": 4, "draft_tokens": 5, "batch": batch, "tok_s": 110.0 * batch, "acceptance_length": 2.2},
    ]


def test_points_baselines_and_batches_are_the_files(tmp_path: Path) -> None:
    file = write(
        tmp_path / "bench.json", [*points(1), *points(8)], [{"batch": 1, "tok_s": 80}, {"batch": 8, "tok_s": 500}]
    )
    cost = {"draft_ms_per_step": 0.5}
    plan = make_plan(config(bench_files=[file], cost=cost))
    assert [batch.batch for batch in plan.batches] == [1, 8]
    assert [batch.baseline for batch in plan.batches] == [80, 500]
    baseline = [{"batch": 1, "tok_s": 80}, {"batch": 8, "tok_s": 500}]
    given = make_plan(config(points=[*points(1), *points(8)], baseline=baseline, batches=[1, 8], cost=cost))
    assert [row.tok_s for row in plan.batches[1].rows] == [row.tok_s for row in given.batches[1].rows]
    only = make_plan(config(bench_files=[file], batches=[8], cost=cost))
    assert [batch.batch for batch in only.batches] == [8]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"format": "eagle3-plan"}, "is no bench"),
        ({"points": []}, "no row of a server that worked"),
        ({"points": 3}, "no points"),
        ({"points": [{"steps": 1, "batch": [], "tok_s": 1}]}, "no points"),
        ({"baseline": [{"batch": "1", "tok_s": 1}, {"batch": 2, "tok_s": 1}]}, "no points"),
        ({"points": [{"steps": 0, "batch": 1, "tok_s": 1}], "baseline": []}, "points.0.steps"),
    ],
)
def test_another_file_is_one_error(tmp_path: Path, values: dict[str, Any], said: str) -> None:
    file = tmp_path / "bench.json"
    file.write_text(json.dumps({"format": "eagle3-bench", "format_version": 1, "points": [], "baseline": [], **values}))
    with pytest.raises(ProblemsError, match=said):
        make_plan(config(bench_files=[str(file)]))


def test_two_baselines_of_one_batch_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "bench.json", points(1), [{"batch": 1, "tok_s": 80}])
    with pytest.raises(ProblemsError, match=r"plan\.bench_file.*baseline at batch 1"):
        make_plan(config(bench_files=[file], baseline=90))
