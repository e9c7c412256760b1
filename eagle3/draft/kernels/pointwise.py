"""SwiGLU (arXiv 2002.05202) forward and backward, and a product with a scalar.

Legend: R rows, I width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_BLOCK = 2048
"""Elements at a time. A tensor of whole blocks is read without a mask, which lets loads be wide."""

_SCALERS = 2112
"""Programs of `scale_all`, 16 for each of an H200's processors: mostly they find a factor of 1 and end."""


def swiglu(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """As `plain.swiglu`; all contiguous."""
    if gate.numel():
        _swiglu[(triton.cdiv(gate.numel(), _BLOCK),)](gate, up, out, gate.numel(), gate.numel() % _BLOCK == 0, _BLOCK)
    return out


def swiglu_grad(gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor) -> None:
    """As `plain.swiglu_grad`; all contiguous."""
    if gate.numel():
        _swiglu_grad[(triton.cdiv(gate.numel(), _BLOCK),)](
            gate, up, grad, gate.numel(), gate.numel() % _BLOCK == 0, _BLOCK
        )


def scale_all(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """As `plain.scale_all`, without waiting for the factor; a factor of 1 reads and writes nothing."""
    for tensor in tensors:
        if tensor.numel():
            assert tensor.is_contiguous()
            blocks = triton.cdiv(tensor.numel(), _BLOCK)
            _scale[(min(blocks, _SCALERS),)](tensor, factor, tensor.numel(), tensor.numel() % _BLOCK == 0, _BLOCK)


@triton.jit
def swiglu_at(gate, up, at, inside):
    """float32 SwiGLU of elements `at`, where `inside`."""
    inner = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    return inner * tl.sigmoid(inner) * tl.load(up + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def swiglu_grads_at(gate, up, grad, at, inside):
    """The gradients of gate and up there, in float32."""
    inner = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(inner)
    return slope * other * share * (1 + inner * (1 - share)), slope * inner * share


@triton.jit(do_not_specialize=["count"])
def _swiglu(gate, up, out, count, even: tl.constexpr, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = (at < count) | even
    tl.store(out + at, swiglu_at(gate, up, at, inside).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _swiglu_grad(gate, up, grad, count, even: tl.constexpr, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = (at < count) | even
    gates, ups = swiglu_grads_at(gate, up, grad, at, inside)
    tl.store(gate + at, gates.to(gate.dtype.element_ty), mask=inside)
    tl.store(up + at, ups.to(up.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _scale(values, factor, count, even: tl.constexpr, block: tl.constexpr):
    by = tl.load(factor).to(tl.float32)
    if by != 1.0:
        for first in range(tl.program_id(0).to(tl.int64) * block, count, tl.num_programs(0) * block):
            at = first + tl.arange(0, block)
            inside = (at < count) | even
            value = tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
            tl.store(values + at, (value * by).to(values.dtype.element_ty), mask=inside)
