"""Percentile bootstrap over samples: how far a pooled ratio could be off because other prompts might have been asked.

Shapes: N samples, K columns, R resamples.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

RESAMPLES = 1000
CONFIDENCE = 0.95
_ENTRIES = 4_000_000
"""Most draws that exist at once."""

Interval = tuple[float, float]


def ratio_intervals(above: Tensor, below: Tensor, seed: int = 0) -> list[Interval]:
    """95% interval of above.sum(0) / below.sum(0) of each column under resampling of samples; NaN without a sample.

    Every column sees the same resamples. Samples whose `below` is 0 in every column carry nothing and are left out.

    Args:
        above, below: [N, K]; a sample's part of the numerator and of the denominator.
        seed: of the resampling.
    """
    counted = (below > 0).any(1)
    above, below = above[counted].double(), below[counted].double()
    columns = above.shape[1]
    if not len(above):
        return [(math.nan, math.nan)] * columns
    sums = resampled_sums(torch.cat([above, below], 1), seed)
    return intervals(sums[:, :columns] / sums[:, columns:])


def resampled_sums(values: Tensor, seed: int = 0) -> Tensor:
    """Float64 [R, K], the columns' sums in each resample; every column sees the same ones.

    Args:
        values: [N, K], N above 0.
    """
    values, count = values.double(), len(values)
    generator = torch.Generator().manual_seed(seed)
    sums = []
    done = 0
    while done < RESAMPLES:
        draws = min(max(_ENTRIES // count, 1), RESAMPLES - done)
        drawn = torch.randint(count, (draws, count), generator=generator)
        times = torch.zeros(draws, count, dtype=torch.float64)
        times.scatter_add_(1, drawn, torch.ones_like(times))
        sums.append(times @ values)
        done += draws
    return torch.cat(sums)


def intervals(found: Tensor) -> list[Interval]:
    """95% interval of each column of resampled figures [R, K]."""
    found = found.sort(0).values
    tail = round(len(found) * (1 - CONFIDENCE) / 2)
    return list(zip(found[tail].tolist(), found[-tail - 1].tolist(), strict=True))
