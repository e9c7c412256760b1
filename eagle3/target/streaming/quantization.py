"""How a checkpoint stores its matrices, and what they are in plain numbers.

- bfloat16, float16 or float32 as they are;
- FP8 with a scale for each block (DeepSeek-V3): `weight` e4m3 [out, in], `weight_scale_inv` float32
  [ceil(out / block), ceil(in / block)];
- INT4 of compressed-tensors, `pack-quantized`, symmetric (Kimi-K2.5): `weight_packed` int32 [out, in / 8], nibbles hold
  q + 8, lowest nibble first; `weight_scale` [out, in / group].

Legend: P matrices that follow each other, O out, I in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from eagle3.errors import Problem

_FIX = "use a checkpoint in bfloat16, in FP8 blocks or in INT4 pack-quantized, or a machine that holds the whole target"
_WORD = 8


@dataclass(frozen=True)
class Quantization:
    """What config.json says of a checkpoint's quantized matrices.

    Attributes:
        block: (out, in) of an FP8 block, or None without FP8.
        group: inputs that share an INT4 scale, or None without INT4.
    """

    block: tuple[int, int] | None = None
    group: int | None = None


def read_quantization(config: Mapping[str, Any], where: str) -> tuple[Quantization, list[Problem]]:
    """What a config (whole or text) says, and every reason why it cannot be read."""
    found = config.get("quantization_config")
    if found is None:
        return Quantization(), []
    if not isinstance(found, dict):
        return Quantization(), [_problem(where, f"quantization_config is {found!r}, expected an object")]
    method = found.get("quant_method")
    if method == "fp8":
        return _fp8(found, where)
    if method == "compressed-tensors":
        return _compressed(found, where)
    return Quantization(), [_problem(where, f"quantization method {method!r} is not known")]


def _fp8(found: Mapping[str, Any], where: str) -> tuple[Quantization, list[Problem]]:
    block = found.get("weight_block_size")
    if isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block):
        return Quantization(block=(block[0], block[1])), []
    return Quantization(), [_problem(where, f"fp8 weight_block_size is {block!r}, expected two sizes")]


def _compressed(found: Mapping[str, Any], where: str) -> tuple[Quantization, list[Problem]]:
    problems = [
        _problem(where, f"compressed-tensors {name}: {value}") for name, value in _compressed_faults(found) if value
    ]
    if problems:
        return Quantization(), problems
    size, *others = [group["weights"]["group_size"] for group in found["config_groups"].values()]
    if type(size) is int and size > 0 and size % _WORD == 0 and all(other == size for other in others):
        return Quantization(group=size), []
    sizes = ", ".join(map(repr, [size, *others]))
    return Quantization(), [_problem(where, f"compressed-tensors group sizes are {sizes}, expected one multiple of 8")]


def _compressed_faults(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if found.get("format") != "pack-quantized":
        yield "format", f"{found.get('format')!r}, expected 'pack-quantized'"
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        yield "config_groups", f"{groups!r}, expected an object"
        return
    expected = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict) or "group_size" not in weights:
            yield f"config_groups.{name}.weights", f"{weights!r}, expected an object with a group_size"
            continue
        for key, value in expected.items():
            if weights.get(key) != value:
                yield f"config_groups.{name}.weights.{key}", f"{weights.get(key)!r}, expected {value!r}"
        if weights.get("actorder"):
            yield f"config_groups.{name}.weights.actorder", f"{weights['actorder']!r}, expected none"


def _problem(where: str, message: str) -> Problem:
    return Problem(where, "target.quantized", message, _FIX)


def unpack_int4(packed: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    """Writes `(nibble - 8) * scale`, rounded once to the scale's type, then to `out`'s.

    Args:
        packed: int32 [..., O, I / 8].
        scale: [..., O, I / group].
        out: [..., O, I], contiguous.
    """
    if packed.is_cuda and out.dtype == scale.dtype:
        from eagle3.target.streaming.kernels.int4 import unpack_int4 as fused

        fused(packed, scale, out)
        return
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    values = ((packed.unsqueeze(-1) >> shifts) & 15).flatten(-2) - 8
    grouped = values.to(scale.dtype).unflatten(-1, (scale.shape[-1], -1)) * scale.unsqueeze(-1)
    out.copy_(grouped.flatten(-2))


def dequantize_fp8(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], out: torch.Tensor) -> None:
    """Writes `weight * scale` of each block, computed in float32, one matrix at a time.

    Args:
        weight: float8_e4m3fn [P, O, I].
        scale: float32 [P, ceil(O / block), ceil(I / block)].
        block: (out, in).
        out: [P, O, I].
    """
    rows, columns = weight.shape[-2:]
    down, across = min(block[0], rows), min(block[1], columns)
    for number in range(len(weight)):
        wide = scale[number].repeat_interleave(down, 0)[:rows].repeat_interleave(across, 1)[:, :columns]
        out[number].copy_(weight[number].to(torch.float32) * wide)
