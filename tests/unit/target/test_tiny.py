from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, Kimi_K25ForConditionalGeneration

from eagle3.target.families import SPECS, find_spec
from eagle3.target.tiny import make_tiny_llama
from eagle3.wiring.targets import family_of_model_type
from tests.unit.target.cases import SHARED_PREFIX_BATCH, make_engine

TinyTarget = Callable[[str], Path]


def test_kimi_is_written_as_published(tiny_target: TinyTarget) -> None:
    folder = tiny_target("kimi")
    names = load_file(folder / "model.safetensors").keys()
    assert "language_model.model.layers.60.mlp.experts.7.gate_proj.weight" in names
    assert "language_model.lm_head.weight" in names
    assert not any("language_model.model.blocks" in name or name.startswith("model.") for name in names)
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "kimi_k25"
    assert config["text_config"]["model_type"] == "kimi_k2"
    assert config["text_config"]["num_hidden_layers"] == 61
    assert config["text_config"]["rope_scaling"]["type"] == "yarn"


def test_kimi_text_model_gives_the_whole_models_logits(tiny_target: TinyTarget) -> None:
    folder = tiny_target("kimi")
    whole, info = Kimi_K25ForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    tokens = SHARED_PREFIX_BATCH[1]
    with torch.inference_mode():
        expected = whole(input_ids=torch.tensor([tokens])).logits[0]
    engine = make_engine(folder, [2, 30, 58])
    assert torch.equal(engine.reference([tokens]).logits[0], expected)
    assert "lm_head.weight" in engine.spec.head_tensors(engine.model), "Kimi's head is its own, not its embedding"
    assert not engine.model.config.tie_word_embeddings
    assert expected.std() > 1, "flat logits would hide a wrong head"


def test_kimi_prompt_opens_the_thinking_that_a_finished_turn_holds(tiny_target: TinyTarget) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_target("kimi"))
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    user = "<|im_user|>user<|im_middle|>Hi<|im_end|>"
    assert text == f"{user}<|im_assistant|>assistant<|im_middle|><think></think>Hello.<|im_end|>"
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == f"{user}<|im_assistant|>assistant<|im_middle|><think>"
    off = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True, thinking=False)
    assert off == f"{prompt}</think>"


def test_tiny_targets_are_deterministic(tiny_target: TinyTarget, tmp_path: Path) -> None:
    again = make_tiny_llama(tmp_path)
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (again / name).read_bytes() == (tiny_target("llama") / name).read_bytes()


@pytest.mark.parametrize("name", ["llama", "qwen3", "deepseek_v3", "kimi"])
def test_no_norm_weight_is_one(tiny_target: TinyTarget, name: str) -> None:
    tensors = load_file(tiny_target(name) / "model.safetensors")
    norm = next(tensor for key, tensor in tensors.items() if key.endswith("model.norm.weight"))
    assert (norm - 1).abs().max() > 0.3


def test_every_supported_model_type_has_engine_conventions() -> None:
    for model_type in SPECS:
        assert family_of_model_type(model_type)
        assert model_type in find_spec(model_type, "here").model_types
