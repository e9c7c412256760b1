"""Trains the configs of test_engines.py in one launch: one process group for all, as starting one takes longest."""

import sys
from pathlib import Path

from accelerate.state import AcceleratorState

from eagle3.config import TrainConfig, load_config
from eagle3.train.engine import make_accelerator
from eagle3.train.run_folder import find_resume_point
from eagle3.train.setup import make_setup
from eagle3.train.trainer import Trainer


def main(folder: Path) -> None:
    accelerator = None
    for path in sorted(folder.glob("*.yaml")):
        config = load_config(TrainConfig, path)
        if accelerator is not None:
            AcceleratorState._reset_state()  # the precision may be another
        accelerator = make_accelerator(config.mixed_precision)
        setup = make_setup(config, accelerator.num_processes)
        assert find_resume_point(Path(config.output), config, setup, accelerator.num_processes) is None
        accelerator.wait_for_everyone()
        Trainer(config, setup, accelerator, None).train()
    if accelerator is not None:
        accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
