"""The products of chains' rows with the drafter's matrices: in the operands' own type, or in float8.

A product's operand is prepared once for all products that read it: `rows` for those with a matrix, `columns` for those
that give a matrix's gradient. In the operands' own type there is nothing to prepare.

Shapes: R rows, `out` and `in` widths of a matrix [out, in].
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any, Protocol

import torch

from eagle3.draft.fused.gemm import sum_up
from eagle3.draft.fused.quantized import Quantized


class Products(Protocol):
    """Products with matrices by name."""

    def rows(self, x: torch.Tensor) -> Any:
        """x [R, W], for `forward` and `backward`."""
        ...

    def columns(self, x: torch.Tensor) -> Any:
        """x [R, W], for `add_gradient`."""
        ...

    def forward(
        self, rows: Any, name: str, out: torch.Tensor | None = None, add: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Rows [R, in] times the matrix turned, plus `add`: [R, out]; `out` may be `add`."""
        ...

    def backward(
        self, rows: Any, name: str, out: torch.Tensor | None = None, add: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Rows [R, out] times the matrix, plus `add`: [R, in]; `out` may be `add`."""
        ...

    def add_gradient(self, total: torch.Tensor, grad: Any, rows: Any, more: bool) -> None:
        """Puts grad [R, out] turned times rows [R, in] into `total` [out, in], or adds it where there is `more`."""
        ...


class PlainProducts:
    """See `Products`; in the operands' own type.

    Args:
        matrices: [out, in] by name.
    """

    def __init__(self, matrices: Mapping[str, torch.Tensor]) -> None:
        self._matrices = matrices

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def columns(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(
        self, rows: torch.Tensor, name: str, out: torch.Tensor | None = None, add: torch.Tensor | None = None
    ) -> torch.Tensor:
        return _product(rows, self._matrices[name].T, out, add)

    def backward(
        self, rows: torch.Tensor, name: str, out: torch.Tensor | None = None, add: torch.Tensor | None = None
    ) -> torch.Tensor:
        return _product(rows, self._matrices[name], out, add)

    def add_gradient(self, total: torch.Tensor, grad: torch.Tensor, rows: torch.Tensor, more: bool) -> None:
        sum_up(total, grad, rows, more)


class Float8Products:
    """See `Products`; in float8 with a scale for each row of both operands.

    Args:
        ops: `plain` or `cuda`.
        matrices: [out, in] by name, of any type; they are quantised here, by outputs and by inputs.
        dtype: of the results.
    """

    def __init__(self, ops: ModuleType, matrices: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        self._ops, self._dtype = ops, dtype
        self._by_output: dict[str, Quantized] = {name: ops.quantize_rows(value) for name, value in matrices.items()}
        self._by_input: dict[str, Quantized] = {name: ops.quantize_columns(value) for name, value in matrices.items()}

    def rows(self, x: torch.Tensor) -> Quantized:
        found: Quantized = self._ops.quantize_rows(x)
        return found

    def columns(self, x: torch.Tensor) -> Quantized:
        found: Quantized = self._ops.quantize_columns(x)
        return found

    def forward(
        self, rows: Quantized, name: str, out: torch.Tensor | None = None, add: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._product(rows, self._by_output[name], out, add)

    def backward(
        self, rows: Quantized, name: str, out: torch.Tensor | None = None, add: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._product(rows, self._by_input[name], out, add)

    def add_gradient(self, total: torch.Tensor, grad: Quantized, rows: Quantized, more: bool) -> None:
        if more:
            total.add_(self._ops.scaled_product(grad, rows, total.dtype))
        else:
            self._ops.scaled_product(grad, rows, total.dtype, total)

    def _product(
        self, rows: Quantized, matrix: Quantized, out: torch.Tensor | None, add: torch.Tensor | None
    ) -> torch.Tensor:
        if add is None:
            found: torch.Tensor = self._ops.scaled_product(rows, matrix, self._dtype, out)
            return found
        return torch.add(add, self._ops.scaled_product(rows, matrix, self._dtype), out=out)


def _product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, add: torch.Tensor | None) -> torch.Tensor:
    return torch.mm(a, b, out=out) if add is None else torch.addmm(add, a, b, out=out)
