"""Two ranks under torchrun: a signal to the launcher, and a rank that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eagle3.config import dump_config
from eagle3.files import read_json
from eagle3.train.checkpoint import list_checkpoints
from tests.stores import train_config, write_random_store
from tests.unit.train.test_signals import assert_same_end

ROOT = Path(__file__).parents[3]


def launch(folder: Path, run: str, what: str) -> subprocess.Popen[bytes]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    worker = [str(Path(__file__).with_name("stop_worker.py")), str(folder), run, what]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([*torchrun, *worker], cwd=ROOT, env=environment, stderr=subprocess.PIPE)


def finish(child: subprocess.Popen[bytes]) -> tuple[int, str]:
    said = child.communicate(timeout=120)[1].decode()
    return child.returncode, said


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a run that was stopped after step 5, killed in step 8 and ended, `run`, and one that nobody disturbed."""
    folder = tmp_path_factory.mktemp("stops")
    store = write_random_store(folder / "store", [(8, (2, 8)), (16, (1, 16)), (12, (3, 12)), (7, (1, 7))] * 3)
    settings: dict[str, object] = {"epochs": 2, "save_every": 2, "eval_fraction": 0.2, "keep_checkpoints": 1}
    (folder / "config.yaml").write_text(dump_config(train_config(store, folder / "run", **settings)))
    child = launch(folder, "run", "term")
    while child.poll() is None and not (folder / "ready").exists():
        time.sleep(0.01)
    child.send_signal(signal.SIGTERM)
    code, said = finish(child)
    assert code != 0 and "stopped by SIGTERM after step 5 of 10, which is saved" in said, said
    assert list_checkpoints(folder / "run")[-1].name == "step-00000005"
    code, said = finish(launch(folder, "run", "kill"))
    assert code != 0 and list_checkpoints(folder / "run")[-1].name == "step-00000006", said
    for run in ("run", "whole"):
        code, said = finish(launch(folder, run, "none"))
        assert code == 0, said
    return folder


def test_a_signal_to_the_launcher_stops_both_ranks_after_one_step_saved(folder: Path) -> None:
    assert [read_json(folder / f"term-{rank}.json", "outcome") for rank in (0, 1)] == [[5, True]] * 2


def test_two_ranks_that_were_stopped_and_killed_end_as_two_that_were_not(folder: Path) -> None:
    assert_same_end(folder / "run", folder / "whole")
    starts = read_json(folder / "run" / "provenance.json", "provenance")["starts"]
    assert [start["step"] for start in starts] == [0, 5, 6]


def test_a_disk_that_is_full_on_the_main_process_ends_both(folder: Path) -> None:
    code, said = finish(launch(folder, "full", "full"))
    assert code == 0, said
    assert [read_json(folder / f"full-{rank}.json", "outcome") for rank in (0, 1)] == ["disk.full", "train.not_saved"]
