"""Frequencies and rotation against Transformers' own Llama."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from eagle3.draft.config import RopeConfig
from eagle3.draft.rope import cos_sin, inverse_frequencies, rotate

LLAMA3 = RopeConfig("llama3", 500000.0, 8.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize("rope", [RopeConfig(rope_theta=50000.0), RopeConfig("linear", 1e4, factor=4.0), LLAMA3])
def test_fault_20_frequencies_and_rotation_equal_transformers(rope: RopeConfig) -> None:
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=1, head_dim=128, max_position_embeddings=131072, **rope.to_hf()
    )
    theirs = LlamaRotaryEmbedding(config)
    mine = inverse_frequencies(rope, 128)
    torch.testing.assert_close(mine.float(), theirs.inv_freq, rtol=1e-6, atol=0)
    positions = torch.tensor([0, 1, 2, 17, 300])
    heads = torch.randn(5, 2, 128, generator=torch.Generator().manual_seed(0))
    cos, sin = theirs(heads, positions[None])
    expected, _ = apply_rotary_pos_emb(heads.transpose(0, 1)[None], heads.transpose(0, 1)[None], cos, sin)
    rotated = rotate(heads, cos_sin(rope, 128, positions))
    torch.testing.assert_close(rotated, expected[0].transpose(0, 1), rtol=0, atol=1e-4)


def test_rotation_is_computed_wide_and_returned_in_its_own_type() -> None:
    heads = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0))
    turn = cos_sin(LLAMA3, 8, torch.tensor([5, 9, 100000]))
    assert rotate(heads.bfloat16(), turn).dtype == torch.bfloat16
    assert torch.equal(rotate(heads.bfloat16(), turn), rotate(heads.bfloat16().float(), turn).bfloat16())
