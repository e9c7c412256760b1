"""Random runs that are killed or asked to stop, again and again, until they have come to their end.

    python -m tests.train_kills --runs 100 --seed 1      prints what was done, or which run went wrong, and how

A run is one process, or two that exchange gradients (gloo). One of them is killed as it enters a random call to the
file system (half of a write is done then; checkpoints are written in a thread beside the training), or at a random
time; or one of them gets SIGTERM, and all must stop after the same step, saved. Whatever happened, the run must be
that of nobody's having disturbed it: samples of each step, log, weights and moments, bit for bit.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import eagle3.train.checkpoint as checkpoint
from eagle3.config import TrainConfig
from eagle3.errors import EXIT_STOPPED
from eagle3.files import read_json
from eagle3.train.checkpoint import list_checkpoints, load_checkpoint
from eagle3.train.tracking import TIMED, read_log
from eagle3.train.trainer import Trainer, run_training
from tests.children import in_a_child
from tests.kills import Deadly, quietly, run_cases
from tests.stores import train_config, write_random_store

RUNS_OF_A_CASE = 3
MOST_DISTURBED = 6
CALLS, SECONDS = 250, 1.5
"""About as many as a run takes, so that it is disturbed at any time of its work."""

MOST_SECONDS, GRACE_SECONDS = 120, 0.3
POLL_SECONDS = 0.002


@dataclass(frozen=True)
class Case:
    """What is trained, by how many processes."""

    store: Path
    ranks: int
    values: dict[str, Any]

    def config(self, folder: Path) -> TrainConfig:
        return train_config(self.store, folder / "run", **self.values)


def random_case(chance: random.Random, folder: Path, ranks: int) -> Case:
    lengths = [chance.randint(4, 16) for _ in range(chance.randint(8, 16))]
    store = write_random_store(
        folder / "store", [(length, (2, length)) for length in lengths], seed=chance.randrange(99)
    )
    moments = chance.choice(["float32", "float32", "bfloat16", "float8"])
    values: dict[str, Any] = {
        "batch_size": chance.randint(1, 2),
        "accumulate": chance.randint(1, 2),
        "pack": chance.random() < 0.3,
        "epochs": chance.randint(2, 4),
        "save_every": chance.randint(1, 4),
        "keep_checkpoints": chance.randint(1, 3),
        "eval_fraction": chance.choice([0.0, 0.2]),
        "draft": {"intermediate_size": 300, "draft_vocab_size": 24, "init": "random"},
        "optim": {"learning_rate": 1e-2, "moments": moments},
    }
    return Case(store, ranks, values)


def trained(folder: Path) -> dict[int, list[str]]:
    """The samples of each step, whenever it was taken; all times must agree."""
    found: dict[int, list[str]] = {}
    for line in (folder / "trained.jsonl").read_text().splitlines():
        step, ids = json.loads(line)
        assert found.setdefault(step, ids) == ids, f"step {step} had {found[step]}, and then {ids}"
    return found


def rank_work(case: Case, folder: Path, rank: int, port: int, deadly: Deadly) -> None:
    """What a process does; it ends this process with the exit code of `eagle3 train`."""
    if case.ranks > 1:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(case.ranks)}
        os.environ.update(where | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    step, save = Trainer._step, checkpoint.save_tensors

    def noted(self: Trainer, window: Any, *args: Any) -> str:
        descriptor = os.open(folder / "trained.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, (json.dumps([self.state.step + 1, self.feed.ids(window)]) + "\n").encode())
        os.close(descriptor)
        return step(self, window, *args)

    def halved(tensors: Any, path: Path) -> None:
        save(tensors, path)
        deadly.call(lambda: os.truncate(path, path.stat().st_size // 2))

    Trainer._step, checkpoint.save_tensors = noted, halved  # type: ignore[method-assign]
    result = run_training(case.config(folder))
    os._exit(EXIT_STOPPED if result.stopped else 0)


class Start:
    """One start of a run's processes, one of which may be disturbed."""

    def __init__(self, case: Case, folder: Path, chance: random.Random, how: str) -> None:
        self._folder, self._how, self._victim = folder, how, chance.randrange(case.ranks)
        call = chance.randint(1, CALLS) if how == "call" else 0
        self._at = time.monotonic() + chance.uniform(0, SECONDS) if how in ("time", "stop") else float("inf")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._processes = [
            in_a_child(
                lambda rank=rank: quietly(  # type: ignore[misc]
                    folder / f"said-{rank}.txt",
                    deadly := Deadly(call if rank == self._victim else 0),
                    lambda: rank_work(case, folder, rank, port, deadly),
                ),
                trains=True,
            )
            for rank in range(case.ranks)
        ]
        self._codes: dict[int, int] = {}

    def codes(self) -> list[int]:
        """Waits for all; exit code of each, or minus the signal that ended it. A rank without peers is ended too."""
        deadline, killed_at = time.monotonic() + MOST_SECONDS, 0.0
        while len(self._codes) < len(self._processes):
            now = time.monotonic()
            assert now < deadline, f"a standstill, exit codes {self._codes} after {self._how}\n{self._said()}"
            if now > self._at:
                self._at = float("inf")
                self._send(self._victim, signal.SIGTERM if self._how == "stop" else signal.SIGKILL)
            for rank, process in enumerate(self._processes):
                if rank not in self._codes and os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                    self._codes[rank] = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            broken = any(code not in (0, EXIT_STOPPED) for code in self._codes.values())
            if broken and not killed_at:  # as launchers do: first SIGTERM, then SIGKILL
                killed_at = now + GRACE_SECONDS
                self._send_all(signal.SIGTERM)
            elif broken and now > killed_at:
                self._send_all(signal.SIGKILL)
            time.sleep(POLL_SECONDS)
        return [self._codes[rank] for rank in range(len(self._processes))]

    def _said(self) -> str:
        """What the processes said, and what their threads do now."""
        self._send_all(signal.SIGUSR2)
        time.sleep(1)
        return "\n".join(path.read_text() for path in sorted(self._folder.glob("said-*.txt")))

    def end(self) -> None:
        self._send_all(signal.SIGKILL)
        for rank, process in enumerate(self._processes):
            if rank not in self._codes:
                os.waitpid(process, 0)

    def _send(self, rank: int, number: int) -> None:
        if rank not in self._codes:
            with suppress(ProcessLookupError):
                os.kill(self._processes[rank], number)

    def _send_all(self, number: int) -> None:
        for rank in range(len(self._processes)):
            self._send(rank, number)


def run_to_its_end(case: Case, folder: Path, chance: random.Random | None) -> Counter[str]:
    """Starts a run until it is done; how often it was disturbed. Without `chance` it is left alone."""
    folder.mkdir()
    done: Counter[str] = Counter()
    while True:
        left_alone = chance is None or done.total() >= MOST_DISTURBED or chance.random() < 0.1
        how = "not" if left_alone or chance is None else chance.choice(["call", "time", "stop"])
        start = Start(case, folder, chance or random.Random(0), how)
        try:
            codes = start.codes()
        finally:
            start.end()
        said = "\n".join(path.read_text() for path in sorted(folder.glob("said-*.txt")))
        if codes == [0] * case.ranks:
            return done
        if EXIT_STOPPED in codes:
            assert codes == [EXIT_STOPPED] * case.ranks, f"exit codes {codes} after a signal to one\n{said}"
            done["stopped"] += 1
            continue
        assert how != "not", f"exit codes {codes}, though nobody disturbed it\n{said}"
        assert (how in ("call", "time") and -signal.SIGKILL in codes) or (how == "stop" and -signal.SIGTERM in codes), (
            f"exit codes {codes} after {how}\n{said}"
        )
        done["killed before it trained" if how == "stop" else f"killed by {how}"] += 1


def outcome(folder: Path) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor], dict[int, list[str]], Any]:
    """Log but for times, weights and moments, samples of each step, state."""
    run = folder / "run"
    log = [{key: value for key, value in record.items() if key not in TIMED} for record in read_log(run / "log.jsonl")]
    newest = list_checkpoints(run)[-1]
    tensors = {f"{name} {key}": value for name in ("draft", "optimizer")
               for key, value in load_file(newest / f"{name}.safetensors").items()}  # fmt: skip
    assert not list((run / "checkpoints").glob("*.tmp"))
    best = read_json(run / "best.json", "best")["checkpoint"]
    load_checkpoint(run / "checkpoints" / best)
    return log, tensors, trained(folder), (newest.name, best, read_json(newest / "state.json", "state"))


def check(seed: int, number: int, folder: Path) -> Counter[str]:
    """Runs of one case; how often each was disturbed.

    Raises:
        AssertionError: a run is not what it should be.
    """
    chance = random.Random(f"{seed}:{number}")
    case = random_case(chance, folder, 1 + number % 2)
    run_to_its_end(case, folder / "whole", None)
    log, tensors, samples, state = outcome(folder / "whole")
    done: Counter[str] = Counter()
    for run in range(RUNS_OF_A_CASE):
        done += run_to_its_end(case, folder / f"{run}", chance)
        found = outcome(folder / f"{run}")
        assert found[0] == log, f"another log: {found[0]}\nexpected\n{log}"
        assert found[1].keys() == tensors.keys()
        assert all(found[1][name].dtype == value.dtype for name, value in tensors.items()), "other types"
        wrong = [name for name, value in tensors.items() if not same_bits(found[1][name], value)]
        assert not wrong, f"other bits: {wrong}"
        assert found[2] == samples, "other samples"
        assert found[3] == state, f"{found[3]}, expected {state}"
    return done + Counter({f"runs of {case.ranks}": RUNS_OF_A_CASE})


def same_bits(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.equal(mine.contiguous().flatten().view(torch.uint8), theirs.contiguous().flatten().view(torch.uint8))


if __name__ == "__main__":
    sys.exit(run_cases(__doc__, check, RUNS_OF_A_CASE, 6))
