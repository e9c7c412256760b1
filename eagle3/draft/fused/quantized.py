"""Matrices in float8 (e4m3, arXiv 2209.05433) with one scale a row.

A product of two of them sums over what both have as their second dimension, so a scale is the same for all that is
summed up. Weights, activations and gradients are therefore needed twice, by rows and by columns. Scales are powers of
two: what is rounded by rows is then, but for the smallest numbers, not rounded again by columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SMALLEST_PEAK = 1e-30
"""A row whose values are all smaller is taken for zero: its scale would not be a normal number."""
MULTIPLE = 16
"""A GPU's products in float8 need widths that are multiples of this; rows to sum over get zeros added."""
ROUND_UP, LARGEST_EXPONENT = 0x1FFFFF, 8
"""A scale is the least power of two that brings a row's greatest value to 448 = 1.75 * 2^8 or below. In the bits of
float32: add the first, which carries into the exponent where the mantissa is above 1.75, and subtract the second."""


@dataclass(frozen=True, eq=False)
class Quantized:
    """Row r is values[r] * scales[r].

    Attributes:
        values: float8_e4m3fn [R, K].
        scales: float32 or wider [R], powers of two; NaN where a value of the row is infinite.
    """

    values: torch.Tensor
    scales: torch.Tensor

    def part(self, rows: slice) -> Quantized:
        """Some of the rows."""
        return Quantized(self.values[rows], self.scales[rows])
