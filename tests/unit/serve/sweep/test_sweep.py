"""`eagle3 serve sweep` over processes that serve, die and lie."""

from __future__ import annotations

import functools
import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from eagle3.cli import main
from eagle3.config import PlanConfig, SweepConfig, build_config, load_config
from eagle3.errors import ProblemsError, problem_error
from eagle3.serve.bench import passes
from eagle3.serve.launch import free_port, start_server
from eagle3.serve.launch.ports import port_fault
from eagle3.serve.planner import make_plan
from eagle3.serve.sweep import run as sweep_run
from eagle3.serve.sweep.result import SweepResult
from eagle3.serve.sweep.run import run_sweep
from eagle3.serve.wait import wait_until_ready
from eagle3.target.tiny import make_tiny_llama
from eagle3.wiring import LayerWiring
from tests.serving.constructed import make_export, make_target
from tests.unit.serve.launch.fakes import VERSION

ROOT = Path(__file__).parents[4]
SCHEMAS = ROOT / "docs/schemas"
Make = Callable[..., SweepConfig]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder, wiring = tmp_path_factory.mktemp("sweep"), LayerWiring((2, 4, 6), 10)
    target = make_target(folder / "target", make_tiny_llama, wiring, hidden_size=128)
    return target, make_export(folder / "export", target, wiring, VERSION)


@pytest.fixture
def make(models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """`make(how, key=value, ...)`: a sweep over `fake_launch.py`; what it started is in `starts`."""
    monkeypatch.setattr(sweep_run, "start_server", lambda *given: start_server(*given, grace=2.0, check=False))
    waiting = functools.partial(wait_until_ready, poll_seconds=0.1)
    monkeypatch.setattr(sweep_run, "wait_until_ready", waiting)
    port = free_port()

    def config(how: dict[str, Any] | None = None, load: dict[str, Any] | None = None, **values: Any) -> SweepConfig:
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"id": f"p{n}", "prompt": f"Question {n}?"}) + "\n" for n in range(6)))
        told = {"starts": str(tmp_path / "starts"), **(how or {})}
        env = {"FAKE_SWEEP": json.dumps(told), "PYTHONPATH": str(ROOT)}
        target, draft = models
        launch = {
            "target": str(target),
            "checkpoint": str(draft),
            "engine_version": VERSION,
            "port": port,
            "python": sys.executable,
            "launcher": [str(Path(__file__).parent / "fake_launch.py")],
            "env": env,
        }
        section = {"sets": {"mine": str(prompts)}, "max_new_tokens": 64, "passes": 1, "warmup": 1, "concurrency": [2]}
        given = {"launch": launch, "load": {**section, **(load or {})}, "output": str(tmp_path / "sweep")}
        given |= {"steps": [1, 2], **values}
        return build_config(SweepConfig, given, "test")

    return config


def started(folder: Path) -> list[int]:
    """Steps of each server that was started, none of which runs any more."""
    lines = [line.split() for line in (folder / "starts").read_text().splitlines()]
    for _, pid in lines:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
    return [int(steps) for steps, _ in lines]


def kinds(result: SweepResult) -> list[str]:
    return [problem.kind for problem in result.problems]


def test_every_step_count_is_started_measured_and_held_against_the_plan(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = make(steps=[1, 2, 4], plan_from=[1, 4])
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump(cfg.model_dump(mode="json")))
    with pytest.raises(SystemExit) as caught:
        main(["serve", "sweep", "--config", str(file), "--json", "--plot", str(tmp_path / "sweep.svg")])
    out, _ = capsys.readouterr()

    assert not caught.value.code, out
    value = json.loads(out)
    jsonschema.validate(value, json.loads((SCHEMAS / "sweep.schema.json").read_text()))
    assert started(tmp_path) == [0, 1, 2, 4]
    assert [row["name"] for row in value["rows"]] == ["no drafter", "1 step", "2 steps", "4 steps"]
    assert [len(row["measured"]) for row in value["rows"]] == [1] * 4
    speeds = {row["name"]: row["measured"][0]["speed"]["tok_s"]["value"] for row in value["rows"]}
    assert value["ranking"][0]["fastest_first"] == sorted(speeds, key=lambda name: -speeds[name])
    for plan in value["plans"]:
        held = {item["steps"]: item for item in plan["rows"]}
        assert [held[steps]["used"] for steps in (1, 2, 4)] == [True, False, True]
        predicted, measured = held[2]["length"]
        assert predicted == pytest.approx(measured, rel=0.15), "acceptance by depth is that of the 4-step row"
        assert held[2]["deviation"] == held[2]["predicted"] / held[2]["measured"] - 1
        assert plan["largest_deviation"] == held[2]["deviation"]  # how large it is says the machine's load
        for used in (held[1], held[4]):
            assert used["predicted"] == pytest.approx(used["measured"], rel=0.25), "two points and two unknowns"
    assert (tmp_path / "sweep.svg").read_text().startswith("<?xml")
    plan = make_plan(load_config(PlanConfig, None, [f"bench_files=[{cfg.output}/sweep.json]",
                                                    "cost.draft_ms_per_step=0.5"]))  # fmt: skip
    assert [batch.batch for batch in plan.batches] == [2]

    with pytest.raises(SystemExit):
        main(["serve", "sweep", "--config", str(file)])
    out, _ = capsys.readouterr()
    assert "the fastest first" in out and "used" in out and started(tmp_path) == [0, 1, 2, 4], (
        "nothing is started again"
    )
    assert all(len(line) <= 120 for line in out.splitlines())


def test_fault_23_a_server_that_dies_is_a_failed_row_with_its_cause_and_the_sweep_goes_on(
    make: Make, tmp_path: Path
) -> None:
    how = {"at_load": [1], "in_work": [2], "deaf": [3], "other": [4]}
    cfg = make(how, steps=[1, 2, 3, 4, 5], baseline=False)
    result = run_sweep(cfg)

    assert started(tmp_path) == [1, 2, 3, 4, 5]
    assert port_fault("127.0.0.1", cfg.launch.port) is None
    assert kinds(result) == ["sweep.failed", "sweep.failed", "bench.lost", "bench.broken"]
    at_load, other, in_work, deaf = result.problems
    assert at_load.where.startswith("1 step: ") and "model-00007.safetensors" in at_load.message
    assert other.where.startswith("4 steps: ") and "was started with (4, 1, 5)" in other.message
    assert in_work.where.startswith("2 steps: ") and "start.out_of_memory" in in_work.message
    assert "broken, not slow" in deaf.message
    assert [row.name for row in result.ranking(2)] == ["5 steps"], "what is broken or failed is not ranked"
    assert result.exit_code == 2

    again = run_sweep(cfg)
    assert started(tmp_path)[5:] == [1, 2, 4], "failed rows are tried again, the others are kept"
    assert kinds(again) == kinds(result)


def test_a_sweep_that_is_stopped_in_a_row_goes_on_there(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = make(load={"passes": 2})
    told = 0
    converse = passes._converse

    async def stopping(*given: Any) -> None:
        nonlocal told
        told += 1
        if told == 6 * 2 + 6 + 3:  # in the second pass of the second row
            raise KeyboardInterrupt
        await converse(*given)

    monkeypatch.setattr(passes, "_converse", stopping)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(cfg)
    assert started(tmp_path) == [0, 1] and port_fault("127.0.0.1", cfg.launch.port) is None
    monkeypatch.setattr(passes, "_converse", converse)
    sent: list[str] = []
    whole = passes.run_pass

    async def noted(server: Any, load: Any, facts: Any, *given: Any) -> Any:
        sent.append(facts.name)
        return await whole(server, load, facts, *given)

    monkeypatch.setattr("eagle3.serve.bench.run.run_pass", noted)
    result = run_sweep(cfg)
    assert kinds(result) == [] and started(tmp_path)[2:] == [1, 2]
    assert sent == ["1 step", "2 steps", "2 steps"], "the first pass of the second row is kept"
    assert [row.passes for row in result.flat] == [2, 2, 2]


def test_another_command_in_the_same_folder_is_refused_and_another_port_is_not(make: Make, tmp_path: Path) -> None:
    run_sweep(make(steps=[1], baseline=False))
    with pytest.raises(ProblemsError, match=r"sweep\.output.*another command"):
        run_sweep(make(steps=[1], baseline=False, load={"max_new_tokens": 10}))
    cfg = make(steps=[1], baseline=False)
    moved = cfg.model_copy(update={"launch": cfg.launch.model_copy(update={"port": free_port()})})
    run_sweep(moved)
    assert started(tmp_path) == [1]


def test_an_occupied_port_and_every_wrong_setting_are_said_before_anything_is_started(
    make: Make, tmp_path: Path
) -> None:
    cfg = make(trees=[{"steps": 2, "topk": 2, "draft_tokens": 60}, {"steps": 3, "topk": 2, "draft_tokens": 2}],
               load={"concurrency": [9]})  # fmt: skip
    with pytest.raises(ProblemsError) as caught:
        run_sweep(cfg)
    assert len([problem for problem in caught.value.problems if problem.kind == "config.value"]) == 2
    assert [problem.kind for problem in caught.value.problems][-1] == "bench.too_few"
    with socket.socket() as taken:
        cfg = make()
        taken.bind(("127.0.0.1", cfg.launch.port))
        taken.listen(1)
        with pytest.raises(ProblemsError, match=r"launch\.port_in_use"):
            run_sweep(cfg)
    assert not (tmp_path / "starts").exists()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"plan_from": [1, 7]}, r"plan_from has \[7\]"),
        ({"plan_from": [1]}, "two step counts or more"),
        ({"steps": [1, 1]}, "given twice"),
    ],
)
def test_a_config_that_cannot_be_is_one_error(make: Make, values: dict[str, Any], said: str) -> None:
    with pytest.raises(ProblemsError, match=said):
        make(**values)


def test_a_plan_without_its_rows_says_so(make: Make) -> None:
    result = run_sweep(make({"at_load": [1]}, plan_from=[1, 2], baseline=False))
    assert [one.missing for one in result.comparisons] == ["1 of plan_from have no row that worked"]
    assert any("no plan: 1 of plan_from" in note for note in result.notes)


def test_a_dry_run_prints_every_command(make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump(make().model_dump(mode="json")))
    with pytest.raises(SystemExit):
        main(["serve", "sweep", "--config", str(file), "--dry-run"])
    out, _ = capsys.readouterr()
    assert out.count("fake_launch.py") == 3 and "# 2 steps" in out and not (tmp_path / "starts").exists()


def test_a_full_disk_ends_the_sweep_and_the_same_command_goes_on(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = sweep_run.write_row

    def full(path: Path, row: sweep_run.RowFile) -> None:
        raise problem_error(str(path), "disk.full", "cannot write", "free space there")

    monkeypatch.setattr(sweep_run, "write_row", full)
    with pytest.raises(ProblemsError, match=r"disk\.full"):
        run_sweep(make(steps=[1]))
    assert started(tmp_path) == [0], "no further server is started, and none is left"
    monkeypatch.setattr(sweep_run, "write_row", real)
    assert kinds(run_sweep(make(steps=[1]))) == []
    assert started(tmp_path) == [0, 0, 1]
