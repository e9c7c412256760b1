"""What engines that shard have in common."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from eagle3.config import OptimSection
from eagle3.errors import problem_error


def refuse_whole_parameters(engine: str, optim: OptimSection) -> None:
    """Refuses what goes by whole parameters: moments in 16 or 8 bits are laid out, scaled and rounded by place in them,
    and Muon's step is of all of a matrix.

    Raises:
        ProblemsError: kinds `train.engine_moments`, `train.engine_optimizer`.
    """
    ddp = "launch with configs/accelerate/ddp.yaml"
    if optim.name == "muon":
        message = f"optim.name is muon, whose step takes a whole matrix at once, and {engine} has shards"
        raise problem_error("training config", "train.engine_optimizer", message, f"set optim.name to adamw, or {ddp}")
    if optim.moments != "float32":
        message = (
            f"optim.moments is {optim.moments}, whose blocks and rounding go by whole parameters, and {engine} has "
            "shards"
        )
        fix = f"set optim.moments to float32, or {ddp}"
        raise problem_error("training config", "train.engine_moments", message, fix)


def bf16_autocast(device: torch.device, wanted: bool) -> AbstractContextManager[Any]:
    """Autocast to bfloat16, or nothing."""
    return torch.autocast(device.type, torch.bfloat16) if wanted else nullcontext()


def on_main(accelerator: Accelerator, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Takes tensors one at a time, on every process, and keeps copies in the main process's memory."""
    kept = {}
    for name, value in tensors:
        if accelerator.is_main_process:
            kept[name] = value.detach().to("cpu", copy=True)
    return kept
