"""Stochastic rounding (arXiv 1502.02551) of AdamW's moments, in plain torch: the definition that the kernel follows.

A moment changes by a small share of itself at a step. Rounded to nearest it would stop moving as soon as that share is
under half a spacing of its type; rounded up with a probability equal to the distance from the value below, it is right
in the mean. The random bits are a function of step, parameter and element alone, so a resumed run and every rank of a
data-parallel one round alike, and there is no generator whose state could be lost.

float8_e4m3fn has levels 2^-9 apart up to 2^-6, then eight in each power of two, up to 448. A block's scale is the
least power of two that brings its largest magnitude to 448 or below, so that scaling rounds nothing and a scale that
changes keeps most levels where they were. The second moment is stored as its square root and rounded between the
squares of the levels, so that the second moment itself, not its root, is right in the mean; where it is not zero its
root is never rounded to zero, since a step divides by it.

NaN and infinite moments become NaN in float8 and spoil no other element.

Legend: N elements, B blocks of 256.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import torch
from torch import Tensor

_INFINITE = 0x7F800000  # bits of float32 infinity; greater magnitudes are NaN
_LARGEST_BFLOAT16 = 0x7F7F
_NAN = 0x7F
_BIAS = 2.0**120
"""Between the exponent biases of float32 and e4m3. Divided by it, a number's float32 bits are its e4m3 code and 20 bits
more, and what is subnormal in one type is so in the other."""


def make_keys(step: int, number: int) -> tuple[int, int]:
    """The two keys of `random_bits` for a parameter's number and step; signed 32-bit, as kernels take integers."""
    first, second = struct.unpack("<ii", hashlib.blake2b(struct.pack("<qq", step, number), digest_size=8).digest())
    return first, second


def random_bits(begin: int, count: int, keys: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Random 16-bit numbers of elements `begin` to `begin + count`, for the first and the second moment.

    A 32-bit hash of the element's number: three rounds of xor-shift and multiplication with the constants of `triple32`
    (github.com/skeeto/hash-prospector), the second key after the first of them. Elements beyond 2^32 have another
    second key. Two rounds were not enough: neighbours, and elements 2^32 apart, were not independent.

    Returns:
        int32 [count] each, 0 to 65535.
    """
    index = np.arange(begin, begin + count, dtype=np.uint64)
    high = (index >> np.uint64(32)).astype(np.uint32)
    first, second = (np.uint32(key & 0xFFFFFFFF) for key in keys)
    bits = index.astype(np.uint32) + first
    bits ^= bits >> np.uint32(17)
    bits *= np.uint32(0xED5AD4BB)
    bits ^= bits >> np.uint32(11)
    bits += second + high * np.uint32(0x9E3779B1)
    bits *= np.uint32(0xAC4C1B51)
    bits ^= bits >> np.uint32(15)
    bits *= np.uint32(0x31848BAB)
    bits ^= bits >> np.uint32(14)
    low, top = bits & np.uint32(0xFFFF), bits >> np.uint32(16)
    return torch.from_numpy(low.astype(np.int32)), torch.from_numpy(top.astype(np.int32))


def to_bfloat16(value: Tensor, random: Tensor) -> Tensor:
    """Rounds float32 [N] to bfloat16; finite values beyond its range become its largest."""
    bits = value.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    rounded = ((magnitude + random) >> 16).clamp(max=_LARGEST_BFLOAT16)
    special = (magnitude >> 16) | ((magnitude > _INFINITE) << 6)
    rounded = torch.where(magnitude < _INFINITE, rounded, special) | ((bits >> 16) & 0x8000)
    return rounded.to(torch.int16).view(torch.bfloat16)


def to_float8(value: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds float32 [B, 256]; the first moment. Beyond 3.1e38 it may become infinite.

    Returns:
        (float8_e4m3fn [B, 256], float32 scales [B]).
    """
    bits = value.view(torch.int32)
    scale, inverse, finite = _scales(bits & 0x7FFFFFFF)
    scaled = (value.abs() * inverse / _BIAS).view(torch.int32)
    code = (scaled + (random << 4) + 8) >> 20
    return _as_float8(torch.where(finite, code | ((bits >> 24) & 0x80), _NAN)), scale


def root_to_float8(square: Tensor, root: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds the roots of `square` >= 0, both float32 [B, 256], so that their squares are right in the mean.

    Returns:
        (float8_e4m3fn [B, 256], float32 scales [B]).
    """
    scale, inverse, finite = _scales(root.view(torch.int32))
    code = (root * inverse / _BIAS).view(torch.int32) >> 20
    low, high = ((level << 20).view(torch.float32) * _BIAS for level in (code, code + 1))
    chance = (random.float() + 0.5) * 2.0**-16
    up = chance * (high * high - low * low) < square * inverse * inverse - low * low
    code = code + up
    code = torch.where(square > 0, code.clamp(min=1), code)
    return _as_float8(torch.where(finite, code, _NAN)), scale


def from_float8(value: Tensor, scale: Tensor) -> Tensor:
    """float32 [B, 256] of float8_e4m3fn [B, 256] and scales [B]."""
    return value.float() * scale[:, None]


def _scales(magnitude: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(scales [B], their inverses [B, 1], which elements are finite) of float32 bits without sign."""
    finite = magnitude < _INFINITE
    largest = torch.where(finite, magnitude, 0).amax(1, keepdim=True)
    exponent = (((largest + 0x1FFFFF) >> 23) - 8).clamp(min=1)  # 448 is 1.75 * 2^8
    scale, inverse = (exponent << 23).view(torch.float32), ((254 - exponent) << 23).view(torch.float32)
    return scale[:, 0], inverse, finite


def _as_float8(code: Tensor) -> Tensor:
    return code.to(torch.uint8).view(torch.float8_e4m3fn)
