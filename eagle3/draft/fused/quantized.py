"""Matrices in float8 (e4m3, arXiv 2209.05433) with one scale a row.

A product of two of them sums over what both have as their second dimension, so a scale is the same for all that is
summed up. A weight therefore exists twice, by its outputs and by its inputs, and so do activations and gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LARGEST = 448.0
"""Greatest number of e4m3."""
SMALLEST_PEAK = 1e-30
"""A row whose values are all smaller is taken for zero: its scale would not be a normal number."""
MULTIPLE = 16
"""A GPU's products in float8 need widths that are multiples of this; rows to sum over get zeros added."""


@dataclass(frozen=True, eq=False)
class Quantized:
    """Row r is values[r] * scales[r].

    Attributes:
        values: float8_e4m3fn [R, K].
        scales: float32 or wider [R].
    """

    values: torch.Tensor
    scales: torch.Tensor
