"""A linear layer whose gradients are made in float8, as one operation of autograd.

Its result is not: it is the state that a chain starts from, so that its rounding would be in all that follows.

Shapes: R rows, `in` and `out` widths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from eagle3.draft.fused.function import choose_ops


def float8_gradient_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [R, in] times weight [out, in] turned, [R, out] in x's type; gradients as `Float8Products` makes them."""
    return _Linear.apply(x, weight)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, weight.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        x, weight = ctx.saved_tensors
        ops = choose_ops(x)
        rows, x_grad = ops.quantize_rows(grad), None
        if ctx.needs_input_grad[0]:
            x_grad = ops.scaled_product(rows, ops.quantize_columns(ops.quantize_rows(weight)), x.dtype, precise=False)
        columns = ops.quantize_columns(rows), ops.quantize_columns(ops.quantize_rows(x))
        return x_grad, ops.scaled_product(*columns, weight.dtype, precise=False)
