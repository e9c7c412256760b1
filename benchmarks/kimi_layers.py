"""Writes a Kimi-K2.5 checkpoint of a few layers with random weights, in the published names and INT4 format.

Full width by default: a mixture-of-experts layer takes 9.5 GB. The values mean nothing; their sizes do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

WIDTHS: dict[str, dict[str, int]] = {
    "kimi": {
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 384,
        "num_experts_per_tok": 8,
        "vocab_size": 8192,
    },
    "small": {
        "hidden_size": 128,
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "vocab_size": 512,
    },
}
LAYERS = 61
GROUP = 32
_TYPES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int32: "I32"}


def write_layers(folder: Path, shape: str, layers: int, device: torch.device) -> Path:
    """Writes layers 0 (dense) to `layers - 1` (experts), embedding, norm and head; returns the folder."""
    text = {**WIDTHS[shape], **_RECIPE, "num_hidden_layers": layers}
    folder.mkdir(parents=True)
    config = {"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    _save(folder / "model-head.safetensors", _outer(text, device))
    for number in range(layers):
        _save(folder / f"model-{number:05d}.safetensors", _layer(text, number, device))
    return folder


_RECIPE: dict[str, Any] = {
    "model_type": "kimi_k2",
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262144,
    "rope_theta": 50000.0,
    "tie_word_embeddings": False,
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": GROUP,
                },
            }
        },
    },
}

Tensors = Iterator[tuple[str, torch.Tensor]]


def _outer(text: dict[str, Any], device: torch.device) -> Tensors:
    for name in ("model.embed_tokens", "lm_head"):
        yield f"language_model.{name}.weight", _random(device, text["vocab_size"], text["hidden_size"], 1.0)
    yield "language_model.model.norm.weight", torch.ones(text["hidden_size"], dtype=torch.bfloat16)


def _layer(text: dict[str, Any], number: int, device: torch.device) -> Tensors:
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    stem = f"language_model.model.layers.{number}"
    own, rotary = text["qk_nope_head_dim"], text["qk_rope_head_dim"]
    matrices = {
        "self_attn.q_a_proj": (text["q_lora_rank"], hidden),
        "self_attn.q_b_proj": (heads * (own + rotary), text["q_lora_rank"]),
        "self_attn.kv_a_proj_with_mqa": (text["kv_lora_rank"] + rotary, hidden),
        "self_attn.kv_b_proj": (heads * (own + text["v_head_dim"]), text["kv_lora_rank"]),
        "self_attn.o_proj": (hidden, heads * text["v_head_dim"]),
    }
    width = text["intermediate_size"] if number == 0 else text["moe_intermediate_size"]
    mlp = "mlp" if number == 0 else "mlp.shared_experts"
    matrices |= {f"{mlp}.{part}_proj": (width, hidden) for part in ("gate", "up")}
    matrices[f"{mlp}.down_proj"] = (hidden, width)
    if number:
        matrices["mlp.gate"] = (text["n_routed_experts"], hidden)
    for name, (rows, columns) in matrices.items():
        yield f"{stem}.{name}.weight", _random(device, rows, columns, columns**-0.5)
    for name, size in (
        ("input_layernorm", hidden),
        ("post_attention_layernorm", hidden),
        ("self_attn.q_a_layernorm", text["q_lora_rank"]),
        ("self_attn.kv_a_layernorm", text["kv_lora_rank"]),
    ):
        yield f"{stem}.{name}.weight", torch.ones(size, dtype=torch.bfloat16)
    if number:
        yield f"{stem}.mlp.gate.e_score_correction_bias", torch.zeros(text["n_routed_experts"])
        yield from _experts(text, stem, device)


def _experts(text: dict[str, Any], stem: str, device: torch.device) -> Tensors:
    hidden, width, count = text["hidden_size"], text["moe_intermediate_size"], text["n_routed_experts"]
    for part, rows, columns in (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)):
        packed = torch.randint(-(2**31), 2**31 - 1, (count, rows, columns // 8), dtype=torch.int32, device=device).cpu()
        scale = _random(device, count * rows, columns // GROUP, 0.02).abs().view(count, rows, -1) + 0.002
        shape = torch.tensor([rows, columns], dtype=torch.int32)
        for expert in range(count):
            name = f"{stem}.mlp.experts.{expert}.{part}_proj"
            yield f"{name}.weight_packed", packed[expert]
            yield f"{name}.weight_scale", scale[expert] * columns**-0.5
            yield f"{name}.weight_shape", shape


def _random(device: torch.device, rows: int, columns: int, std: float) -> torch.Tensor:
    return (torch.randn(rows, columns, dtype=torch.bfloat16, device=device) * std).cpu()


def _save(path: Path, tensors: Tensors) -> None:
    """A safetensors file, written without a second copy in memory."""
    listed = dict(tensors)
    header, end = {}, 0
    for name, tensor in listed.items():
        offsets = [end, end + tensor.nbytes]
        header[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        end += tensor.nbytes
    text = json.dumps(header).encode()
    with open(path, "wb") as handle:
        handle.write(len(text).to_bytes(8, "little"))
        handle.write(text)
        for tensor in listed.values():
            handle.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
