"""Two gloo ranks, one of which reads slowly, hangs in reading, or is stopped as a whole; one launch has it all."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eagle3.config import dump_config
from eagle3.train.tracking import Record, read_log
from tests.stores import train_config, write_random_store

ROOT = Path(__file__).parents[3]
STANDSTILL_SECONDS = 2.5


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Record]]:
    """What both ranks said, and the log."""
    folder = tmp_path_factory.mktemp("watch")
    store = write_random_store(folder / "store", [(8, (2, 8)), (16, (1, 16)), (12, (3, 12)), (7, (1, 7))] * 3)
    tracking = {"log_every": 4, "stall_seconds": 1.0}
    config = train_config(store, folder / "run", epochs=4, eval_fraction=0.1, tracking=tracking)
    (folder / "config.yaml").write_text(dump_config(config))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    worker = [str(Path(__file__).with_name("watch_worker.py")), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    child = subprocess.Popen([*torchrun, *worker], cwd=ROOT, env=environment, stderr=subprocess.PIPE)
    for rank in (1, 0):
        stopped = folder / f"stopped-{rank}"
        while child.poll() is None and not (stopped.exists() and stopped.read_text()):
            time.sleep(0.02)
        if child.poll() is None:
            time.sleep(STANDSTILL_SECONDS)
            os.kill(int(stopped.read_text()), signal.SIGCONT)
    text = child.communicate(timeout=120)[1].decode()
    assert child.returncode == 0, text
    return text, read_log(folder / "run" / "log.jsonl")


def test_a_rank_that_is_stopped_is_named_by_the_other(said: tuple[str, list[Record]]) -> None:
    text, records = said
    for speaker, silent in ((0, 1), (1, 0)):
        told = rf"stalled: rank {speaker} has been computing for \d s in step \d+, usually \d+ ms"
        words = rf"{told}; no sign of life from rank {silent} for \d"
        assert re.search(words, text), text
        assert f"training goes on: rank {speaker} was computing for" in text
        assert f"rank {silent} itself stood still for" in text
    assert max(record["step"] for record in records) == 24


def test_a_rank_that_reads_for_long_is_named_and_what_it_does(said: tuple[str, list[Record]]) -> None:
    assert re.search(
        r"stalled: rank 0 .* in step 14, .*; rank 1 behind: rank 1 was reading data in step 14 \(for", said[0]
    )


def test_the_rank_that_waits_for_data_is_named_once(said: tuple[str, list[Record]]) -> None:
    text, records = said
    assert text.count("warning: training waits for data") == 1, text
    assert re.search(r"waits for data \d\d% of its time, most of all on rank 1 .*copy .*store to a faster", text)
    waits = [(record["data_wait"] > 0.1, record["data_wait_rank"]) for record in records if record["kind"] == "train"]
    assert waits[1] == waits[2] == (True, 1)
