"""Trains on each rank of one process group, for test_stop_ranks.py; started by torchrun.

Arguments: folder, run, and what happens: `term` (rank 1 waits in its fifth step for a signal, which rank 0 may have got
before), `kill` (rank 1 is killed in its eighth), `full` (the disk is full at the first checkpoint) or `none`. Writes
how it ended on each rank.
"""

import errno
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import eagle3.train.checkpoint as checkpoint
from eagle3.config import TrainConfig, load_config
from eagle3.errors import ProblemsError
from eagle3.train import signals
from eagle3.train.trainer import Trainer, run_training

RANK = int(os.environ["RANK"])


def main(folder: Path, run: str, what: str) -> None:
    original, signalled = Trainer._step, threading.Event()
    noted = signals.StopRequest._handle

    def handle(self: signals.StopRequest, *args: Any) -> None:
        noted(self, *args)
        signalled.set()

    def step(self: Trainer, *args: Any) -> str:
        if RANK == 1 and what == "term" and self.state.step == 4:
            (folder / "ready").touch()
            assert signalled.wait(60), "no signal came"
        if RANK == 1 and what == "kill" and self.state.step == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *args)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    signals.StopRequest._handle, Trainer._step = handle, step  # type: ignore[method-assign]
    if what == "full":
        checkpoint.save_tensors = full
    config = load_config(TrainConfig, folder / "config.yaml").model_copy(update={"output": str(folder / run)})
    try:
        result = run_training(config)
        ended: object = [result.steps, result.stopped]
    except ProblemsError as error:
        ended = error.problems[0].kind
    (folder / f"{what}-{RANK}.json").write_text(json.dumps(ended))
    sys.stderr.flush()
    os._exit(0)  # as the command line does where an error left the process group open


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
