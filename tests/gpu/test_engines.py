"""One process and every engine on two GPUs take the same steps, and go on from each other's checkpoints.

Launched as people do, with the files of configs/accelerate. The bf16 runs go through the Triton kernels.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle3.config import TrainConfig, dump_config
from eagle3.files import read_json
from eagle3.train.checkpoint import list_checkpoints
from eagle3.train.tracking import Record, read_log
from tests.ports import free_port
from tests.stores import Span, train_config, write_random_store

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(600),
]

ROOT = Path(__file__).parents[2]
LABELS = {
    "single": "single process (NO), 1 process(es)",
    "ddp": "DDP (MULTI_GPU), 2 process(es)",
    "fsdp2": "FSDP2 (FSDP), 2 process(es)",
    "deepspeed_zero2": "DeepSpeed ZeRO-2 (DEEPSPEED), 2 process(es)",
    "deepspeed_zero3": "DeepSpeed ZeRO-3 (DEEPSPEED), 2 process(es)",
}
ENGINES = list(LABELS)
NO_TERM: tuple[int, Span] = (8, (7, 8))
ANSWERS = [(5, (2, 5)), (16, (1, 16)), NO_TERM, (6, (3, 6)), (14, (2, 5)), (9, (2, 9)), (30, (4, 30))] * 3
WIDE = {"head_dim": 64, "intermediate_size": 64}
CASES: dict[str, dict[str, object]] = {
    "a1": {},
    "a2": {"accumulate": 2},
    "packed": {"accumulate": 2, "pack": True, "max_length": 32},
    "wide": {"accumulate": 2, "draft": WIDE},
    "bf16": {"accumulate": 2, "mixed_precision": "bf16", "draft": WIDE},
}


def config_for(folder: Path, engine: str, case: str, name: str | None = None) -> TrainConfig:
    return train_config(
        folder / "store",
        folder / engine / (name or case),
        **{
            "epochs": 30,
            "max_steps": 30,
            "save_every": 15,
            "keep_checkpoints": 9,
            "eval_every": 15,
            "eval_fraction": 0.2,
            "batch_size": 2 if engine == "single" else 1,
            "optim": {"learning_rate": 2e-3, "schedule": "constant", "warmup_fraction": 0.0},
            **CASES[case],
        },
    )


def launch(engine: str, script: str, *arguments: str) -> str:
    """Runs a script under `accelerate launch`; returns what it printed."""
    if engine.startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    config = ["--config_file", f"configs/accelerate/{engine}.yaml", "--main_process_port", str(free_port())]
    command = [sys.executable, "-m", "accelerate.commands.launch", *config, script, *arguments]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the store, and every case's run by one process under `single`."""
    folder = tmp_path_factory.mktemp("engines")
    write_random_store(folder / "store", ANSWERS)
    train_cases(folder, "single")
    return folder


@pytest.fixture(scope="module", params=ENGINES[1:])
def engine(request: pytest.FixtureRequest, folder: Path) -> str:
    """An engine on two GPUs, whose runs lie under its name."""
    train_cases(folder, request.param)
    return str(request.param)


def train_cases(folder: Path, engine: str) -> None:
    (configs := folder / f"{engine}-configs").mkdir()
    for case in CASES:
        (configs / f"{case}.yaml").write_text(dump_config(config_for(folder, engine, case)))
    launch(engine, "tests/gpu/engines_worker.py", str(configs))


def records(run: Path) -> list[Record]:
    return read_log(run / "log.jsonl")


def assert_same(run: Path, whole: Path) -> None:
    mine, theirs = records(run), records(whole)
    assert [(record["kind"], record["step"]) for record in mine] == [
        (record["kind"], record["step"]) for record in theirs
    ]
    assert sum(record["kind"] == "train" for record in mine) >= 25
    for one, other in zip(mine, theirs, strict=True):
        if one["kind"] != "skip":
            assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
        if one["kind"] == "eval":
            assert one["acceptance_length"] == pytest.approx(other["acceptance_length"])
    found, expected = (load_file(list_checkpoints(path)[-1] / "optimizer.safetensors") for path in (run, whole))
    assert found.keys() == expected.keys()
    assert all(
        found[name].dtype == value.dtype and found[name].shape == value.shape for name, value in expected.items()
    )


@pytest.mark.parametrize("case", ["a1", "a2", "packed"])
def test_two_gpus_take_the_steps_of_one(folder: Path, engine: str, case: str) -> None:
    assert_same(folder / engine / case, folder / "single" / case)
    (start,) = read_json(folder / engine / case / "provenance.json", "provenance")["starts"]
    assert start["engine"].startswith(f"engine: {LABELS[engine]}, device cuda, float32")


def test_bf16_is_autocast_over_float32_weights_and_moments(folder: Path, engine: str) -> None:
    run = folder / engine / "bf16"
    mine, theirs = (
        [record["loss"] for record in records(path) if record["kind"] == "train"]
        for path in (run, folder / "single" / "bf16")
    )
    assert mine == pytest.approx(theirs, rel=0.02)
    exact = [record["loss"] for record in records(folder / engine / "wide") if record["kind"] == "train"]
    assert mine[0] == pytest.approx(theirs[0], rel=1e-3)
    assert mine != pytest.approx(exact, abs=1e-4)
    (start,) = read_json(run / "provenance.json", "provenance")["starts"]
    assert start["engine"].startswith(f"engine: {LABELS[engine]}, device cuda, bf16 autocast, float32 weights")
    for name in ("draft.safetensors", "optimizer.safetensors"):
        assert {value.dtype for value in load_file(list_checkpoints(run)[-1] / name).values()} == {torch.float32}


def resume(folder: Path, source: str, engine: str) -> None:
    """Goes on with the second half of `source`'s run, started as people start it."""
    name = f"after-{source}"
    run = folder / engine / name
    shutil.copytree(folder / source / "a2", run)
    shutil.rmtree(list_checkpoints(run)[-1])
    (folder / f"{engine}-{name}.yaml").write_text(dump_config(config_for(folder, engine, "a2", name)))
    printed = launch(engine, "train.py", "--config", str(folder / f"{engine}-{name}.yaml"))
    assert f"engine: {LABELS[engine]}, device cuda, float32" in printed
    assert "resumed from step-00000015" in printed
    assert_same(run, folder / "single" / "a2")


def test_a_checkpoint_of_one_process_goes_on_under_every_engine(folder: Path, engine: str) -> None:
    resume(folder, "single", engine)


def test_every_engine_s_checkpoint_goes_on_in_one_process(folder: Path, engine: str) -> None:
    resume(folder, engine, "single")
