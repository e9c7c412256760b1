"""Four ranks under torchrun take the steps of one process, and measure what it measures."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3.config import dump_config
from eagle3.train.trainer import run_training
from tests.stores import write_random_store
from tests.unit.train.test_ddp import MIXED, ROOT, assert_same_steps, config_for, same_weights

CASES: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    # settings of both runs; settings of the single process besides
    "plain": ({}, {"batch_size": 4}),
    "accumulated": ({"accumulate": 2}, {"batch_size": 4}),
    "packed": ({"accumulate": 2, "pack": True, "max_length": 20}, {"batch_size": 8, "accumulate": 1}),
    "budget": ({"accumulate": 2, "batch_tokens": 20}, {"accumulate": 8}),
    "held_out": ({"eval_fraction": 0.3, "eval_every": 10}, {"accumulate": 4}),
}
STEPS = {"max_steps": 30, "epochs": 60}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds every case's run by four ranks under `four`."""
    folder = tmp_path_factory.mktemp("four_ranks")
    for case, (values, _) in CASES.items():
        write_random_store(folder / "stores" / case, MIXED * 3)
        (folder / f"{case}.yaml").write_text(dump_config(config_for(folder, case, "four", {**STEPS, **values})))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4"]
    worker = str(Path(__file__).with_name("ddp_worker.py"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([*command, worker, str(folder)], check=True, cwd=ROOT, env=environment, timeout=200)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_four_ranks_take_thirty_steps_of_one_process(folder: Path, case: str) -> None:
    values, single = CASES[case]
    run_training(config_for(folder, case, "one", {**STEPS, **values, **single}))
    four, one = same_weights(folder / "four" / case, folder / "one" / case)
    assert sum(record["kind"] == "train" for record in four) == 30
    assert_same_steps(four, one)
