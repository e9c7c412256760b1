"""Tensors compared bit by bit."""

from __future__ import annotations

import torch
from torch import Tensor


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(*(value.view(-1).view(torch.uint8) for value in (one, other)))
