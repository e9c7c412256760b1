"""Trains every config of test_sharded.py on each rank of one process group, in shards; started by torchrun.

Arguments: the folder, and the engine's name. Accelerate joins gloo ranks as plain ones, since it drops engines that
shard on a CPU; the engine is handed to the trainer. Writes how each case ended on each rank.
"""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from eagle3.config import TrainConfig, load_config
from eagle3.errors import ProblemsError
from eagle3.train.engine import make_accelerator
from eagle3.train.engines.base import Engine
from eagle3.train.engines.fsdp2 import FullySharded
from eagle3.train.engines.zero import Zero
from eagle3.train.run_folder import find_resume_point
from eagle3.train.setup import make_setup
from eagle3.train.trainer import Trainer


def main(folder: Path, name: str) -> None:
    accelerator = make_accelerator("no")
    outcomes = {}
    for path in sorted(folder.glob("*.yaml")):
        config = load_config(TrainConfig, path)
        outcomes[path.stem] = gather_object([train(config, accelerator, make(name, accelerator, config))])
    if accelerator.is_main_process:
        (folder / f"{name}.json").write_text(json.dumps(outcomes))
    accelerator.end_training()
    os._exit(0)  # a busy machine's interpreter may abort as it ends, in a thread of FSDP2 on gloo (torch 2.13)


def make(name: str, accelerator: Accelerator, config: TrainConfig) -> Engine:
    bf16 = config.mixed_precision == "bf16"
    return FullySharded(accelerator, bf16) if name == "fsdp2" else Zero(accelerator, bf16, int(name[-1]))


def train(config: TrainConfig, accelerator: Accelerator, engine: Engine) -> str:
    setup = make_setup(config, accelerator.num_processes)
    checkpoint = find_resume_point(Path(config.output), config, setup, accelerator.num_processes)
    accelerator.wait_for_everyone()
    try:
        trainer = Trainer(config, setup, accelerator, checkpoint, engine)
    except ProblemsError as error:
        return str(error)
    try:
        trainer.train()
    except ProblemsError as error:
        if "gradient norm of step 1 " in str(error):
            assert unchanged(trainer), "a weight has changed"
        return str(error)
    return engine.active()


def unchanged(trainer: Trainer) -> bool:
    """Whether the weights are those to begin with; asked on every rank."""
    with trainer.engine.whole():
        now = {name: value.detach().clone() for name, value in trainer.module.model.trainable_state().items()}
    before = make_setup(trainer.config, trainer.accelerator.num_processes).module.model.trainable_state()
    return all(torch.equal(now[name], value) for name, value in before.items())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
