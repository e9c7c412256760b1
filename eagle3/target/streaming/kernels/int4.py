"""Unpacking of compressed-tensors INT4 (`pack-quantized`, symmetric): nibbles hold q + 8, lowest nibble first.

Legend: R rows, W packed words of a row (8 values each), G words that share a scale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


def unpack_int4(packed: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    """Writes `(nibble - 8) * scale`, rounded once.

    Args:
        packed: int32 [R, W], contiguous.
        scale: [R, W // G], contiguous.
        out: [R, 8 * W], contiguous.
    """
    words = packed.numel()
    group = words // scale.numel()
    _unpack[(triton.cdiv(words, _BLOCK),)](packed, scale, out, words, group, _BLOCK)


@triton.jit
def _unpack(packed, scale, out, words, group: tl.constexpr, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < words
    word = tl.load(packed + at, mask=inside, other=0)
    factor = tl.load(scale + at // group, mask=inside, other=0.0).to(tl.float32)
    place = tl.arange(0, 8)
    nibble = (word[:, None] >> (place * 4)[None, :]) & 15
    value = (nibble - 8).to(tl.float32) * factor[:, None]
    target = at[:, None] * 8 + place[None, :]
    tl.store(out + target, value.to(out.dtype.element_ty), mask=inside[:, None])
