"""`extract --stream` and `train --stream` as real commands on a tiny Kimi-K2.5, both killed and started again: the run
equals an undisturbed one, bit for bit.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from eagle3.config import ExtractConfig, TrainConfig, build_config, load_config
from eagle3.data.ring_folder import listed_bytes, read_reader
from eagle3.target.extract import run_extract_ring
from eagle3.target.tiny import make_tiny_kimi
from eagle3.train.checkpoint import list_checkpoints
from eagle3.train.tracking import TIMED, read_log
from eagle3.train.trainer import run_training
from tests.unit.target.cases import extract_config, write_conversations

ROOT = Path(__file__).parents[2]
OUTPUT_INDICES = [2, 30, 58]


def start(command: str, config: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "eagle3.cli", command, "--stream", "--config", str(config)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path, Path]]:
    """(the writer's config, the trainer's, their folder) of a ring and a run of this name."""
    base = tmp_path_factory.mktemp("ring")
    target, data = make_tiny_kimi(base / "target"), write_conversations(base / "data.jsonl", 10)

    def make(name: str) -> tuple[Path, Path, Path]:
        folder = base / name
        folder.mkdir()
        ring = {"epochs": 2, "max_bytes": 250_000, "wait_seconds": 60}
        extract = extract_config(
            target, data, folder / "ring", output_indices=OUTPUT_INDICES, shard_max_samples=2, ring=ring
        )
        train = build_config(
            TrainConfig,
            {
                "dataset": str(folder / "ring"),
                "output": str(folder / "run"),
                "output_indices": OUTPUT_INDICES,
                "target": {"path": str(target)},
                "mixed_precision": "no",
                "epochs": 2,
                "draft": {"draft_vocab_size": 128, "rope": {"rope_theta": 50000.0}},
                "optim": {"learning_rate": 2e-3},
                "tracking": {"log_every": 1},
                "ring": {"wait_seconds": 60},
            },
            "test",
        )
        paths = []
        for what, config in (("extract", extract), ("train", train)):
            paths.append(folder / f"{what}.json")  # JSON is YAML
            paths[-1].write_text(json.dumps(config.model_dump(mode="json")))
        return paths[0], paths[1], folder

    return make


def undisturbed(extract: Path, train: Path, folder: Path) -> Path:
    """The run of both sides in this process."""
    try:
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(run_extract_ring, load_config(ExtractConfig, extract))
            run_training(load_config(TrainConfig, train))
            assert writing.result().written == 10
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    return folder / "run"


def test_both_sides_killed_and_started_again_train_as_if_nothing_had_happened(
    configs: Callable[[str], tuple[Path, Path, Path]],
) -> None:
    chance = random.Random()
    extract, train, folder = configs("killed")
    writer, trainer = start("extract", extract), start("train", train)
    log, most, left = folder / "run" / "log.jsonl", 0, {"writer": 1, "trainer": 1}
    lines = {side: chance.randint(2, 12) for side in left}
    print(f"killing after {lines} log lines")
    deadline = time.monotonic() + 200
    while trainer.poll() is None or writer.poll() is None:
        assert time.monotonic() < deadline
        done = len(read_log(log)) if log.exists() else 0
        if (folder / "ring").is_dir():
            most = max(most, listed_bytes(folder / "ring"))
        if left["writer"] and (done >= lines["writer"] or writer.poll() is not None):
            left["writer"] = 0
            writer.kill()
            writer.communicate()
            writer = start("extract", extract)
        if left["trainer"] and done >= lines["trainer"]:
            left["trainer"] = 0
            time.sleep(chance.uniform(0, 0.05))
            trainer.kill()
            trainer.communicate()
            trainer = start("train", train)
        time.sleep(0.005)
    out, errors = trainer.communicate()
    assert trainer.returncode == 0, errors
    assert "20 steps" in out and "the writer, since its last start, waited for room" in errors
    _, errors = writer.communicate()
    assert writer.returncode == 0, errors
    assert 0 < most <= 250_000 and read_reader(folder / "ring", 99).finished and not listed_bytes(folder / "ring")

    whole = undisturbed(*configs("whole"))
    logs = [
        [{key: value for key, value in record.items() if key not in TIMED} for record in read_log(run / "log.jsonl")]
        for run in (folder / "run", whole)
    ]
    assert logs[0] == logs[1] and len(logs[0]) == 20
    mine, theirs = (load_file(list_checkpoints(run)[-1] / "draft.safetensors") for run in (folder / "run", whole))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
