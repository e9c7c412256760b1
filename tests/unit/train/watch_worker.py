"""Trains on each rank of one process group, for test_watch_ranks.py; started by torchrun.

Rank 1 reads slowly at first; later each rank in turn stops itself as a whole, until the test lets it go on.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from eagle3.config import TrainConfig, load_config
from eagle3.data.loader import Ahead
from eagle3.train.trainer import Trainer, run_training

RANK = int(os.environ["RANK"])
SLOW_STEPS = range(3, 8)
STUCK_STEP, STOPPED_STEPS = 14, {1: 17, 0: 20}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    step, take = Trainer._step, Ahead.take
    taken = 0

    def stopping(self: Trainer, *args: Any) -> str:
        if self.state.step == STOPPED_STEPS[RANK]:
            (folder / f"stopped-{RANK}").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        return step(self, *args)

    def slow(self: Ahead) -> Any:
        nonlocal taken
        taken += 1
        if RANK == 1:
            time.sleep(0.25 * (taken in SLOW_STEPS) + 2.0 * (taken == STUCK_STEP))
        return take(self)

    Trainer._step, Ahead.take = stopping, slow  # type: ignore[method-assign]
    run_training(load_config(TrainConfig, folder / "config.yaml"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
