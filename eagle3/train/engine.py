"""How training is distributed: what Accelerate was asked for, what it made of that, and refusals where they differ.

Accelerate 1.15 drops FSDP, DeepSpeed and even the number of processes without a word when it launches on a CPU, so
the launcher's own request is read too. Only a single process and plain data parallelism run in this version.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator
from accelerate.commands.config.config_args import default_config_file, load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, GradientAccumulationPlugin

from eagle3.errors import Problem, raise_problems

_SUPPORTED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
_ENGINE_SWITCHES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "tensor or context parallelism",
}
_LAUNCHERS = ("accelerate", "accelerate-launch", "accelerate.commands.launch", "accelerate.commands.accelerate_cli")


def make_accelerator(mixed_precision: str) -> Accelerator:
    """The accelerator of this process; a launch that would train otherwise than asked is refused.

    Under torchrun on a machine without a GPU it uses gloo.

    Raises:
        ProblemsError: kinds `train.engine`, `train.processes`, `train.precision`.
    """
    launcher = read_launcher(_parent_command_line())
    raise_problems(check_environment(os.environ, mixed_precision) + check_launcher(launcher, os.environ))
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision=mixed_precision,
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)],
    )
    raise_problems(check_accelerator(accelerator, os.environ))
    return accelerator


def describe(accelerator: Accelerator) -> list[str]:
    """Lines that say which engine, processes, device and precision are active."""
    engine = "single process" if accelerator.distributed_type == DistributedType.NO else "DDP"
    precision = "bf16 autocast, float32 weights" if accelerator.mixed_precision == "bf16" else "float32"
    lines = [
        f"engine: {engine} ({accelerator.distributed_type.value}), {accelerator.num_processes} process(es), "
        f"device {accelerator.device.type}, {precision}"
    ]
    if accelerator.mixed_precision == "bf16" and accelerator.device.type == "cpu":
        lines.append("note: on a CPU mixed_precision=no is usually faster than bf16")
    return lines


def check_environment(environment: Mapping[str, str], mixed_precision: str) -> list[Problem]:
    """What `accelerate launch` asks for in the environment and this trainer does not do."""
    asked_for = [name for key, name in _ENGINE_SWITCHES.items() if environment.get(key, "false").lower() == "true"]
    problems = [_engine_problem("accelerate config", f"asks for {name}") for name in asked_for]
    if environment.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no":
        message = f"asks for torch.compile ({environment['ACCELERATE_DYNAMO_BACKEND']}), which is not supported"
        problems.append(Problem("accelerate config", "train.engine", message, "set dynamo_backend to no"))
    asked = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    if asked not in ("no", mixed_precision):
        message = f"mixed precision is {asked} there and {mixed_precision} in the training config"
        problems.append(
            Problem("accelerate config", "train.precision", message, "set mixed_precision in the training config only")
        )
    return problems


def read_launcher(command_line: Sequence[str]) -> Namespace | None:
    """What an `accelerate launch` command asks for (`engine`, `num_processes`), or None for another command."""
    start = next((i for i, part in enumerate(command_line[:4]) if Path(part).name in _LAUNCHERS), None)
    if start is None:
        return None
    rest = list(command_line[start + 1 :])
    arguments, _ = launch_command_parser().parse_known_args(rest[1:] if rest[:1] == ["launch"] else rest)
    request = Namespace(engine=None, num_processes=arguments.num_processes)
    if arguments.config_file is not None or (Path(default_config_file).is_file() and not arguments.cpu):
        config = load_config_from_file(arguments.config_file)
        request.engine = str(getattr(config.distributed_type, "value", config.distributed_type))
        request.num_processes = request.num_processes or config.num_processes
    for name, engine in (("use_deepspeed", "DEEPSPEED"), ("use_fsdp", "FSDP"), ("use_megatron_lm", "MEGATRON_LM")):
        if getattr(arguments, name):
            request.engine = engine
    return request


def check_launcher(request: Namespace | None, environment: Mapping[str, str]) -> list[Problem]:
    """Finds what `accelerate launch` was asked for and dropped before it started this process."""
    if request is None:
        return []
    problems = []
    if request.engine is not None and request.engine not in [kind.value for kind in _SUPPORTED]:
        problems.append(_engine_problem("accelerate launch", f"asks for {request.engine}"))
    started = int(environment.get("WORLD_SIZE", "1"))
    if request.num_processes is not None and request.num_processes != started:
        message = f"{request.num_processes} processes were asked for and Accelerate started {started}"
        fix = "use --multi_gpu (it also starts CPU processes), configs/accelerate/ddp.yaml, or torchrun"
        problems.append(Problem("accelerate launch", "train.processes", message, fix))
    return problems


def check_accelerator(accelerator: Accelerator, environment: Mapping[str, str]) -> list[Problem]:
    """Finds an accelerator that is not what the launcher started."""
    problems = []
    if accelerator.distributed_type not in _SUPPORTED:
        problems.append(_engine_problem("accelerate", f"runs {accelerator.distributed_type.value}"))
    started = int(environment.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != started:
        message = f"{started} processes were started and Accelerate joined {accelerator.num_processes}"
        fix = "unset ACCELERATE_* variables left over from another launch, or start with torchrun"
        problems.append(Problem("accelerate", "train.processes", message, fix))
    return problems


def _engine_problem(where: str, found: str) -> Problem:
    fix = "launch with configs/accelerate/single.yaml or configs/accelerate/ddp.yaml"
    return Problem(where, "train.engine", f"{found}; this version runs one process, or DDP on CPUs or GPUs", fix)


def _parent_command_line() -> list[str]:
    try:
        parent = psutil.Process().parent()
        return [] if parent is None else parent.cmdline()
    except psutil.Error:
        return []
