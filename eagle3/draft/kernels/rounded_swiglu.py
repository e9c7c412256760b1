"""SwiGLU (arXiv 2002.05202) and its gradients, rounded by rows to float8 as they are made.

A row is computed twice, for its greatest value and to be rounded, and read from the cache the second time.

Legend: R rows, W width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from eagle3.draft.fused.quantized import LARGEST_EXPONENT, ROUND_UP, SMALLEST_PEAK, Quantized
from eagle3.draft.kernels.pointwise import swiglu_at, swiglu_grads_at
from eagle3.draft.kernels.quantize import scale_and_inverse

_BLOCK, _GRAD_BLOCK = 8192, 4096
_WARPS = 8


def swiglu_rounded(gate: torch.Tensor, up: torch.Tensor, out: Quantized) -> Quantized:
    """As `plain.swiglu_rounded`; all contiguous. The scales are twice in memory, as in `quantize_rows`."""
    rows, width = gate.shape
    scales = torch.empty_like(out.scales)
    if rows:
        block = min(_BLOCK, triton.next_power_of_2(width))
        _swiglu_rounded[(rows,)](
            gate, up, out.values, out.scales, scales, width, ROUND_UP, LARGEST_EXPONENT, SMALLEST_PEAK, block,
            num_warps=_WARPS,
        )  # fmt: skip
    return Quantized(out.values, scales)


def swiglu_grad_rounded(
    gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor, gate_out: Quantized, up_out: Quantized
) -> tuple[Quantized, Quantized]:
    """As `plain.swiglu_grad_rounded`; see `swiglu_rounded`."""
    rows, width = gate.shape
    gate_scales, up_scales = torch.empty_like(gate_out.scales), torch.empty_like(up_out.scales)
    if rows:
        block = min(_GRAD_BLOCK, triton.next_power_of_2(width))
        _swiglu_grad_rounded[(rows,)](
            gate, up, grad, gate_out.values, up_out.values, gate_out.scales, up_out.scales, gate_scales, up_scales,
            width, ROUND_UP, LARGEST_EXPONENT, SMALLEST_PEAK, block, num_warps=_WARPS,
        )  # fmt: skip
    return Quantized(gate_out.values, gate_scales), Quantized(up_out.values, up_scales)


@triton.jit
def _swiglu_rounded(
    gate, up, values, kept_scales, scales,
    width: tl.constexpr, round_up: tl.constexpr, largest: tl.constexpr, smallest: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    begin = row * width
    lane = tl.arange(0, block)
    peak = tl.zeros((block,), tl.float32)
    for first in range(0, width, block):
        inside = first + lane < width
        peak = tl.maximum(peak, tl.abs(swiglu_at(gate, up, begin + first + lane, inside)))
    scale, inverse = scale_and_inverse(tl.max(peak, axis=0), round_up, largest, smallest)
    for first in range(0, width, block):
        inside = first + lane < width
        value = swiglu_at(gate, up, begin + first + lane, inside) * inverse
        tl.store(values + begin + first + lane, value.to(values.dtype.element_ty), mask=inside)
    tl.store(kept_scales + row, scale)
    tl.store(scales + row, scale)


@triton.jit
def _swiglu_grad_rounded(
    gate, up, grad, gate_values, up_values, kept_gate_scales, kept_up_scales, gate_scales, up_scales,
    width: tl.constexpr, round_up: tl.constexpr, largest: tl.constexpr, smallest: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    begin = row * width
    lane = tl.arange(0, block)
    gate_peak = tl.zeros((block,), tl.float32)
    up_peak = tl.zeros((block,), tl.float32)
    for first in range(0, width, block):
        inside = first + lane < width
        gates, ups = swiglu_grads_at(gate, up, grad, begin + first + lane, inside)
        gate_peak = tl.maximum(gate_peak, tl.abs(gates))
        up_peak = tl.maximum(up_peak, tl.abs(ups))
    gate_scale, gate_inverse = scale_and_inverse(tl.max(gate_peak, axis=0), round_up, largest, smallest)
    up_scale, up_inverse = scale_and_inverse(tl.max(up_peak, axis=0), round_up, largest, smallest)
    for first in range(0, width, block):
        inside = first + lane < width
        at = begin + first + lane
        gates, ups = swiglu_grads_at(gate, up, grad, at, inside)
        tl.store(gate_values + at, (gates * gate_inverse).to(gate_values.dtype.element_ty), mask=inside)
        tl.store(up_values + at, (ups * up_inverse).to(up_values.dtype.element_ty), mask=inside)
    tl.store(kept_gate_scales + row, gate_scale)
    tl.store(gate_scales + row, gate_scale)
    tl.store(kept_up_scales + row, up_scale)
    tl.store(up_scales + row, up_scale)
