"""Random rings whose writer and trainer are killed, again and again, until both have come to their end.

    python -m tests.ring_kills --runs 300 --seed 1      prints what was done, or which run went wrong, and how

Each side is a process of its own. It is killed as it enters a random call to the file system (half of a write is done
then), or at a random time. Whatever happened, the run must be that of nobody's having been killed: its log and its
weights, bit for bit, the ring never above its bytes and empty in the end.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from eagle3.data import ring_reader, ring_writer
from eagle3.data.ring_folder import read_reader
from eagle3.data.ring_format import RingPlan
from eagle3.data.ring_windows import RingWindows
from eagle3.data.store import StoredSample
from eagle3.data.store_format import shard_files
from eagle3.train.checkpoint import list_checkpoints
from eagle3.train.tracking import TIMED, read_log
from eagle3.train.trainer import run_training
from tests.children import in_a_child
from tests.kills import Deadly, quietly, run_cases
from tests.rings import of_type, ring_config, ring_plan, ring_samples, slowly, write_ring

RUNS_OF_A_RING = 6
MOST_KILLS = 8
CALLS_OF_A_SHARD, SECONDS_OF_A_SHARD = 40, 0.02
"""About as many as either side takes, so that kills come at any time of its work."""

MOST_SECONDS = 60
POLL_SECONDS = 0.002


@dataclass(frozen=True)
class Case:
    """A ring, and how it is trained from."""

    samples: list[StoredSample]
    plan: RingPlan
    roomy: RingPlan
    values: dict[str, Any]

    def write(self, folder: Path, slow: bool) -> None:
        write_ring(folder / "ring", self.plan, self.samples, 60, slowly if slow else lambda number: None)

    def train(self, folder: Path) -> None:
        run_training(ring_config(folder / "ring", folder / "run", **self.values, ring={"wait_seconds": 60}))

    def undisturbed(self, folder: Path) -> None:
        """A run from a ring that has room for all."""
        write_ring(folder / "ring", self.roomy, self.samples)
        self.train(folder)


def random_case(chance: random.Random) -> Case:
    dtype, seed, pack = chance.choice(["float32", "float8_e4m3fn"]), chance.randrange(1000), chance.random() < 0.5
    samples = of_type(ring_samples(chance.randint(4, 16), seed), dtype)
    values: dict[str, Any] = {"batch_size": chance.randint(1, 2), "pack": pack, "max_length": 32 if pack else 16}
    epochs, unit, shards = chance.randint(1, 3), chance.randint(1, 2), chance.uniform(2, 6)
    while True:
        plan = ring_plan(samples, epochs, shards, unit, seed, dtype)
        if RingWindows(plan, **values).most_bytes <= plan.max_bytes:
            break
        shards += 1
    values |= {"epochs": epochs, "save_every": chance.randint(1, 9)}
    return Case(samples, plan, ring_plan(samples, epochs, 99, unit, seed, dtype), values)


class Side:
    """The writer or the trainer: started again as often as it is killed."""

    def __init__(self, name: str, work: Callable[[], None], shards: int, log: Path) -> None:
        self.name, self._work, self._log = name, work, log
        self._calls, self._seconds = CALLS_OF_A_SHARD * shards, SECONDS_OF_A_SHARD * shards
        self.kills, self.ended, self._process, self._deadline = 0, False, 0, 0.0

    def look(self, chance: random.Random) -> None:
        """Starts it if it does not run, kills it if its time has come."""
        if self.ended:
            return
        if self._process == 0:
            self._start(chance)
            return
        if time.monotonic() > self._deadline:
            with suppress(ProcessLookupError):
                os.kill(self._process, signal.SIGKILL)
        process, status = os.waitpid(self._process, os.WNOHANG)
        if process == 0:
            return
        self._process, self.ended = 0, status == 0
        assert status in (0, signal.SIGKILL), f"the {self.name} ended with {status}:\n{self._log.read_text()}"
        self.kills += status != 0

    def said(self) -> str:
        """What it said last, and what its threads do now."""
        if self._process:
            os.kill(self._process, signal.SIGUSR2)
            time.sleep(1)
        return f"\nthe {self.name}, {'ended' if self.ended else f'process {self._process}'}:\n{self._log.read_text()}"

    def stop(self) -> None:
        if self._process:
            os.kill(self._process, signal.SIGKILL)
            os.waitpid(self._process, 0)

    def _start(self, chance: random.Random) -> None:
        spared, by_call = self.kills >= MOST_KILLS or chance.random() < 0.15, chance.random() < 0.6
        call = 0 if spared or not by_call else chance.randint(1, self._calls)
        self._deadline = float("inf") if spared or by_call else time.monotonic() + chance.uniform(0, self._seconds)
        self._process = in_a_child(lambda: quietly(self._log, Deadly(call), self._work))


def shard_bytes(ring: Path) -> int:
    """Bytes of all shards, those in work included; what goes meanwhile counts for nothing."""
    total = 0
    for path in ring.glob("shard-*.safetensors*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def outcome(run: Path) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """A run's log, but for times, and its weights."""
    log = [{key: value for key, value in record.items() if key not in TIMED} for record in read_log(run / "log.jsonl")]
    return log, load_file(list_checkpoints(run)[-1] / "draft.safetensors")


def disturbed(case: Case, folder: Path, chance: random.Random) -> Counter[str]:
    """One run of both sides; how often each was killed."""
    folder.mkdir()
    slow = chance.random() < 0.5
    sides = [
        Side("writer", lambda: case.write(folder, slow), len(case.plan.shards), folder / "writer.txt"),
        Side("trainer", lambda: case.train(folder), len(case.plan.shards), folder / "trainer.txt"),
    ]
    deadline = time.monotonic() + MOST_SECONDS
    try:
        while not all(side.ended for side in sides):
            assert time.monotonic() < deadline, f"it came to a standstill: {' '.join(side.said() for side in sides)}"
            for side in sides:
                side.look(chance)
            held = shard_bytes(folder / "ring")
            assert held <= case.plan.max_bytes, f"{held} bytes of shards, {case.plan.max_bytes} are allowed"
            time.sleep(POLL_SECONDS)
    finally:
        for side in sides:
            side.stop()
    assert read_reader(folder / "ring", len(case.plan.shards)).finished
    assert not shard_files(folder / "ring") and not list((folder / "run").glob("*.tmp"))
    return Counter({side.name: side.kills for side in sides})


def undisturbed(case: Case, folder: Path) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """The outcome of a run that nobody killed, from a ring that has room for all."""
    folder.mkdir()
    child = in_a_child(lambda: quietly(folder / "said.txt", Deadly(0), lambda: case.undisturbed(folder)))
    assert os.waitpid(child, 0)[1] == 0, (folder / "said.txt").read_text()
    return outcome(folder / "run")


def check(seed: int, number: int, folder: Path) -> Counter[str]:
    """Runs of one ring; how often each side was killed.

    Raises:
        AssertionError: a run is not what it should be.
    """
    ring_reader._POLL_SECONDS = ring_writer._POLL_SECONDS = POLL_SECONDS
    chance = random.Random(f"{seed}:{number}")
    case = random_case(chance)
    log, weights = undisturbed(case, folder / "whole")
    kills: Counter[str] = Counter()
    for run in range(RUNS_OF_A_RING):
        kills += disturbed(case, folder / f"{run}", chance)
        found = outcome(folder / f"{run}" / "run")
        assert found[0] == log, f"another log: {found[0]}\nexpected\n{log}"
        assert found[1].keys() == weights.keys()
        assert all(torch.equal(found[1][name], weights[name]) for name in weights), "other weights"
    return kills


if __name__ == "__main__":
    sys.exit(run_cases(__doc__, check, RUNS_OF_A_RING, 30, {"writer": 0, "trainer": 0}))
