"""Runs every case of test_ddp.py on each rank of one process group; started by torchrun.

Writes each case's outcome on each rank: the digest of its final weights, or the error that stopped it.
"""

import hashlib
import json
import shutil
import sys
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors.torch import save

from eagle3.config import TrainConfig, load_config
from eagle3.errors import ProblemsError
from eagle3.train.checkpoint import list_checkpoints
from eagle3.train.engine import make_accelerator
from eagle3.train.run_folder import find_resume_point
from eagle3.train.setup import make_setup
from eagle3.train.trainer import Trainer


def main(folder: Path) -> None:
    accelerator = make_accelerator("no")
    outcomes = {}
    for path in sorted(folder.glob("*.yaml")):
        config = load_config(TrainConfig, path)
        outcomes[path.stem] = gather_object([train(config, accelerator)])
        if path.stem.endswith("resumed"):
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                shutil.rmtree(list_checkpoints(Path(config.output))[-1])
            accelerator.wait_for_everyone()
            outcomes[f"{path.stem} again"] = gather_object([train(config, accelerator)])
    if accelerator.is_main_process:
        (folder / "outcomes.json").write_text(json.dumps(outcomes))
    accelerator.end_training()


def train(config: TrainConfig, accelerator: Accelerator) -> str:
    setup = make_setup(config, accelerator.num_processes)
    checkpoint = find_resume_point(Path(config.output), config, setup, accelerator.num_processes)
    accelerator.wait_for_everyone()
    trainer = Trainer(config, setup, accelerator, checkpoint)
    try:
        trainer.train()
    except ProblemsError as error:
        return str(error)
    return hashlib.sha256(save(trainer.module.model.trainable_state())).hexdigest()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
