"""The optimizer and its learning rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from eagle3.config import OptimSection
from eagle3.train.moments import is_muons
from eagle3.train.muon import MuonAndAdamW
from eagle3.train.rounded_adamw import RoundedAdamW


def make_optimizer(model: nn.Module, optim: OptimSection, fused: bool) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters, or Muon over the layer's matrices and AdamW over the others; weight decay on
    matrices only (not on norms).

    Args:
        fused: of torch's AdamW, which float32 moments take.
    """
    muon = optim.name == "muon"
    trainable = [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not (muon and is_muons(name, parameter.shape))
    ]
    matrices = [parameter for parameter in trainable if parameter.ndim >= 2]
    others = [parameter for parameter in trainable if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if muon:
        return MuonAndAdamW(model, optim, groups, fused)
    rate, betas, eps = optim.learning_rate, optim.betas, optim.eps
    if optim.moments == "float32":
        return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=eps, fused=fused)
    return RoundedAdamW(groups, rate, betas, eps, optim.weight_decay, optim.moments)


def learning_rate(step: int, total_steps: int, optim: OptimSection) -> float:
    """Learning rate of step `step`, counted from 1 to `total_steps`.

    It rises linearly to the peak, which the last warm-up step has, and then follows the schedule, whose end value
    (`final_fraction` of the peak) step `total_steps` has and no step before it.
    """
    assert 1 <= step <= total_steps
    warmup_steps = int(optim.warmup_fraction * total_steps)
    if step <= warmup_steps:
        return optim.learning_rate * step / warmup_steps
    done = (step - warmup_steps) / (total_steps - warmup_steps)
    left = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}[optim.schedule]
    share = left if optim.schedule == "constant" else optim.final_fraction + (1.0 - optim.final_fraction) * left
    return optim.learning_rate * share


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Gives every parameter group this learning rate, times its own factor if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = value * group.get("rate_factor", 1.0)


def clip_and_step(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    rate: float,
    max_norm: float,
    check: Callable[[float], None],
) -> float:
    """Clips the gradients, whole or in shards, by their global norm, steps at this learning rate and clears them.

    Args:
        check: gets the norm before clipping and raises if it is not finite; then no weight has changed.

    Returns:
        That norm.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    found = torch.nn.utils.clip_grad_norm_(trained, max_norm)
    norm = float(found.full_tensor() if hasattr(found, "full_tensor") else found)  # of FSDP2's shards, a DTensor
    check(norm)
    set_learning_rate(optimizer, rate)
    optimizer.step()
    optimizer.zero_grad()
    return norm
