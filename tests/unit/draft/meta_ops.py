"""The fused step's operations on a GPU without the GPU, for the meta device."""

from __future__ import annotations

import torch

from eagle3.draft.fused import memory
from eagle3.draft.fused.quantized import MULTIPLE, Quantized


class Ops:
    """The operations of `fused.cuda` by what they make; nothing is computed."""

    def wide(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32

    def norm(self, x, weight, eps, out=None):  # type: ignore[no-untyped-def]
        return torch.empty_like(x) if out is None else out, x.new_empty(len(x), dtype=torch.float32)

    def norm_sums(self, width, like):  # type: ignore[no-untyped-def]
        return like.new_empty(memory._NORM_PROGRAMS, width, dtype=torch.float32)

    def norm_grad(self, x, factor, weight, grad, sums, add=None, out=None):  # type: ignore[no-untyped-def]
        return torch.empty_like(x) if out is None else out

    def unnormed_grad(self, *_):  # type: ignore[no-untyped-def]
        return None

    def rotate_in(self, projected, shared, rows, shift, turn, rotated, out):  # type: ignore[no-untyped-def]
        return out

    def rotate_out(self, *_):  # type: ignore[no-untyped-def]
        return None

    def attend(self, *_):  # type: ignore[no-untyped-def]
        return None

    def attend_grad_query(self, query, *_):  # type: ignore[no-untyped-def]
        return torch.empty_like(query)

    def attend_grad_own(self, step, query, own, *_):  # type: ignore[no-untyped-def]
        return torch.empty_like(own[step - 1, : _[-1].counts[step]])

    def source_sums(self, sources, key_heads, group, head_dim, like):  # type: ignore[no-untyped-def]
        splits = min(group, -(-memory._PROGRAMS // (-(-sources // 64) * key_heads)))
        return like.new_empty(splits, sources, 2 * key_heads, head_dim, dtype=torch.float32)

    def attend_grad_sources(self, *_):  # type: ignore[no-untyped-def]
        return None

    def swiglu(self, gate, up, out):  # type: ignore[no-untyped-def]
        return out

    def swiglu_grad(self, *_):  # type: ignore[no-untyped-def]
        return None

    def row_losses(self, logits, teacher, rows, scales, objective):  # type: ignore[no-untyped-def]
        return logits.new_empty(len(logits), dtype=torch.float32), rows.new_empty(len(logits), dtype=torch.int64)

    def scale_all(self, *_):  # type: ignore[no-untyped-def]
        return None

    def quantized_room(self, rows, width, like):  # type: ignore[no-untyped-def]
        values = like.new_empty(rows, width, dtype=torch.float8_e4m3fn)
        return Quantized(values, like.new_empty(rows, dtype=torch.float32))

    def quantize_rows(self, x, out=None):  # type: ignore[no-untyped-def]
        out = self.quantized_room(*x.shape, x) if out is None else out
        return Quantized(out.values, torch.empty_like(out.scales))

    def quantize_columns(self, x):  # type: ignore[no-untyped-def]
        rows, width = x.values.shape
        return self.quantized_room(width, -(-rows // MULTIPLE) * MULTIPLE, x.values)

    def swiglu_rounded(self, gate, up, out):  # type: ignore[no-untyped-def]
        return out

    def swiglu_grad_rounded(self, gate, up, grad, gate_out, up_out):  # type: ignore[no-untyped-def]
        return gate_out, up_out

    def scaled_product(self, a, b, dtype, out=None, precise=True):  # type: ignore[no-untyped-def]
        return a.values.new_empty(len(a.values), len(b.values), dtype=dtype) if out is None else out
