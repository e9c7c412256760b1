"""How AdamW's two moments (arXiv 1711.05101) and Muon's momentum are stored, and what that takes.

`float32` is torch's own. In `bfloat16` both moments are rounded to bfloat16. In `float8` they are float8_e4m3fn with a
scale for each block of 256 elements in memory order (block-wise, as in arXiv 2110.02861), and of the second moment its
square root is stored, whose range is half as wide in powers of two. Vectors (norms) and matrices of fewer than 4096
elements keep float32 moments. `eagle3.train.rounding` says how values are rounded. With `muon`, the matrices that it
steps have one float32 momentum, and the other parameters AdamW's moments in float32.
"""

from __future__ import annotations

from math import prod

import torch
from torch import nn

from eagle3.config import MomentKind, Moments

BLOCK = 256
"""Elements that share a scale in `float8`; the last block of a tensor may be shorter."""
SMALL = 4096
"""Matrices of fewer elements keep float32 moments, as vectors do."""

Layout = dict[str, tuple[torch.Size, torch.dtype]]


def moment_layout(shape: torch.Size, moments: Moments) -> Layout:
    """Name, shape and type of every moment tensor of a parameter of this shape, the step count not among them."""
    if moments == "float32" or len(shape) < 2 or shape.numel() < SMALL:
        return {name: (shape, torch.float32) for name in ("exp_avg", "exp_avg_sq")}
    if moments == "bfloat16":
        return {name: (shape, torch.bfloat16) for name in ("exp_avg", "exp_avg_sq")}
    scales = torch.Size([-(-shape.numel() // BLOCK)])
    layout: Layout = {}
    for name in ("exp_avg", "exp_avg_sq_root"):
        layout[name] = (shape, torch.float8_e4m3fn)
        layout[f"{name}_scale"] = (scales, torch.float32)
    return layout


def is_muons(name: str, shape: torch.Size) -> bool:
    """Whether Muon steps a drafter's parameter: a matrix of the decoder layer (see `eagle3.train.muon`)."""
    return "midlayer" in name.split(".") and len(shape) == 2


def state_layout(name: str, shape: torch.Size, kind: MomentKind) -> Layout:
    """As `moment_layout`, of a parameter by its name, AdamW's step count included."""
    if kind == "muon" and is_muons(name, shape):
        return {"momentum_buffer": (shape, torch.float32)}
    return {"step": (torch.Size(), torch.float32), **moment_layout(shape, "float32" if kind == "muon" else kind)}


def moment_bytes(model: nn.Module, kind: MomentKind) -> int:
    """Bytes of what the optimizer keeps of a model's trainable parameters, scales included, step counts not."""
    layouts = [state_layout(name, value.shape, kind) for name, value in model.named_parameters() if value.requires_grad]
    forms = [form for layout in layouts for moment, form in layout.items() if moment != "step"]
    return sum(prod(shape) * dtype.itemsize for shape, dtype in forms)
