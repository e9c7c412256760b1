"""One step of `RoundedAdamW` in one pass: reads gradient, weight and moments, writes weight and moments.

It computes what `plain_step` does, operation by operation and without fused multiply-adds, so the results are equal
bit for bit.

Legend: R blocks of a program, 256 elements in a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from eagle3.train.moments import BLOCK

if TYPE_CHECKING:
    from eagle3.train.rounded_adamw import Coefficients

ROWS = 4
"""Blocks of a program; a parameter of whole programs is read without a mask, which lets loads be wide."""
_WARPS = 4


def fused_step(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    state: dict[str, torch.Tensor],
    by: Coefficients,
    keys: tuple[int, int],
) -> None:
    """As `plain_step`, for moments in bfloat16 or float8."""
    eight = state["exp_avg"].dtype == torch.float8_e4m3fn
    stored = torch.uint8 if eight else torch.int16
    first, second = (state[name].view(stored) for name in ("exp_avg", "exp_avg_sq_root" if eight else "exp_avg_sq"))
    scales = (state[f"{name}_scale"] if eight else weight for name in ("exp_avg", "exp_avg_sq_root"))
    count = weight.numel()
    with torch.cuda.device_of(weight):
        _step[(triton.cdiv(count, ROWS * BLOCK),)](
            weight, gradient, first, second, *scales, count, *keys,
            by.decay, by.beta1, by.rest1, by.beta2, by.rest2, by.size, by.correction, by.eps,
            count % (ROWS * BLOCK) == 0, eight, ROWS, BLOCK, num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["count", "key", "salt"])
def _step(
    weight, gradient, first, second, first_scale, second_scale, count, key, salt,
    decay, beta1, rest1, beta2, rest2, size, correction, eps,
    even: tl.constexpr, eight: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * rows
    begin = row * block
    row_lane = tl.arange(0, rows)
    lane = row_lane[:, None] * block + tl.arange(0, block)[None, :]
    inside = (lane < count - begin) | even
    row_inside = row_lane * block < count - begin
    slope = tl.load(gradient + begin + lane, mask=inside, other=0.0)
    value = tl.load(weight + begin + lane, mask=inside, other=0.0)
    old_first = tl.load(first + begin + lane, mask=inside, other=0).to(tl.int32)
    old_second = tl.load(second + begin + lane, mask=inside, other=0).to(tl.int32)
    if eight:
        first_scales = first_scale + row + row_lane
        second_scales = second_scale + row + row_lane
        m = _float8_value(old_first) * tl.load(first_scales, mask=row_inside, other=0.0)[:, None]
        s = _float8_value(old_second) * tl.load(second_scales, mask=row_inside, other=0.0)[:, None]
        v = s * s
    else:
        m = (old_first << 16).to(tl.float32, bitcast=True)
        v = (old_second << 16).to(tl.float32, bitcast=True)
    m = m * beta1 + slope * rest1
    v = v * beta2 + slope * slope * rest2
    v = tl.where(v > 3.4028234663852886e38, 3.4028234663852886e38, v)
    s = tl.sqrt_rn(v)
    value = value * decay - tl.div_rn(m, s * correction + eps) * size
    tl.store(weight + begin + lane, value, mask=inside)

    bits = _random_bits(begin, lane, key, salt)
    low = (bits & 0xFFFF).to(tl.int32)
    top = (bits >> 16).to(tl.int32)
    if eight:
        m_code, m_scale = _to_float8(m, low)
        s_code, s_scale = _root_to_float8(v, s, top)
        tl.store(first_scales, m_scale, mask=row_inside)
        tl.store(second_scales, s_scale, mask=row_inside)
    else:
        m_code = _to_bfloat16(m, low)
        s_code = _to_bfloat16(v, top)
    tl.store(first + begin + lane, m_code.to(first.dtype.element_ty), mask=inside)
    tl.store(second + begin + lane, s_code.to(second.dtype.element_ty), mask=inside)


@triton.jit
def _random_bits(begin, lane, key, salt):
    """As `random_bits`; a program's elements never straddle a multiple of 2^32."""
    bits = (begin & 0xFFFFFFFF).to(tl.uint32) + lane.to(tl.uint32) + key.to(tl.uint32, bitcast=True)
    bits ^= bits >> 17
    bits *= 0xED5AD4BB
    bits ^= bits >> 11
    bits += salt.to(tl.uint32, bitcast=True) + (begin >> 32).to(tl.uint32) * 0x9E3779B1
    bits *= 0xAC4C1B51
    bits ^= bits >> 15
    bits *= 0x31848BAB
    bits ^= bits >> 14
    return bits


@triton.jit
def _to_bfloat16(value, random):
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded = tl.minimum((magnitude + random) >> 16, 0x7F7F)
    special = (magnitude >> 16) | ((magnitude > 0x7F800000).to(tl.int32) << 6)
    return tl.where(magnitude < 0x7F800000, rounded, special) | ((bits >> 16) & 0x8000)


@triton.jit
def _float8_value(code):
    """float32 of float8_e4m3fn codes 0 to 255."""
    value = (((code & 0x7F) << 20) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True) * 1.3292279957849159e36
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def _scales(magnitude):
    finite = magnitude < 0x7F800000
    largest = tl.max(tl.where(finite, magnitude, 0), axis=1)
    exponent = tl.maximum(((largest + 0x1FFFFF) >> 23) - 8, 1)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return scale, inverse[:, None], finite


@triton.jit
def _to_float8(value, random):
    bits = value.to(tl.int32, bitcast=True)
    scale, inverse, finite = _scales(bits & 0x7FFFFFFF)
    scaled = (tl.abs(value) * inverse * 7.52316384526264e-37).to(tl.int32, bitcast=True)
    code = (scaled + (random << 4) + 8) >> 20
    return tl.where(finite, code | ((bits >> 24) & 0x80), 0x7F), scale


@triton.jit
def _root_to_float8(square, root, random):
    scale, inverse, finite = _scales(root.to(tl.int32, bitcast=True))
    code = (root * inverse * 7.52316384526264e-37).to(tl.int32, bitcast=True) >> 20
    low = (code << 20).to(tl.float32, bitcast=True) * 1.3292279957849159e36
    high = ((code + 1) << 20).to(tl.float32, bitcast=True) * 1.3292279957849159e36
    chance = (random.to(tl.float32) + 0.5) * 0.0000152587890625
    up = chance * (high * high - low * low) < square * inverse * inverse - low * low
    code += up.to(tl.int32)
    code = tl.where(square > 0, tl.maximum(code, 1), code)
    return tl.where(finite, code, 0x7F), scale
