"""How AdamW's two moments (arXiv 1711.05101) are stored, and what that takes.

`float32` is torch's own. In `bfloat16` both moments are rounded to bfloat16. In `float8` they are float8_e4m3fn with a
scale for each block of 256 elements in memory order (block-wise, as in arXiv 2110.02861), and of the second moment its
square root is stored, whose range is half as wide in powers of two. Vectors (norms) and matrices of fewer than 4096
elements keep float32 moments. `eagle3.train.rounding` says how values are rounded.
"""

from __future__ import annotations

from math import prod

import torch
from torch import nn

from eagle3.config import Moments

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


def moment_bytes(model: nn.Module, moments: Moments) -> int:
    """Bytes of the moments of a model's trainable parameters, scales included."""
    layouts = [moment_layout(parameter.shape, moments) for parameter in model.parameters() if parameter.requires_grad]
    return sum(prod(shape) * dtype.itemsize for layout in layouts for shape, dtype in layout.values())
