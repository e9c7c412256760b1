"""Small configs, conversations and engines for the tests of `eagle3.target`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from eagle3.config import ExtractConfig, RegenerateConfig, TargetConfig, build_config
from eagle3.target.engines.transformers import TransformersEngine, load_model
from eagle3.target.resolve import find_target
from eagle3.wiring.layers import LayerWiring

# FAULTS 6: lengths 5, 9, 3; the first two share four tokens.
SHARED_PREFIX_BATCH = [[7, 8, 9, 10, 300], [7, 8, 9, 10, 20, 21, 22, 23, 24], [400, 3, 77]]


def target_config(folder: Path, **values: Any) -> TargetConfig:
    return build_config(TargetConfig, {"path": str(folder), "dtype": "float32", "device": "cpu", **values}, "test")


def make_engine(
    folder: Path, output_indices: Sequence[int], last_hidden_states: str = "post_norm", **values: Any
) -> TransformersEngine:
    cfg = target_config(folder, **values)
    files = find_target(cfg)
    wiring = LayerWiring(tuple(output_indices), files.facts.num_hidden_layers)
    return TransformersEngine(load_model(files, cfg), files.spec, wiring, last_hidden_states)  # type: ignore[arg-type]


def write_conversations(path: Path, count: int, answer_words: int = 6) -> Path:
    """Conversations of different lengths, ids `c0`, `c1`, ..."""
    words = ["the", "small", "model", "reads", "a", "question", "and", "writes", "an", "answer", "in", "one", "pass"]
    lines = []
    for number in range(count):
        answer = " ".join(words[(number + place) % len(words)] for place in range(2 + number % answer_words))
        question = " ".join(words[place % len(words)] for place in range(1 + number % 5))
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"id": f"c{number}", "messages": messages}))
    path.write_text("\n".join(lines) + "\n")
    return path


def extract_config(folder: Path, conversations: Path, output: Path, **values: Any) -> ExtractConfig:
    nested = {
        "target": {"path": str(folder), "dtype": "float32", "device": "cpu", **values.pop("target", {})},
        "data": {"path": str(conversations), **values.pop("data", {})},
        "output": str(output),
        "store_dtype": "float32",
        "free_disk_fraction": 0.0,
        **values,
    }
    return build_config(ExtractConfig, nested, "test")


def regenerate_config(folder: Path, conversations: Path, output: Path, **values: Any) -> RegenerateConfig:
    nested = {
        "target": {"path": str(folder), "dtype": "float32", "device": "cpu", **values.pop("target", {})},
        "data": {"path": str(conversations), **values.pop("data", {})},
        "output": str(output),
        "max_new_tokens": 8,
        "batch_size": 4,
        **values,
    }
    return build_config(RegenerateConfig, nested, "test")


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())
