"""How training is distributed: what Accelerate was asked for, what it made of that, and refusals where they differ.

Accelerate 1.15 drops FSDP, DeepSpeed and even the number of processes without a word when it launches on a CPU, so
the launcher's own request is read too. `eagle3.train.engines` holds what runs.
"""

from __future__ import annotations

import importlib.util
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
from eagle3.train.engines.base import Engine
from eagle3.train.engines.replicated import Replicated
from eagle3.train.engines.zero import Zero

_SHARDED = {
    DistributedType.FSDP.value: "ACCELERATE_USE_FSDP",
    DistributedType.DEEPSPEED.value: "ACCELERATE_USE_DEEPSPEED",
}
"""Engines that need GPUs, and the variable by which `accelerate launch` hands the wish on."""
_REPLICATED = (DistributedType.NO.value, DistributedType.MULTI_CPU.value, DistributedType.MULTI_GPU.value)
_REFUSED = {
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "tensor or context parallelism",
}
_NAMES = {
    "single": "single process",
    "ddp": "DDP",
    "fsdp2": "FSDP2",
    "deepspeed_zero2": "DeepSpeed ZeRO-2",
    "deepspeed_zero3": "DeepSpeed ZeRO-3",
}
"""Engines by the names of their files in configs/accelerate."""
_FSDP = {
    "FSDP_VERSION": ("2", "fsdp_version"),
    "FSDP_RESHARD_AFTER_FORWARD": ("false", "fsdp_reshard_after_forward"),
    "FSDP_AUTO_WRAP_POLICY": ("NO_WRAP", "fsdp_auto_wrap_policy"),
    "FSDP_OFFLOAD_PARAMS": ("false", "fsdp_offload_params"),
    "FSDP_ACTIVATION_CHECKPOINTING": ("false", "fsdp_activation_checkpointing"),
    "FSDP_CPU_RAM_EFFICIENT_LOADING": ("false", "fsdp_cpu_ram_efficient_loading"),
}
_DEEPSPEED = {
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": ("none", "offload_optimizer_device"),
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": ("none", "offload_param_device"),
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": ("false", "zero3_init_flag"),
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": ("none", "deepspeed_config_file"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ("1", "gradient_accumulation_steps"),
    "ACCELERATE_GRADIENT_CLIPPING": ("none", "gradient_clipping"),
}
"""Variables of `accelerate launch`: the value that is done here, and the key that sets it in an accelerate config."""
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


def make_engine(accelerator: Accelerator, mixed_precision: str) -> Engine:
    """The engine that an accelerator was launched for; it is not prepared yet.

    Args:
        mixed_precision: the one that the accelerator was made with.
    """
    bf16 = mixed_precision == "bf16"
    if accelerator.distributed_type == DistributedType.FSDP:
        from eagle3.train.engines.fsdp2 import FullySharded  # loads torch's sharding, which takes a second

        return FullySharded(accelerator, bf16)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return Zero(accelerator, bf16, int(accelerator.state.deepspeed_plugin.zero_stage))
    return Replicated(accelerator, bf16)


def describe(engine: Engine, accelerator: Accelerator) -> list[str]:
    """Lines that say which engine, processes, device and precision are active."""
    precision = "bf16 autocast, float32 weights" if engine.bf16 else "float32"
    lines = [
        f"engine: {_NAMES[engine.active()]} ({accelerator.distributed_type.value}), {accelerator.num_processes} "
        f"process(es), device {accelerator.device.type}, {precision}"
    ]
    if engine.bf16 and accelerator.device.type == "cpu":
        lines.append("note: on a CPU mixed_precision=no is usually faster than bf16")
    return lines


def check_active(engine: Engine) -> list[Problem]:
    """Finds a prepared engine that is not what it was to be."""
    if (active := engine.active()) == engine.name:
        return []
    fix = "install the versions of torch, accelerate and deepspeed that docs/training.md names"
    return [Problem("accelerate", "train.engine", f"was to run {engine.name} and runs {active}", fix)]


def check_environment(
    environment: Mapping[str, str], mixed_precision: str, gpu: bool | None = None, deepspeed: bool | None = None
) -> list[Problem]:
    """What `accelerate launch` asks for in the environment and this trainer does not do.

    Args:
        gpu: whether there is one; default: asks torch.
        deepspeed: whether it is installed; default: looks.
    """
    gpu = torch.cuda.is_available() if gpu is None else gpu
    installed = importlib.util.find_spec("deepspeed") is not None if deepspeed is None else deepspeed
    problems = [
        _engine_problem("accelerate config", f"asks for {name}")
        for key, name in _REFUSED.items()
        if _on(environment, key)
    ]
    for engine in asked_for(environment):
        if not gpu:
            problems.append(_no_gpu("accelerate config", engine))
        elif engine == DistributedType.FSDP.value:
            problems += _other_settings({"FSDP_VERSION": "1", **environment}, _FSDP)
        else:
            problems += _deepspeed_problems(environment, installed)
    if environment.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no":
        message = f"asks for torch.compile ({environment['ACCELERATE_DYNAMO_BACKEND']}), which is not supported"
        problems.append(Problem("accelerate config", "train.engine", message, "set dynamo_backend to no"))
    asked_precision = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    if asked_precision not in ("no", mixed_precision):
        message = f"mixed precision is {asked_precision} there and {mixed_precision} in the training config"
        problems.append(
            Problem("accelerate config", "train.precision", message, "set mixed_precision in the training config only")
        )
    return problems


def asked_for(environment: Mapping[str, str]) -> list[str]:
    """The engines that shard which the environment asks for: `FSDP`, `DEEPSPEED`."""
    return [engine for engine, key in _SHARDED.items() if _on(environment, key)]


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
    if request.engine in _SHARDED:
        if not _on(environment, _SHARDED[request.engine]):
            problems.append(_no_gpu("accelerate launch", request.engine))
    elif request.engine is not None and request.engine not in _REPLICATED:
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
    active = accelerator.distributed_type.value
    asked = asked_for(environment)
    if active not in (*_REPLICATED, *_SHARDED):
        problems.append(_engine_problem("accelerate", f"runs {active}"))
    elif (active in _SHARDED or asked) and asked != [active]:
        message = f"was asked for {' and '.join(asked) or 'no sharding'} and runs {active}"
        problems.append(_engine_problem("accelerate", message))
    started = int(environment.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != started:
        message = f"{started} processes were started and Accelerate joined {accelerator.num_processes}"
        fix = "unset ACCELERATE_* variables left over from another launch, or start with torchrun"
        problems.append(Problem("accelerate", "train.processes", message, fix))
    return problems


def _engine_problem(where: str, found: str) -> Problem:
    message = f"{found}; this version runs one process, DDP, FSDP2 and DeepSpeed's ZeRO-2 and ZeRO-3"
    return Problem(where, "train.engine", message, "launch with a file of configs/accelerate")


def _deepspeed_problems(environment: Mapping[str, str], installed: bool) -> list[Problem]:
    problems = _other_settings(environment, _DEEPSPEED)
    if (stage := environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")) not in ("2", "3"):
        fix = "set zero_stage to 2 or 3, or launch with configs/accelerate/ddp.yaml"
        problems.append(Problem("accelerate config", "train.engine", f"zero_stage is {stage}, expected 2 or 3", fix))
    if not installed:
        message = "asks for DeepSpeed, which is not installed"
        problems.append(Problem("accelerate config", "train.engine", message, "pip install 'eagle3[deepspeed]'"))
    if "WORLD_SIZE" not in environment:
        message = "asks for DeepSpeed, but no launcher started this process"
        problems.append(Problem("accelerate config", "train.engine", message, "use accelerate launch or torchrun"))
    return problems


def _no_gpu(where: str, engine: str) -> Problem:
    """On a CPU Accelerate drops these engines without a word: it would train, but otherwise than asked."""
    message = (
        f"asks for {engine}, which Accelerate drops on a CPU and then trains otherwise; this version needs GPUs for it"
    )
    fix = "launch on GPUs without --cpu, or with configs/accelerate/single.yaml or configs/accelerate/ddp.yaml"
    return Problem(where, "train.engine", message, fix)


def _other_settings(environment: Mapping[str, str], settings: Mapping[str, tuple[str, str]]) -> list[Problem]:
    return [
        Problem("accelerate config", "train.engine", f"{key} is {found}, expected {wanted}", f"set {key}: {wanted}")
        for variable, (wanted, key) in settings.items()
        if (found := environment.get(variable, wanted)).lower() != wanted.lower()
    ]


def _on(environment: Mapping[str, str], key: str) -> bool:
    return environment.get(key, "false").lower() == "true"


def _parent_command_line() -> list[str]:
    try:
        parent = psutil.Process().parent()
        return [] if parent is None else parent.cmdline()
    except psutil.Error:
        return []
