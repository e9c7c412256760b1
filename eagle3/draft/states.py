"""Hidden states in eight bits: float8 e4m3 values and one scale for each row of a slot.

Scales are powers of two, so that `value * scale` is exact in bfloat16 and float32: every reader gets the same number,
whatever it computes in. Rounding changes a value by 1/16 of it at most, and a row by about 2.6% of its norm.

Legend: N rows, H width of a slot.
"""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
_LARGEST = 448.0  # of e4m3
_LEAST_EXPONENT = -126  # float32's scales stay normal numbers
_TOO_LARGE = 248 * 2.0**120  # would be rounded to 2^128, which float32 does not hold


def quantize(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [.., H] -> values float8_e4m3fn [.., H] and scales float32 [..], on the same device.

    The scale is the least power of two that brings the row's largest magnitude to 448 or less; 1 for a row of zeros;
    NaN for a row with NaN, infinity or what would be rounded to infinity (from 3.29e38 on).
    """
    wide = states.float()
    largest = wide.abs().amax(-1)
    mantissa, exponent = torch.frexp(largest / _LARGEST)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(min=_LEAST_EXPONENT)
    scales = ((exponent + 127) << 23).view(torch.float32)  # the bits of 2^exponent
    scales = torch.where(largest == 0, 1.0, scales).masked_fill(~(largest < _TOO_LARGE), torch.nan)
    return (wide / scales[..., None]).to(FP8), scales


def dequantize(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The states [.., H] of values [.., H] and scales [..]; exact in bfloat16 and float32."""
    return (values.float() * scales[..., None]).to(dtype)


def rounded(states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows [.., H] as a store of that type gives them back, in float32; an fp8 store is given bfloat16."""
    if dtype == FP8:
        return dequantize(*quantize(states.bfloat16()), dtype=torch.float32)
    return states.to(dtype).float()


def can_hold(states: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a store of that type gives finite numbers for all of these."""
    if dtype == FP8:
        return bool((states.bfloat16().abs() < _TOO_LARGE).all())
    return bool(torch.isfinite(states.to(dtype)).all())


def are_scales(scales: torch.Tensor) -> bool:
    """Whether all are powers of two, as `quantize` makes them."""
    mantissa, _ = torch.frexp(scales)
    return bool((mantissa == 0.5).all())


def has_nan(values: torch.Tensor) -> bool:
    """Whether a float8_e4m3fn tensor holds NaN (there is no infinity in it)."""
    return bool((values.view(torch.uint8) & 0x7F == 0x7F).any())
