"""The head read alone is the head of the loaded model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.config import TargetConfig
from eagle3.errors import ProblemsError
from eagle3.target import resolve
from eagle3.target.engines.transformers import load_model
from eagle3.target.head_tensors import find_target_with_head, read_head_tensors
from eagle3.target.resolve import find_target
from eagle3.target.tiny import make_tiny_kimi, make_tiny_llama, make_tiny_qwen3
from tests.unit.target.cases import target_config


@pytest.mark.parametrize("maker", [make_tiny_llama, make_tiny_qwen3, make_tiny_kimi])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_the_loaded_models_head(tmp_path: Path, maker: Callable[..., Path], dtype: str) -> None:
    cfg = target_config(maker(tmp_path / "target", num_hidden_layers=3), dtype=dtype)
    files = find_target(cfg)

    alone = read_head_tensors(files, cfg)

    whole = files.spec.head_tensors(load_model(files, cfg))
    assert alone.keys() == whole.keys()
    assert all(torch.equal(alone[name], whole[name]) and alone[name].dtype == whole[name].dtype for name in whole)


def test_the_other_weights_need_not_be_there(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "target", num_hidden_layers=2)
    expected = read_head_tensors(find_target(target_config(folder)), target_config(folder))
    weights = load_file(folder / "model.safetensors")
    save_file({name: value for name, value in weights.items() if ".layers." not in name}, folder / "model.safetensors")

    found = read_head_tensors(find_target(target_config(folder)), target_config(folder))

    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_everything_that_is_missing_or_of_another_shape_or_type_is_named(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "target", num_hidden_layers=2)
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    weights["model.norm.weight"] = torch.ones(3)
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].to(torch.float8_e4m3fn)
    save_file(weights, folder / "model.safetensors")

    with pytest.raises(ProblemsError) as error:
        read_head_tensors(find_target(target_config(folder)), target_config(folder))

    assert {problem.kind: problem.message for problem in error.value.problems} == {
        "target.quantized": "model.embed_tokens.weight is F8_E4M3",
        "target.mismatched_weights": "model.norm.weight is [3], not [64]",
        "target.missing_weights": "there is no lm_head.weight",
    }


@pytest.mark.parametrize("own", ["another", "a copy", "none"])
def test_of_a_tied_target_it_is_what_transformers_uses(tmp_path: Path, own: str) -> None:
    folder = make_tiny_qwen3(tmp_path / "target", num_hidden_layers=2)
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    if own != "none":
        weights["lm_head.weight"] = embedding.clone() if own == "a copy" else torch.randn(embedding.shape)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    cfg = target_config(folder)

    found = read_head_tensors(find_target(cfg), cfg)

    used = load_model(find_target(cfg), cfg).get_output_embeddings().weight
    assert torch.equal(found.get("lm_head.weight", found["embed_tokens.weight"]), used)
    assert ("lm_head.weight" in found) == (own == "another")


def test_of_a_target_on_the_hub_only_the_files_that_hold_it_are_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_kimi(tmp_path / "target", num_hidden_layers=2)
    head = ("embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    names = load_file(folder / "model.safetensors")
    places = {name: f"{'head' if name.endswith(head) else 'layer'}-{len(name) % 2}.safetensors" for name in names}
    asked: list[list[str]] = []

    def download(name: str, **kwargs: Any) -> str:
        asked.append(kwargs["allow_patterns"])
        return str(folder)

    monkeypatch.setattr(resolve, "snapshot_download", download)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    find_target_with_head(TargetConfig(path="owner/name"))
    expected = {file for name, file in places.items() if name.startswith("language_model.") and name.endswith(head)}
    assert {pattern for pattern in asked[-1] if "safetensors" in pattern} == expected
    assert not any("safetensors" in pattern for pattern in asked[0])

    (folder / "model.safetensors.index.json").unlink()
    find_target_with_head(TargetConfig(path="owner/name"))
    assert "model.safetensors" in asked[-1]
