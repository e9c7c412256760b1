"""Matrix products into given places, in the operands' type or summed up in a wider one."""

from __future__ import annotations

import torch


def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """a [M, K] times b [K, N], in their own type; `out` may be a part of a wider matrix."""
    return torch.mm(a, b, out=out)


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """total [M, N] plus a [M, K] times b [K, N], in place."""
    return total.addmm_(a, b)


def sum_up(total: torch.Tensor, grad: torch.Tensor, rows: torch.Tensor, more: bool) -> None:
    """Puts the weight gradient grad^T rows into `total`, or adds it.

    Args:
        total: [out, in], of the operands' type or wider.
        grad: [N, out].
        rows: [N, in].
        more: whether `total` already holds a part.
    """
    if total.dtype == grad.dtype:
        if more:
            total.addmm_(grad.T, rows)
        else:
            torch.mm(grad.T, rows, out=total)
        return
    if grad.is_cuda:
        found = torch.mm(grad.T, rows, out_dtype=total.dtype)
    else:
        found = torch.mm(grad.T.to(total.dtype), rows.to(total.dtype))
    if more:
        total.add_(found)
    else:
        total.copy_(found)
