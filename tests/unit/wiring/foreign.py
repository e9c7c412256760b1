"""Tiny checkpoints in the layouts that other tools write; none has a contract."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eagle3.wiring.conventions import LAYER_IDS
from tests.unit.wiring.cases import CONTEXT, DRAFT_IDS, HEADS, HIDDEN, INTERMEDIATE, VOCAB, make_contract, make_tensors

SPECFORGE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": VOCAB,
    "draft_vocab_size": len(DRAFT_IDS),
    "rms_norm_eps": 1e-6,
    "num_hidden_layers": 1,
    "max_position_embeddings": CONTEXT,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "eagle_config": {LAYER_IDS: [2, 30, 58], "use_aux_hidden_state": True},
}
EAGLE = {key: value for key, value in SPECFORGE.items() if key not in ("eagle_config", "tie_word_embeddings")} | {
    "architectures": ["LlamaForCausalLM"]
}
_LAYER_KEYS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3DraftModel"],
    "speculators_model_type": "eagle3",
    "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "target"}},
    "draft_vocab_size": len(DRAFT_IDS),
    "norm_before_residual": True,
    LAYER_IDS: [3, 31, 59],
    "transformer_layer_config": {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "num_hidden_layers": 1,
        "max_position_embeddings": CONTEXT,
        "rope_parameters": {"rope_theta": 50000.0, "rope_type": "default"},
        **{key: SPECFORGE[key] for key in _LAYER_KEYS},
    },
}
MLA_SIZES = {
    "q_lora_rank": 6,
    "kv_lora_rank": 5,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 3,
}
MLA_CLASS = {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2"}
MLA: dict[str, Any] = SPECFORGE | MLA_SIZES | MLA_CLASS
MODEL_OPTIMIZER = MLA | {"eagle_config": {LAYER_IDS: [3, 31, 59], "parallel_draft_step": 1}}


def llama_tensors(prefix: str = "midlayer.") -> dict[str, torch.Tensor]:
    tensors = make_tensors(make_contract())
    return {name.replace("midlayer.", prefix): value for name, value in tensors.items()}


def mla_tensors(q_lora_rank: int | None = 6) -> dict[str, torch.Tensor]:
    tensors = {name: value for name, value in llama_tensors("layers.0.").items() if "self_attn" not in name}
    query = HEADS * 6
    shapes: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa": (7, 2 * HIDDEN),
        "kv_a_layernorm": (5,),
        "kv_b_proj": (HEADS * 7, 5),
        "o_proj": (HIDDEN, HEADS * 3),
        "q_proj": (query, 2 * HIDDEN),
    }
    if q_lora_rank is not None:
        del shapes["q_proj"]
        shapes |= {"q_a_proj": (6, 2 * HIDDEN), "q_a_layernorm": (6,), "q_b_proj": (query, 6)}
    return tensors | {f"layers.0.self_attn.{name}.weight": torch.ones(shape) for name, shape in shapes.items()}


def write_foreign(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


def write_target(folder: Path, **changes: Any) -> Path:
    """The config.json of a target of Kimi's depth that the tiny drafters fit."""
    folder.mkdir()
    config = {
        "model_type": "kimi_k25",
        "num_hidden_layers": 61,
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
    }
    (folder / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
    return folder
