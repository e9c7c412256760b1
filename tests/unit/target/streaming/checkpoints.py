"""Tiny checkpoints in the formats that targets are published in, and the same targets through Transformers alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from eagle3.files import read_json_object, write_json_atomic
from eagle3.target import tiny
from eagle3.target.engines.streamed import StreamedEngine, StreamSizes
from eagle3.target.resolve import TargetFiles, find_target
from eagle3.wiring.layers import LayerWiring
from tests.unit.target.cases import make_engine, target_config

GROUP = 32
BLOCK = (24, 40)  # divides neither side of the tiny matrices


def streamed(
    folder: Path,
    output_indices: Sequence[int],
    sizes: StreamSizes | None = None,
    last: str | None = "post_norm",
    **values: Any,
) -> StreamedEngine:
    cfg = target_config(folder, **values)
    files = find_target(cfg)
    wiring = LayerWiring(tuple(output_indices), files.facts.num_hidden_layers)
    return StreamedEngine(files, cfg, wiring, last, sizes or StreamSizes(4096, 16), read_threads=2)  # type: ignore[arg-type]


def reference(folder: Path, documents: Sequence[Sequence[int]]) -> list[dict[int | str, torch.Tensor]]:
    """Every layer's output and the post-norm last hidden states, by Transformers, one document at a time."""
    layers = find_target(target_config(folder)).facts.num_hidden_layers
    engine = make_engine(folder, range(-1, layers))
    result = []
    for document in documents:
        [capture] = engine.capture([list(document)])
        parts = capture.aux_hidden_states.chunk(layers + 1, dim=-1)
        states: dict[int | str, torch.Tensor] = dict(zip(range(-1, layers), parts, strict=True))
        result.append({**states, "last": capture.last_hidden_states})
    return result


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Rewrites the checkpoint's only weight file."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def edit_config(folder: Path, key: str, value: Any) -> None:
    config = read_json_object(folder / "config.json", "config")
    config.get("text_config", config)[key] = value
    write_json_atomic(folder / "config.json", config)


def is_expert(name: str) -> bool:
    return ".experts." in name and name.endswith(".weight")


def to_int4(folder: Path) -> dict[str, torch.Tensor]:
    """Packs the experts as published Kimi-K2.5 does; returns what they are in plain numbers."""
    plain = {}

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if is_expert(name)]:
            packed, scale, plain[name] = pack_int4(tensors.pop(name))
            stem = name.removesuffix("weight")
            tensors[f"{stem}weight_packed"], tensors[f"{stem}weight_scale"] = packed, scale
            tensors[f"{stem}weight_shape"] = torch.tensor(plain[name].shape, dtype=torch.int32)

    edit(folder, change)
    edit_config(folder, "quantization_config", INT4)
    return plain


INT4: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP},
        }
    },
}
FP8: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": list(BLOCK),
}


def pack_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(weight_packed, weight_scale, the numbers that they stand for)."""
    rows, columns = weight.shape
    grouped = weight.float().view(rows, -1, GROUP)
    scale = (grouped.abs().amax(-1) / 7).to(torch.bfloat16)
    levels = (grouped / scale.float().unsqueeze(-1)).round().clamp(-8, 7).to(torch.int64).view(rows, columns)
    packed = ((levels.view(rows, -1, 8) + 8) << 4 * torch.arange(8)).sum(-1)
    signed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
    plain = (levels.view(rows, -1, GROUP).to(torch.bfloat16) * scale.unsqueeze(-1)).view(rows, columns)
    return signed, scale, plain


def to_fp8(folder: Path) -> dict[str, torch.Tensor]:
    """Stores every matrix of the layers but the router in FP8 blocks, as DeepSeek-V3 is published."""
    plain = {}

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            if ".layers." in name and tensors[name].dim() == 2 and not name.endswith("mlp.gate.weight"):
                tensors[name], tensors[f"{name}_scale_inv"], plain[name] = block_fp8(tensors[name])

    edit(folder, change)
    edit_config(folder, "quantization_config", FP8)
    return plain


def block_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(weight, weight_scale_inv, the numbers that they stand for), block by block."""
    stored = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scale = torch.empty(-(-weight.shape[0] // BLOCK[0]), -(-weight.shape[1] // BLOCK[1]))
    plain = torch.empty_like(weight, dtype=torch.float32)
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            block = (
                slice(row * BLOCK[0], (row + 1) * BLOCK[0]),
                slice(column * BLOCK[1], (column + 1) * BLOCK[1]),
            )
            scale[row, column] = weight[block].abs().max() / 448
            stored[block] = (weight[block] / scale[row, column]).to(torch.float8_e4m3fn)
            plain[block] = stored[block].float() * scale[row, column]
    return stored, scale, plain


def plain_copy(make: Callable[[Path], Path], folder: Path, plain: dict[str, torch.Tensor]) -> Path:
    """The same target with the numbers that a quantized one stands for, unquantized."""
    copy = make(folder)
    edit(copy, lambda tensors: tensors.update({name: value.float() for name, value in plain.items()}))
    return copy


def make_tiny_qwen3_moe(folder: Path) -> Path:
    shape = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    return tiny._make_chatml(folder, Qwen3MoeConfig, Qwen3MoeForCausalLM, 0, num_hidden_layers=4, **shape)


def make_tiny_gpt_oss(folder: Path) -> Path:
    """Sliding and full attention by turns, sinks, biases, experts that are stored fused."""
    shape = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 4}
    made = tiny._make_chatml(folder, GptOssConfig, GptOssForCausalLM, 0, num_hidden_layers=4, **shape)
    assert AutoModelForCausalLM.from_pretrained(made).config.layer_types[:2] == ["sliding_attention", "full_attention"]
    return made


def files_of(folder: Path, **values: Any) -> TargetFiles:
    return find_target(target_config(folder, **values))
