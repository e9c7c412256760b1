"""The result as a table, as JSON and as a picture, and the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from eagle3.cli import main
from eagle3.config import BenchConfig, PlanConfig, load_config
from eagle3.serve.planner import make_plan
from tests.unit.serve.bench.fake_spec import FakeSpec

SCHEMAS = Path(__file__).parents[4] / "docs/schemas"
Start = Callable[..., str]
Make = Callable[..., BenchConfig]


def run(capsys: pytest.CaptureFixture[str], cfg: BenchConfig, folder: Path, *args: str) -> tuple[int, str, str]:
    file = folder / "bench.yaml"
    file.write_text(yaml.safe_dump(cfg.model_dump(mode="json")))
    with pytest.raises(SystemExit) as caught:
        main(["serve", "bench", "--config", str(file), *args])
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


def validated(text: str, name: str = "bench") -> dict[str, Any]:
    value = json.loads(text)
    jsonschema.validate(value, json.loads((SCHEMAS / f"{name}.schema.json").read_text(encoding="utf-8")))
    return value


def test_the_command_writes_what_the_schema_says_and_a_plan_reads_it(
    start: Start, make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    three, two, plain = (
        FakeSpec(delay=0.003),
        FakeSpec(steps=2, pattern=(1, 2), delay=0.003),
        FakeSpec(steps=0, delay=0.003),
    )
    cfg = make(start(three), start(two), top={"baseline_url": start(plain)}, passes=1, concurrency=[1, 2])
    picture = tmp_path / "bench.png"

    code, out, _ = run(capsys, cfg, tmp_path, "--plot", str(picture))
    assert code == 0 and picture.read_bytes().startswith(b"\x89PNG")
    assert "concurrency 2" in out and "no drafter" in out and "acceptance" in out
    assert all(len(line) <= 120 for line in out.splitlines())

    code, out, _ = run(capsys, cfg, tmp_path, "--json")
    value = validated(out)
    assert code == 0 and [row["name"] for row in value["rows"]] == ["3 steps", "2 steps", "no drafter"] * 2
    file = Path(cfg.output) / "bench.json"
    assert validated(file.read_text()) == value
    assert len(value["points"]) == 4 and [item["batch"] for item in value["baseline"]] == [1, 2]
    plan = make_plan(load_config(PlanConfig, None, [f"bench_files=[{file}]", "cost.draft_ms_per_step=0.01"]))
    assert [batch.batch for batch in plan.batches] == [1, 2] and plan.batches[0].wins


def test_a_broken_row_is_shown_and_said_and_is_exit_code_2(
    start: Start, make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = make(start(FakeSpec(pattern=(0,))), passes=1)
    code, out, _ = run(capsys, cfg, tmp_path)
    assert code == 2 and "BROKEN" in out and "bench.broken" in out
    code, out, _ = run(capsys, cfg, tmp_path, "--json", "--plot", str(tmp_path / "x.svg"))
    assert code == 2 and validated(out)["rows"][0]["state"] == "broken"


def test_a_picture_that_cannot_be_is_refused_before_anything_is_measured(
    start: Start, make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeSpec()
    code, out, _ = run(capsys, make(start(fake)), tmp_path, "--plot", "x.bmp", "--json")
    assert code == 2 and validated(out, "problems")["problems"][0]["kind"] == "bench.plot"
    assert fake.requests == []
