"""Tiny checkpoints, contracts and stores for the wiring tests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eagle3.errors import Problem
from eagle3.wiring import LayerWiring, WiringContract, draft_vocab_digest, ids_to_write
from eagle3.wiring.conventions import LAYER_IDS

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 8, 16, 2, 1, 4, 12
DRAFT_IDS = (2, 5, 7, 9)
CONTEXT = 262144


def digest(letter: str) -> str:
    return f"sha256:{letter * 64}"


def make_contract(**changes: Any) -> WiringContract:
    contract = WiringContract(
        target_name="tiny-kimi",
        target_family="kimi_k25",
        target_config_digest=digest("a"),
        num_hidden_layers=61,
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        output_indices=(2, 30, 58),
        last_hidden_states="post_norm",
        dtype="bfloat16",
        tokenizer_digest=digest("b"),
        chat_template_digest=digest("c"),
        draft_vocab_digest=draft_vocab_digest(DRAFT_IDS, VOCAB),
    )
    return replace(contract, **changes)


def make_config(contract: WiringContract, version: str = "0.5.23", **changes: Any) -> dict[str, Any]:
    """What the exporter writes; a change to None removes the key."""
    ids = ids_to_write(contract.wiring, "sglang", version, contract.target_family).ids
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "draft_vocab_size": len(DRAFT_IDS),
        "rms_norm_eps": 1e-5,
        "num_hidden_layers": 1,
        "max_position_embeddings": CONTEXT,
        "rope_theta": 50000.0,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eagle_config": {"use_aux_hidden_state": True, LAYER_IDS: list(ids)},
        LAYER_IDS: list(contract.wiring.boundaries),
        "eagle3": {
            "exported_for": {"engine": "sglang", "engine_version": version},
            "output_indices": list(contract.output_indices),
        },
    }
    return {key: value for key, value in (config | changes).items() if key not in changes or value is not None}


def make_tensors(contract: WiringContract) -> dict[str, torch.Tensor]:
    query, key_value = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {
        "fc.weight": (HIDDEN, contract.wiring.num_aux * HIDDEN),
        "midlayer.input_layernorm.weight": (HIDDEN,),
        "midlayer.hidden_norm.weight": (HIDDEN,),
        "midlayer.post_attention_layernorm.weight": (HIDDEN,),
        "midlayer.self_attn.q_proj.weight": (query, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": (key_value, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": (key_value, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": (HIDDEN, query),
        "midlayer.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
        "midlayer.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
        "midlayer.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (len(DRAFT_IDS), HIDDEN),
    }
    ids = torch.tensor(DRAFT_IDS)
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[ids] = True
    weights = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    return weights | {"d2t": ids - torch.arange(len(DRAFT_IDS)), "t2d": t2d}


def write_checkpoint(
    folder: Path,
    contract: WiringContract | None = None,
    version: str = "0.5.23",
    config: Mapping[str, Any] | None = None,
    tensors: Mapping[str, torch.Tensor | None] | None = None,
) -> Path:
    """A good checkpoint, but for the changed config keys and tensors (None removes one)."""
    folder.mkdir(parents=True, exist_ok=True)
    contract = contract if contract is not None else make_contract()
    contract.save(folder)
    values = make_config(contract, version, **(config or {}))
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    changed = {**make_tensors(contract), **(tensors or {})}
    save_file({name: value for name, value in changed.items() if value is not None}, folder / "model.safetensors")
    return folder


def change_ids(ids: Sequence[int]) -> dict[str, Any]:
    return {"eagle_config": {"use_aux_hidden_state": True, LAYER_IDS: list(ids)}}


def write_store(folder: Path, contract: WiringContract, /, **manifest: Any) -> Path:
    """A store of one shard of two tokens; `manifest` replaces keys of its manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    shard = {
        "aux_hidden_states": torch.zeros(2, contract.wiring.num_aux * contract.hidden_size, dtype=torch.bfloat16),
        "last_hidden_states": torch.zeros(2, contract.hidden_size, dtype=torch.bfloat16),
    }
    save_file(shard, folder / "shard-00000.safetensors")
    values = {"contract": contract.to_dict(), "shards": [{"file": "shard-00000.safetensors"}], **manifest}
    (folder / "manifest.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


def wiring(*output_indices: int, layers: int = 61) -> LayerWiring:
    return LayerWiring(output_indices, layers)


def kinds(problems: Sequence[Problem]) -> list[str]:
    return [problem.kind for problem in problems]
