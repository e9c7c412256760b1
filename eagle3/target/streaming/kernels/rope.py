"""Rotary embedding of multi-head latent attention: interleaved pairs in, halves out (arXiv 2104.09864, DeepSeek-V3).

Legend: T tokens, N heads, R rotary width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def rotate_pairs(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates [T, N, R] in place: pair (2i, 2i + 1) by angle i, the results at i and R / 2 + i.

    Args:
        states: any strides, the last 1.
        cos, sin: [T, >= R / 2], contiguous rows; only the first R / 2 angles are read.
    """
    tokens, heads, width = states.shape
    assert states.stride(2) == 1
    block = triton.next_power_of_2(heads)
    _rotate[(tokens,)](
        states, cos, sin, states.stride(0), states.stride(1), cos.stride(0), heads, block, width // 2
    )  # fmt: skip


@triton.jit
def _rotate(states, cos, sin, token_stride, head_stride, angle_stride, heads, block: tl.constexpr, half: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, block)
    pair = tl.arange(0, half)
    inside = (head < heads)[:, None]
    row = states + token * token_stride + head[:, None] * head_stride
    even = tl.load(row + 2 * pair[None, :], mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(row + 2 * pair[None, :] + 1, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + token * angle_stride + pair)[None, :].to(tl.float32)
    s = tl.load(sin + token * angle_stride + pair)[None, :].to(tl.float32)
    tl.debug_barrier()
    tl.store(row + pair[None, :], (even * c - odd * s).to(states.dtype.element_ty), mask=inside)
    tl.store(row + half + pair[None, :], (odd * c + even * s).to(states.dtype.element_ty), mask=inside)
