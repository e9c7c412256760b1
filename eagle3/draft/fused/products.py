"""The products of chains' rows with the drafter's matrices: in the rows' own type, or in float8.

Rows of all steps that are multiplied with matrices, and then make a matrix's gradient, are an *operand*. In float8 its
rows are rounded once, step by step; the gradient's product reads them with other scales, which rounds nothing more.

The gradient of a softmax has a large value in a row and many that are small, but of one sign and together as large:
sums over them need all of float32's bits. So the head's gradients are summed up precisely, other products with the bits
that Hopper's matrix units have when they are fastest. Drafters came out worse without that (docs/benchmarks.md).

Shapes: N rows of all steps, R rows of one, W width, `out` and `in` widths of a matrix [out, in].
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any, Protocol

import torch

from eagle3.draft.fused.gemm import product, sum_up
from eagle3.draft.fused.quantized import Quantized

_PRECISE = {"lm_head"}


class Operand(Protocol):
    """Rows of all steps, [N, W]."""

    def place(self, at: slice) -> torch.Tensor:
        """Where to put a step's rows, [R, W]."""
        ...

    def rows(self, at: slice, x: torch.Tensor) -> Any:
        """A step's rows, of which x [R, W] was put in their place, for `Products.forward` and `backward`."""
        ...

    def swiglu(self, at: slice, gate: torch.Tensor, up: torch.Tensor) -> Any:
        """A step's rows, made of gate and up [R, W]; given as by `rows`."""
        ...

    def swiglu_grad(
        self, at: slice, gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor, other: Operand
    ) -> tuple[Any, Any]:
        """A step's rows of this operand and of `other`: the gradients of gate and up [R, W], whose own values may be
        gone; given as by `rows`."""
        ...

    def columns(self) -> Any:
        """All rows, for `Products.add_gradient`; every step's were made before."""
        ...


class Products(Protocol):
    """Products with matrices by name."""

    def operand(self, values: torch.Tensor) -> Operand:
        """Rows that lie in `values` [N, W], where others read them too."""
        ...

    def room(self, count: int, width: int, like: torch.Tensor) -> Operand:
        """Room for N = `count` rows of `like`'s type and device, which nobody else reads."""
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

    def add_gradient(self, total: torch.Tensor, name: str, grad: Any, rows: Any, more: bool) -> None:
        """Puts grad [N, out] turned times rows [N, in] into `total` [out, in], or adds it where there is `more`.

        Args:
            name: of the matrix whose gradient it is.
            grad, rows: from `Operand.columns`.
        """
        ...


class PlainOperand:
    """See `Operand`; the rows as they are."""

    def __init__(self, ops: ModuleType, values: torch.Tensor) -> None:
        self._ops, self._values = ops, values

    def place(self, at: slice) -> torch.Tensor:
        return self._values[at]

    def rows(self, at: slice, x: torch.Tensor) -> torch.Tensor:
        return x

    def swiglu(self, at: slice, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._ops.swiglu(gate, up, self._values[at])
        return found

    def swiglu_grad(
        self, at: slice, gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor, other: Operand
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._ops.swiglu_grad(gate, up, grad)
        return gate, up

    def columns(self) -> torch.Tensor:
        return self._values


class PlainProducts:
    """See `Products`; in the rows' own type.

    Args:
        ops: `plain` or `cuda`.
        matrices: [out, in] by name.
    """

    def __init__(self, ops: ModuleType, matrices: Mapping[str, torch.Tensor]) -> None:
        self._ops, self._matrices = ops, matrices

    def operand(self, values: torch.Tensor) -> PlainOperand:
        return PlainOperand(self._ops, values)

    def room(self, count: int, width: int, like: torch.Tensor) -> PlainOperand:
        return PlainOperand(self._ops, like.new_empty(count, width))

    def forward(
        self, rows: torch.Tensor, name: str, out: torch.Tensor | None = None, add: torch.Tensor | None = None
    ) -> torch.Tensor:
        return _product(rows, self._matrices[name].T, out, add)

    def backward(
        self, rows: torch.Tensor, name: str, out: torch.Tensor | None = None, add: torch.Tensor | None = None
    ) -> torch.Tensor:
        return _product(rows, self._matrices[name], out, add)

    def add_gradient(self, total: torch.Tensor, name: str, grad: torch.Tensor, rows: torch.Tensor, more: bool) -> None:
        sum_up(total, grad, rows, more)


class Float8Operand:
    """See `Operand`; rounded rows, and where nobody else reads them, no others."""

    def __init__(self, ops: ModuleType, rounded: Quantized, like: torch.Tensor, values: torch.Tensor | None) -> None:
        self._ops, self._rounded, self._like, self._values = ops, rounded, like, values

    def place(self, at: slice) -> torch.Tensor:
        if self._values is not None:
            return self._values[at]
        return self._like.new_empty(at.stop - at.start, self._rounded.values.shape[1])

    def rows(self, at: slice, x: torch.Tensor) -> Quantized:
        found: Quantized = self._ops.quantize_rows(x, self._rounded.part(at))
        return found

    def swiglu(self, at: slice, gate: torch.Tensor, up: torch.Tensor) -> Quantized:
        found: Quantized = self._ops.swiglu_rounded(gate, up, self._rounded.part(at))
        return found

    def swiglu_grad(
        self, at: slice, gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor, other: Operand
    ) -> tuple[Quantized, Quantized]:
        assert isinstance(other, Float8Operand)
        places = self._rounded.part(at), other._rounded.part(at)
        found: tuple[Quantized, Quantized] = self._ops.swiglu_grad_rounded(gate, up, grad, *places)
        return found

    def columns(self) -> Quantized:
        found: Quantized = self._ops.quantize_columns(self._rounded)
        return found


class Float8Products:
    """See `Products`; in float8 with a scale for each row of both operands.

    Args:
        ops: `plain` or `cuda`.
        matrices: [out, in] by name, of any type; they are rounded here.
        dtype: of the results.
    """

    def __init__(self, ops: ModuleType, matrices: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        self._ops, self._dtype = ops, dtype
        self._by_output: dict[str, Quantized] = {name: ops.quantize_rows(value) for name, value in matrices.items()}
        self._by_input: dict[str, Quantized] = {
            name: ops.quantize_columns(value) for name, value in self._by_output.items()
        }

    def add_part(self, name: str, whole: str, outputs: int) -> None:
        """The first `outputs` rows of a matrix as one of its own, for `forward`."""
        self._by_output[name] = self._by_output[whole].part(slice(0, outputs))

    def operand(self, values: torch.Tensor) -> Float8Operand:
        return Float8Operand(self._ops, self._ops.quantized_room(len(values), values.shape[1], values), values, values)

    def room(self, count: int, width: int, like: torch.Tensor) -> Float8Operand:
        return Float8Operand(self._ops, self._ops.quantized_room(count, width, like), like, None)

    def forward(
        self, rows: Quantized, name: str, out: torch.Tensor | None = None, add: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._product(rows, self._by_output[name], out, add, precise=False)

    def backward(
        self, rows: Quantized, name: str, out: torch.Tensor | None = None, add: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._product(rows, self._by_input[name], out, add, precise=name in _PRECISE)

    def add_gradient(self, total: torch.Tensor, name: str, grad: Quantized, rows: Quantized, more: bool) -> None:
        precise = name in _PRECISE
        if more:
            total.add_(self._ops.scaled_product(grad, rows, total.dtype, precise=precise))
        else:
            self._ops.scaled_product(grad, rows, total.dtype, total, precise)

    def _product(
        self, rows: Quantized, matrix: Quantized, out: torch.Tensor | None, add: torch.Tensor | None, precise: bool
    ) -> torch.Tensor:
        found: torch.Tensor = self._ops.scaled_product(rows, matrix, self._dtype, out if add is None else None, precise)
        return found if add is None else torch.add(add, found, out=out)


def _product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, add: torch.Tensor | None) -> torch.Tensor:
    return product(a, b, out) if add is None else torch.addmm(add, a, b, out=out)
