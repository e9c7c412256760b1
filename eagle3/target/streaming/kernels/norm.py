"""Root-mean-square norm in one pass, arXiv 1910.07467.

Legend: T tokens, H width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def rms_norm(states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight * (states / rms), in float32 and rounded before the product, as Transformers does.

    Args:
        states: [..., H]; the rows (all leading dimensions) must lie evenly apart.
        weight: [H].
        eps: added to the mean square.
    """
    width = states.shape[-1]
    rows = states.reshape(-1, width)
    out = torch.empty(states.shape, dtype=states.dtype, device=states.device)
    block = triton.next_power_of_2(width)
    warps = 8 if block >= 4096 else 4
    _rms_norm[(len(rows),)](rows, weight, out, rows.stride(0), width, eps, block, num_warps=warps)
    return out


@triton.jit
def _rms_norm(states, weight, out, stride, width, eps, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < width
    value = tl.load(states + row * stride + column, mask=inside, other=0.0)
    wide = value.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    normed = (wide * factor).to(value.dtype)
    scale = tl.load(weight + column, mask=inside, other=0.0)
    result = normed.to(tl.float32) * scale.to(tl.float32)
    tl.store(out + row * width + column, result.to(value.dtype), mask=inside)
