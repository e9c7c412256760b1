"""Whether a drafter's products can be made in float8 here."""

from __future__ import annotations

import torch

from eagle3.draft.config import DraftConfig
from eagle3.draft.fused.quantized import MULTIPLE
from eagle3.errors import Problem

_LEAST_CAPABILITY = (8, 9)


def check_float8(
    config: DraftConfig, mixed_precision: str, device: torch.device, capability: tuple[int, int] | None = None
) -> list[Problem]:
    """Finds what stands against `ttt.float8`.

    Args:
        config: the drafter's shape.
        mixed_precision: the run's.
        device: it trains on; a CPU rounds as a GPU would, but is slower than without.
        capability: of that GPU; default: asked for.
    """
    widths = {
        "draft.draft_vocab_size": config.draft_vocab_size,
        "hidden_size": config.hidden_size,
        "draft.intermediate_size": config.intermediate_size,
        "draft.num_attention_heads x draft.head_dim": config.num_attention_heads * config.head_dim,
        "draft.num_key_value_heads x draft.head_dim": config.num_key_value_heads * config.head_dim,
    }
    problems = [
        Problem("ttt.float8", "train.float8", f"{name} is {value}, no multiple of {MULTIPLE}", "change it, or leave "
                "float8 out")
        for name, value in widths.items()
        if value % MULTIPLE
    ]  # fmt: skip
    if device.type != "cuda":
        return problems
    if mixed_precision != "bf16":
        message = f"mixed_precision is {mixed_precision}: on a GPU float8 stands in for bfloat16's products only"
        problems.append(Problem("ttt.float8", "train.float8", message, "set mixed_precision to bf16, or leave it out"))
    found = capability or torch.cuda.get_device_capability(device)
    if found < _LEAST_CAPABILITY:
        message = f"the GPU's compute capability is {found[0]}.{found[1]}, float8 needs 8.9 (Ada, Hopper) or later"
        problems.append(Problem("ttt.float8", "train.float8", message, "leave float8 out"))
    return problems
