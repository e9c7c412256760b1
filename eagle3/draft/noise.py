"""Uniform noise on aux hidden states while training, so that a drafter does not rely on their last digits.

EAGLE (arXiv 2401.15077, 4.2) adds U(-0.1, 0.1) to the one layer that it reads. Captured layers differ in size by powers
of ten, so here a state's noise is a share of the root mean square of its token's slot.

The numbers are a hash of seed, step, sample, position and channel alone: whatever batch, row or process a sample is in,
and after a resume, it gets the same.

Shapes: R rows, A aux layers, H target hidden.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

_PIECE = 1 << 22
"""Values that are made at once: 8 bytes each, a few times."""
_GOLDEN, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
_BITS = 24


def noise_keys(sample_ids: Sequence[str], seed: int, step: int) -> torch.Tensor:
    """int64, a number for each sample at a step."""
    digests = (hashlib.sha256(f"{seed}\0{step}\0{name}".encode()).digest() for name in sample_ids)
    values = [int.from_bytes(digest[:8], "little", signed=True) for digest in digests]
    return torch.tensor(values, dtype=torch.int64)


def add_noise(aux: torch.Tensor, slots: int, width: float, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Adds U(-width, width) times each slot's root mean square to aux states [R, A * H], in place.

    Args:
        slots: A.
        width: a share.
        keys: int64 [R], of each row's sample.
        positions: int64 [R], of each row in its sample.
    """
    channels = torch.arange(aux.shape[1], device=aux.device)
    rows = _mixed(keys + positions * _GOLDEN)
    piece = max(_PIECE // aux.shape[1], 1)
    for states, row in zip(aux.split(piece), rows.split(piece), strict=True):
        bits = _right(_mixed(row[:, None] + channels * _GOLDEN), 64 - _BITS)
        uniform = (bits.float() + 0.5) * 2.0 ** (1 - _BITS) - 1
        wide = states.to(torch.promote_types(states.dtype, torch.float32)).unflatten(1, (slots, -1))
        sizes = wide.square().mean(-1, keepdim=True).sqrt()
        states.copy_((wide + uniform.unflatten(1, (slots, -1)) * (width * sizes)).flatten(1))
    return aux


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """A hash of each int64 (splitmix64's mixing, https://doi.org/10.1145/2660193.2660195); products wrap around."""
    x = (x ^ _right(x, 30)) * _FIRST
    x = (x ^ _right(x, 27)) * _SECOND
    return x ^ _right(x, 31)


def _right(x: torch.Tensor, by: int) -> torch.Tensor:
    """x shifted right with zeros coming in."""
    return (x >> by) & ((1 << (64 - by)) - 1)
