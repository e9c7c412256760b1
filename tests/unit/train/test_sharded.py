"""Two gloo ranks with sharded state take the steps of one process; one launch an engine runs every case.

DeepSpeed's cases run where it is installed: `DS_ACCELERATOR=cpu pytest tests/unit/train/test_sharded.py`.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle3.config import ServeConfig, TrainConfig, build_config, dump_config
from eagle3.data.store import StoredSample
from eagle3.errors import ProblemsError
from eagle3.files import read_json
from eagle3.serve.export import export_run
from eagle3.train.checkpoint import list_checkpoints
from eagle3.train.tracking import Record, read_log
from eagle3.train.trainer import run_training
from tests.stores import Span, train_config, write_random_store
from tests.unit.train.test_ddp import overflowing

ROOT = Path(__file__).parents[3]
MIXED: list[tuple[int, Span]] = [(5, (2, 5)), (16, (1, 16)), (6, (3, 6)), (14, (2, 5)), (9, (2, 9))] * 2
NO_TERM = (8, (7, 8))
CONSTANT = {"learning_rate": 1e-2, "schedule": "constant", "warmup_fraction": 0.0}
STEPS = {"max_steps": 8, "save_every": 5, "keep_checkpoints": 9}
THIRTY = {**STEPS, "max_steps": 30, "save_every": 15}
CASES: dict[str, tuple[list[tuple[int, Span]], dict[str, object], dict[str, object]]] = {
    # samples; settings of both runs; settings of the single process besides
    "plain": (MIXED, THIRTY, {"batch_size": 2}),
    "packed": (MIXED, {**THIRTY, "accumulate": 2, "pack": True, "max_length": 20}, {"batch_size": 2}),
    "budget": (MIXED, {**THIRTY, "accumulate": 2, "batch_tokens": 20}, {"accumulate": 4}),
    "thirty": (MIXED, {**THIRTY, "accumulate": 2}, {"batch_size": 2}),
    "accumulated": (MIXED, {**STEPS, "accumulate": 3}, {"batch_size": 2}),
    "autograd": (MIXED, {**STEPS, "accumulate": 2, "ttt": {"chunk": None}}, {"batch_size": 2}),
    "fault_16": ([(4, (1, 3)), (6, (1, 6))], {"max_steps": 1}, {"batch_size": 2}),
    "nothing": ([(8, (2, 8)), NO_TERM, NO_TERM, NO_TERM], {"epochs": 2}, {"batch_size": 2}),
    "held_out": (MIXED, {**STEPS, "eval_fraction": 0.3, "eval_every": 3, "accumulate": 2}, {"batch_size": 2}),
    "normed": (
        MIXED,
        {**STEPS, "draft": {"norm_before_fc": True, "fc_norm": True, "intermediate_size": 25}},
        {"batch_size": 2},
    ),
}
ENGINES = ["fsdp2", "deepspeed_zero2", "deepspeed_zero3"]


def config_for(folder: Path, case: str, run: str, values: dict[str, object], name: str | None = None) -> TrainConfig:
    """Of a case's store and the run `name`, by default named as the case."""
    defaults = {"epochs": 30, "optim": CONSTANT, "keep_checkpoints": 1}
    return train_config(folder / "stores" / case, folder / run / (name or case), **{**defaults, **values})


def steep(sample: StoredSample) -> StoredSample:
    """The loss is finite and its gradient is not: the norms' squares overflow."""
    return replace(sample, aux_hidden_states=sample.aux_hidden_states * 1e30) if sample.id == "s01" else sample


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds every case's run by one process under `one`."""
    folder = tmp_path_factory.mktemp("sharded")
    for case, (answers, values, single) in CASES.items():
        write_random_store(folder / "stores" / case, answers)
        run_training(config_for(folder, case, "one", {**values, **single}))
    write_random_store(folder / "stores" / "not_finite", [(8, (2, 8))] * 4, change=overflowing)
    write_random_store(folder / "stores" / "steep", [(8, (2, 8))] * 2, change=steep)
    return folder


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, single: Path) -> str:
    """An engine whose two ranks have run every case, under its name; `resumed` began as one process's run."""
    name: str = request.param
    if name != "fsdp2" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    (configs := single / f"{name}-configs").mkdir()

    def write(case: str, config: TrainConfig) -> None:
        (configs / f"{case}.yaml").write_text(dump_config(config))

    for case, (_, values, _) in CASES.items():
        write(case, config_for(single, case, name, values))
    values = CASES["accumulated"][1]
    write("bf16", config_for(single, "accumulated", name, {**values, "mixed_precision": "bf16"}, "bf16"))
    write("resumed", config_for(single, "accumulated", name, values, "resumed"))
    shutil.copytree(single / "one" / "accumulated", single / name / "resumed")
    shutil.rmtree(list_checkpoints(single / name / "resumed")[-1])
    write("not_finite", config_for(single, "not_finite", name, {}))
    write("steep", config_for(single, "steep", name, {}))
    rounded = {"optim": {**CONSTANT, "moments": "bfloat16"}}
    write("rounded", config_for(single, "plain", name, rounded, "rounded"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    worker = [str(Path(__file__).with_name("sharded_worker.py")), str(configs), name]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "DS_ACCELERATOR": "cpu"}
    subprocess.run([*command, *worker], check=True, cwd=ROOT, env=environment, timeout=250)
    return name


def outcomes(folder: Path, engine: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = read_json(folder / f"{engine}-configs" / f"{engine}.json", "outcomes")
    return found


def assert_same(run: Path, whole: Path) -> tuple[list[Record], list[Record]]:
    """Checkpoints, moments included, and logs, to rounding; returns the logs."""
    assert [path.name for path in list_checkpoints(run)] == [path.name for path in list_checkpoints(whole)]
    for mine, theirs in zip(list_checkpoints(run), list_checkpoints(whole), strict=True):
        for name in ("draft.safetensors", "optimizer.safetensors"):
            mine_in, theirs_in = load_file(mine / name), load_file(theirs / name)
            assert mine_in.keys() == theirs_in.keys()
            for key, value in theirs_in.items():
                assert mine_in[key].dtype == value.dtype
                torch.testing.assert_close(mine_in[key], value, atol=1e-4 if name[0] == "d" else 1e-5, rtol=1e-3)
    two, one = read_log(run / "log.jsonl"), read_log(whole / "log.jsonl")
    assert len(two) == len(one)
    for mine, theirs in zip(two, one, strict=True):
        assert (mine["kind"], mine["step"]) == (theirs["kind"], theirs["step"])
        if mine["kind"] != "skip":
            assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
            assert mine["step_accuracy"] == theirs["step_accuracy"]
        if mine["kind"] == "train":
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        for name in ("acceptance_length", "acceptance_rate", "lr"):
            assert mine.get(name) == theirs.get(name)
    return two, one


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_with_shards_take_the_steps_of_one_process(single: Path, engine: str, case: str) -> None:
    assert outcomes(single, engine)[case] == [engine, engine]
    assert_same(single / engine / case, single / "one" / case)


def test_fault_16_loss_is_normalised_by_global_tokens(single: Path, engine: str) -> None:
    """Rank 0 has 1 term at step 0, rank 1 has 4: the first gradient is that of one process on both samples."""
    (two,), (one,) = (read_log(single / run / "fault_16" / "log.jsonl") for run in (engine, "one"))
    assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)


def test_fault_15_one_process_s_checkpoint_goes_on_in_two_shards(single: Path, engine: str) -> None:
    assert outcomes(single, engine)["resumed"] == [engine, engine]
    starts = read_json(single / engine / "resumed" / "provenance.json", "")["starts"]
    assert [start["step"] for start in starts] == [0, 5]
    assert_same(single / engine / "resumed", single / "one" / "accumulated")


def test_fault_15_a_checkpoint_of_two_shards_goes_on_in_one_process(single: Path, engine: str) -> None:
    values = {**CASES["accumulated"][1], "batch_size": 2}
    shutil.copytree(single / engine / "accumulated", single / engine / "back")
    shutil.rmtree(list_checkpoints(single / engine / "back")[-1])
    run_training(config_for(single, "accumulated", engine, values, "back"))
    assert_same(single / engine / "back", single / "one" / "accumulated")


def test_bf16_is_autocast_over_float32_weights(single: Path, engine: str) -> None:
    run = single / engine / "bf16"
    assert outcomes(single, engine)["bf16"] == [engine, engine]
    for name in ("draft.safetensors", "optimizer.safetensors"):
        assert {value.dtype for value in load_file(list_checkpoints(run)[-1] / name).values()} == {torch.float32}
    values = {**CASES["accumulated"][1], "mixed_precision": "bf16", "batch_size": 2}
    run_training(config_for(single, "accumulated", "one", values, f"{engine}16"))
    mine, theirs = (
        [record["loss"] for record in read_log(path / "log.jsonl")] for path in (run, single / "one" / f"{engine}16")
    )
    exact = read_log(single / engine / "accumulated" / "log.jsonl")[0]["loss"]
    assert mine == pytest.approx(theirs, rel=2e-3)
    assert mine[0] == pytest.approx(theirs[0], abs=2e-6)
    assert mine[0] != pytest.approx(exact, abs=1e-5)


def test_a_loss_that_is_not_finite_on_one_rank_stops_both(single: Path, engine: str) -> None:
    messages = outcomes(single, engine)["not_finite"]
    assert messages[0] == messages[1]
    assert "train.not_finite" in messages[0]


def test_a_gradient_that_is_not_finite_stops_both_before_a_weight_changes(single: Path, engine: str) -> None:
    with pytest.raises(ProblemsError, match="the gradient norm of step 1 "):
        run_training(config_for(single, "steep", "one", {"batch_size": 2}, f"steep-{engine}"))
    messages = outcomes(single, engine)["steep"]
    assert messages[0] == messages[1]
    assert "the gradient norm of step 1 " in messages[0] and "s01" in messages[0]


def test_narrow_moments_are_refused_by_name(single: Path, engine: str) -> None:
    messages = outcomes(single, engine)["rounded"]
    assert messages[0] == messages[1]
    assert "train.engine_moments" in messages[0] and engine in messages[0]


def test_an_export_of_shards_is_that_of_one_process(single: Path, engine: str) -> None:
    files = []
    for run in (engine, "one"):
        output = single / f"export-{engine}-{run}"
        serve = {"run": str(single / run / "plain"), "output": str(output), "dtype": "float32"}
        export_run(build_config(ServeConfig, serve, "test"))
        files.append(load_file(output / "model.safetensors"))
    assert files[0].keys() == files[1].keys()
    for name, value in files[1].items():
        torch.testing.assert_close(files[0][name], value, atol=1e-4, rtol=1e-3)
