"""Runs every case of test_ddp.py on each rank of one process group; started by torchrun.

Writes each case's outcome on each rank: the digest of its final weights, or the error that stopped it.
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
from accelerate.utils import gather_object
from safetensors.torch import save

from eagle3.config import TrainConfig, load_config
from eagle3.errors import ProblemsError
from eagle3.train.engine import make_accelerator
from eagle3.train.setup import make_setup
from eagle3.train.trainer import Trainer


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    accelerator = make_accelerator("no")
    outcomes = {}
    for path in sorted(folder.glob("*.yaml")):
        config = load_config(TrainConfig, path)
        trainer = Trainer(config, make_setup(config), accelerator, None)
        try:
            trainer.train()
            outcome = hashlib.sha256(save(trainer.module.model.trainable_state())).hexdigest()
        except ProblemsError as error:
            outcome = str(error)
        outcomes[path.stem] = gather_object([outcome])
    if accelerator.is_main_process:
        (folder / "outcomes.json").write_text(json.dumps(outcomes))
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
