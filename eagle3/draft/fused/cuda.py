"""The fused step's operations on a GPU, as `plain` defines them."""

from __future__ import annotations

import torch

from eagle3.draft.fused.quantized import Quantized
from eagle3.draft.kernels.attention import attend, attend_grad_query
from eagle3.draft.kernels.attention_grad import attend_grad_own, attend_grad_sources, source_sums
from eagle3.draft.kernels.loss import row_losses
from eagle3.draft.kernels.norm import norm, norm_grad, norm_sums, unnormed_grad
from eagle3.draft.kernels.pointwise import scale_all, swiglu, swiglu_grad
from eagle3.draft.kernels.quantize import quantize_columns, quantize_rows, quantized_room
from eagle3.draft.kernels.rope import rotate_in, rotate_out
from eagle3.draft.kernels.rounded_swiglu import swiglu_grad_rounded, swiglu_rounded

__all__ = [
    "attend",
    "attend_grad_own",
    "attend_grad_query",
    "attend_grad_sources",
    "norm",
    "norm_grad",
    "norm_sums",
    "quantize_columns",
    "quantize_rows",
    "quantized_room",
    "rotate_in",
    "rotate_out",
    "row_losses",
    "scale_all",
    "scaled_product",
    "source_sums",
    "swiglu",
    "swiglu_grad",
    "swiglu_grad_rounded",
    "swiglu_rounded",
    "unnormed_grad",
    "wide",
]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type that sums are kept in."""
    return torch.float32


def scaled_product(
    a: Quantized, b: Quantized, dtype: torch.dtype, out: torch.Tensor | None = None, precise: bool = True
) -> torch.Tensor:
    """As `plain.scaled_product`; cuBLAS's product with a scale for each row of both.

    Unless `precise`, Hopper's matrix units sum up with about 14 bits over the whole of K (arXiv 2412.19437, 3.3.2).
    """
    return torch._scaled_mm(
        a.values, b.values.T, a.scales[:, None], b.scales[None], out_dtype=dtype, use_fast_accum=not precise, out=out
    )
