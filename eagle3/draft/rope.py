"""Rotary position embedding, half-split pairs as Llama has them (arXiv 2104.09864; scaling: Llama 3.1's).

Shapes: R rows, h heads, d head width.
"""

from __future__ import annotations

import math

import torch

from eagle3.draft.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int, device: torch.device | str | None = None) -> torch.Tensor:
    """float64 [d / 2], radians a token of each channel pair."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
    frequencies = rope.rope_theta**-exponents
    if rope.rope_type == "default":
        return frequencies
    assert rope.factor is not None
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    assert rope.original_max_position_embeddings and rope.low_freq_factor and rope.high_freq_factor
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    kept = ((turns - rope.low_freq_factor) / span).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / rope.factor)


def cos_sin(rope: RopeConfig, head_dim: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines at int64 `positions` [R], float64 [R, d / 2] each."""
    angles = positions[:, None] * inverse_frequencies(rope, head_dim, positions.device)
    return angles.cos(), angles.sin()


def rotate(heads: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Turns `heads` [R, h, d] by the cosines and sines [R, d / 2] of their positions; computed in at least float32."""
    dtype = torch.promote_types(heads.dtype, torch.float32)
    cos, sin = (part.to(dtype)[:, None] for part in turn)
    left, right = heads.to(dtype).chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(heads.dtype)
