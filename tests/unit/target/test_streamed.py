"""A streamed target is the target: the same states bit for bit, one layer in memory at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.errors import ProblemsError
from eagle3.files import read_json_object, write_json_atomic
from eagle3.target.engines.streamed import load_streamed
from eagle3.target.engines.transformers import TransformersEngine
from eagle3.target.families.kimi import KIMI_K2
from eagle3.target.resolve import find_target
from eagle3.target.tiny import make_tiny_kimi, make_tiny_llama
from eagle3.wiring.layers import LayerWiring
from tests.unit.target.cases import SHARED_PREFIX_BATCH, make_engine, target_config

NAMES = ("llama", "qwen3", "deepseek_v3", "kimi")


def streamed_engine(folder: Path, depth: int | None = None, dtype: str = "float32") -> TransformersEngine:
    cfg = target_config(folder, dtype=dtype)
    files = find_target(cfg)
    layers = files.facts.num_hidden_layers
    depth = layers if depth is None else depth
    wiring = LayerWiring(tuple(range(-1, depth)), layers)
    return TransformersEngine(load_streamed(files, cfg, depth), files.spec, wiring, "post_norm")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_every_state_equals_the_whole_models(tiny_target: Callable[[str], Path], name: str, dtype: str) -> None:
    streamed = streamed_engine(tiny_target(name), dtype=dtype)
    whole = make_engine(tiny_target(name), streamed.wiring.output_indices, dtype=dtype)

    for one, other in zip(streamed.capture(SHARED_PREFIX_BATCH), whole.capture(SHARED_PREFIX_BATCH), strict=True):
        assert torch.equal(one.aux_hidden_states, other.aux_hidden_states)
        assert torch.equal(one.last_hidden_states, other.last_hidden_states)


def test_a_layer_has_weights_only_while_it_runs(tiny_target: Callable[[str], Path]) -> None:
    engine = streamed_engine(tiny_target("kimi"))
    layers = engine.spec.decoder_layers(engine.model)
    filled: list[list[int]] = []
    for layer in layers:
        layer.mlp.register_forward_hook(
            lambda *_: filled.append([at for at, item in enumerate(layers) if not weights_are_meta(item)])
        )

    engine.capture(SHARED_PREFIX_BATCH)

    assert filled == [[at] for at in range(61)]
    assert all(weights_are_meta(layer) for layer in layers)


def weights_are_meta(module: torch.nn.Module) -> bool:
    return all(tensor.is_meta for tensor in module.state_dict().values())


def test_only_the_layers_that_are_needed_are_read(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "llama")
    whole = make_engine(folder, range(-1, 3)).capture(SHARED_PREFIX_BATCH)
    edit_weights(folder, lambda name: not name.startswith(("model.layers.3.", "model.layers.7.", "lm_head")))

    streamed = streamed_engine(folder, depth=3).capture(SHARED_PREFIX_BATCH)

    for one, other in zip(streamed, whole, strict=True):
        assert torch.equal(one.aux_hidden_states, other.aux_hidden_states)


def edit_weights(folder: Path, keep: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    path = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if keep(name)}
    save_file(tensors, path, metadata={"format": "pt"})
    return tensors


def test_weights_may_lie_in_any_number_of_files(tmp_path: Path) -> None:
    folder = make_tiny_kimi(tmp_path / "kimi", num_hidden_layers=3)
    whole = make_engine(folder, range(-1, 3)).capture(SHARED_PREFIX_BATCH)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for part in range(3):
        mine = {name: tensor for number, (name, tensor) in enumerate(tensors.items()) if number % 3 == part}
        save_file(mine, folder / f"model-{part}.safetensors")

    streamed = streamed_engine(folder).capture(SHARED_PREFIX_BATCH)

    for one, other in zip(streamed, whole, strict=True):
        assert torch.equal(one.aux_hidden_states, other.aux_hidden_states)


def test_kimi_k2_has_no_prefix(tmp_path: Path) -> None:
    folder = make_tiny_kimi(tmp_path / "kimi", num_hidden_layers=3)
    whole = make_engine(folder, range(-1, 3)).capture(SHARED_PREFIX_BATCH)
    published = read_json_object(folder / "config.json", "config")
    write_json_atomic(folder / "config.json", published["text_config"])
    text = {
        name.removeprefix("language_model."): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if name.startswith("language_model.")
    }
    save_file(text, folder / "model.safetensors", metadata={"format": "pt"})
    assert find_target(target_config(folder)).spec is KIMI_K2

    for one, other in zip(streamed_engine(folder).capture(SHARED_PREFIX_BATCH), whole, strict=True):
        assert torch.equal(one.aux_hidden_states, other.aux_hidden_states)


def problems(folder: Path) -> list[tuple[str, str]]:
    with pytest.raises(ProblemsError) as error:
        streamed_engine(folder)
    return [(problem.kind, problem.message) for problem in error.value.problems]


@pytest.mark.parametrize("nested", [True, False])
def test_a_quantized_checkpoint_is_refused_with_the_reason(tmp_path: Path, nested: bool) -> None:
    folder = make_tiny_kimi(tmp_path / "kimi", num_hidden_layers=3)
    config = read_json_object(folder / "config.json", "config")
    (config["text_config"] if nested else config)["quantization_config"] = {"quant_method": "compressed-tensors"}
    write_json_atomic(folder / "config.json", config)

    [(kind, message)] = problems(folder)

    assert kind == "target.quantized"
    assert "compressed-tensors" in message


def test_packed_weights_are_refused_without_a_word_in_the_config(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "llama")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.2.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.int8)
    save_file(tensors, folder / "model.safetensors")

    assert problems(folder) == [("target.quantized", f"{name} is I8")]


def test_every_missing_and_misshaped_weight_is_listed_before_anything_runs(tmp_path: Path) -> None:
    folder = make_tiny_kimi(tmp_path / "kimi", num_hidden_layers=3)
    expert = "language_model.model.layers.2.mlp.experts.5.up_proj.weight"
    norm = "language_model.model.norm.weight"
    tensors = edit_weights(folder, lambda name: name != expert)
    save_file({**tensors, norm: tensors[norm][:-1].clone()}, folder / "model.safetensors")

    assert sorted(problems(folder)) == [
        ("target.mismatched_weights", f"{norm} is [63], not [64]"),
        ("target.missing_weights", f"there is no {expert}"),
    ]
