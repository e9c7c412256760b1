"""What bars a checkpoint from being streamed: each reason by name, all at once, before a weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eagle3.errors import ProblemsError
from eagle3.files import write_json_atomic
from eagle3.target.streaming.reader import check_vectors
from eagle3.target.streaming.skeleton import Skeleton
from eagle3.target.tiny import make_tiny_deepseek_v3, make_tiny_kimi, make_tiny_llama
from tests.unit.target.streaming.checkpoints import FP8, INT4, edit, edit_config, files_of, streamed, to_fp8, to_int4

EXPERT = "language_model.model.layers.2.mlp.experts.5.up_proj"
DOWN = "language_model.model.layers.2.mlp.experts.5.down_proj"
NORM = "language_model.model.norm.weight"


@pytest.fixture
def kimi(tmp_path: Path) -> Path:
    return make_tiny_kimi(tmp_path / "kimi", num_hidden_layers=3)


def problems(folder: Path) -> list[tuple[str, str]]:
    with pytest.raises(ProblemsError) as error:
        streamed(folder, [0])
    return sorted((problem.kind, problem.message) for problem in error.value.problems)


def int4_groups(*sizes: Any) -> dict[str, Any]:
    weights = INT4["config_groups"]["group_0"]["weights"]
    groups = {f"group_{number}": {"weights": {**weights, "group_size": size}} for number, size in enumerate(sizes)}
    return {**INT4, "config_groups": groups}


def test_every_missing_and_misshaped_weight_is_listed(kimi: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{EXPERT}.weight"]
        tensors[NORM] = tensors[NORM][:-1].clone()

    edit(kimi, change)

    assert problems(kimi) == [
        ("target.mismatched_weights", f"{NORM} is [63], not [64]"),
        ("target.missing_weights", f"there is no {EXPERT}.weight"),
    ]


def test_a_tensor_that_no_part_reads_is_refused(kimi: Path) -> None:
    name = "language_model.model.layers.1.self_attn.q_a_proj.bias"
    edit(kimi, lambda tensors: tensors.update({name: torch.ones(16)}))

    assert problems(kimi) == [("target.unexpected_weights", f"{name} belongs to no part of this model")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "awq"}, "quantization method 'awq' is not known"),
        ({"quant_method": "mxfp4"}, "quantization method 'mxfp4' is not known"),
        ("yes", "quantization_config is 'yes', expected an object"),
        ([], "quantization_config is [], expected an object"),
        (False, "quantization_config is False, expected an object"),
        ({**INT4, "format": "nvfp4-pack-quantized"}, "compressed-tensors format: 'nvfp4-pack-quantized'"),
        ({**INT4, "config_groups": []}, "compressed-tensors config_groups: []"),
        ({**INT4, "config_groups": {"g": {"weights": None}}}, "compressed-tensors config_groups.g.weights: None"),
        ({**FP8, "weight_block_size": None}, "fp8 weight_block_size is None"),
        (int4_groups([32]), "compressed-tensors group sizes are [32], expected one multiple of 8"),
        (int4_groups(12), "compressed-tensors group sizes are 12, expected one multiple of 8"),
        (int4_groups(32, 64), "compressed-tensors group sizes are 32, 64, expected one multiple of 8"),
        ({**FP8, "weight_block_size": [128, 0]}, "fp8 weight_block_size is [128, 0]"),
    ],
)
@pytest.mark.parametrize("nested", [True, False])
def test_an_unknown_quantization_is_refused_by_its_name(kimi: Path, change: Any, message: str, nested: bool) -> None:
    if nested:
        edit_config(kimi, "quantization_config", change)
    else:
        config = json.loads((kimi / "config.json").read_text())
        write_json_atomic(kimi / "config.json", {**config, "quantization_config": change})

    [(kind, found)] = problems(kimi)

    assert kind == "target.quantized"
    assert found.startswith(message)


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_bits", 8), ("type", "float"), ("symmetric", False), ("strategy", "channel"), ("actorder", "group")],
)
def test_int4_of_another_kind_is_refused(kimi: Path, key: str, value: Any) -> None:
    weights = {**INT4["config_groups"]["group_0"]["weights"], key: value}
    edit_config(kimi, "quantization_config", {**INT4, "config_groups": {"group_0": {"weights": weights}}})

    [(kind, found)] = problems(kimi)

    assert (kind, f"weights.{key}: {value!r}" in found) == ("target.quantized", True)


def test_packed_weights_without_a_word_in_the_config_are_refused(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "llama")
    name = "model.layers.2.mlp.up_proj.weight"
    edit(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))

    assert problems(folder) == [("target.quantized", f"{name} is I8, expected F32 or BF16 or F16")]


def test_int4_parts_that_do_not_fit_are_listed(kimi: Path) -> None:
    to_int4(kimi)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{EXPERT}.weight_scale"]
        tensors[f"{DOWN}.weight_packed"] = tensors[f"{DOWN}.weight_packed"][:, :-1].clone()

    edit(kimi, change)

    assert problems(kimi) == [
        (
            "target.mismatched_weights",
            f"{DOWN}.weight_packed is [64, 3], not [64, 4]",
        ),
        ("target.missing_weights", f"there is no {EXPERT}.weight_scale"),
    ]


def test_fp8_scales_of_another_block_are_refused(tmp_path: Path) -> None:
    folder = make_tiny_deepseek_v3(tmp_path / "target", num_hidden_layers=2)
    to_fp8(folder)
    edit_config(folder, "quantization_config", {**FP8, "weight_block_size": [128, 128]})

    found = problems(folder)

    assert {kind for kind, _ in found} == {"target.mismatched_weights"}
    assert any("weight_scale_inv is" in message for _, message in found)


def test_a_file_that_the_index_names_must_be_there(kimi: Path) -> None:
    names = {NORM: "model.safetensors", "other": "model-00002.safetensors"}
    write_json_atomic(kimi / "model.safetensors.index.json", {"weight_map": names})

    with pytest.raises(ProblemsError) as error:
        streamed(kimi, [0])

    [problem] = error.value.problems
    assert problem.kind == "file.missing" and problem.where.endswith("model-00002.safetensors")


@pytest.mark.parametrize("weight_map", [None, [], {"a": 3}])
def test_an_index_without_files_is_refused(kimi: Path, weight_map: Any) -> None:
    write_json_atomic(kimi / "model.safetensors.index.json", {"weight_map": weight_map})

    assert [kind for kind, _ in problems(kimi)] == ["target.index"]


def test_a_shard_cut_short_is_refused(kimi: Path) -> None:
    path = kimi / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])

    assert [kind for kind, _ in problems(kimi)] == ["safetensors.truncated"]


def test_a_shard_that_shrinks_later_is_refused_when_it_is_read(kimi: Path) -> None:
    engine = streamed(kimi, [0])
    path = kimi / "model.safetensors"
    with open(path, "r+b") as handle:
        handle.truncate(path.stat().st_size // 2)

    with pytest.raises(ProblemsError) as error:
        engine.states([[1, 2, 3]])

    assert error.value.problems[0].kind == "target.truncated"


def test_a_tensor_in_two_files_is_refused(kimi: Path) -> None:
    save_file({NORM: torch.ones(64)}, kimi / "model-more.safetensors")

    message = f"{NORM} is in model-more.safetensors and in model.safetensors"
    assert problems(kimi) == [("target.duplicate_weights", message)]


@pytest.mark.parametrize("expert", ["0", "5"])
def test_of_experts_in_another_type_only_those_are_named(kimi: Path, expert: str) -> None:
    name = EXPERT.replace("experts.5", f"experts.{expert}") + ".weight"
    edit(kimi, lambda tensors: tensors.update({name: tensors[name].bfloat16()}))

    assert problems(kimi) == [("target.quantized", f"{name} is BF16, expected F32")]


@pytest.mark.parametrize("make", [to_int4, to_fp8])
def test_of_quantized_experts_only_what_is_missing_is_named(tmp_path: Path, make: Any) -> None:
    int4 = make is to_int4
    folder = make_tiny_kimi(tmp_path / "t", num_hidden_layers=3) if int4 else make_tiny_deepseek_v3(tmp_path / "t")
    make(folder)
    name = DOWN.replace("experts.5", "experts.0") + ".weight_packed"
    if not int4:
        name = "model.layers.2.mlp.experts.0.down_proj.weight_scale_inv"
    edit(folder, lambda tensors: tensors.pop(name))

    assert problems(folder) == [("target.missing_weights", f"there is no {name}")]


@pytest.mark.parametrize("layers", [2, 4, 10**9])
def test_another_number_of_layers_than_the_weights_have_is_one_error(kimi: Path, layers: int) -> None:
    edit_config(kimi, "num_hidden_layers", layers)

    with pytest.raises(ProblemsError) as error:
        Skeleton(files_of(kimi), torch.float32, layers)

    [problem] = error.value.problems
    assert problem.kind == "target.layers"
    assert problem.message == f"has weights of layers 0 to 2, config.json says {layers} layers"


@pytest.mark.parametrize("name", ["../kimi/model.safetensors", "sub/model.safetensors", "", "."])
def test_an_index_that_names_files_elsewhere_is_refused(kimi: Path, name: str) -> None:
    write_json_atomic(kimi / "model.safetensors.index.json", {"weight_map": {NORM: name}})

    [(kind, message)] = problems(kimi)

    assert (kind, f"names {name!r}" in message) == ("target.index", True)


@pytest.mark.parametrize("value", [None, "x", 0, -1.0, True])
def test_a_config_without_a_usable_epsilon_is_refused(kimi: Path, value: Any) -> None:
    edit_config(kimi, "rms_norm_eps", value)

    [(kind, message)] = problems(kimi)

    assert (kind, message) == ("target.config", f"rms_norm_eps is {value!r}, expected a number above 0")


def test_a_mixture_without_experts_is_refused(kimi: Path) -> None:
    edit_config(kimi, "n_routed_experts", 0)

    assert {kind for kind, _ in problems(kimi)} == {"target.mismatched_weights"}


def test_a_shard_that_is_gone_when_it_is_read_is_named(kimi: Path) -> None:
    engine = streamed(kimi, [0])
    engine.layer_walk.reader._open.cache_clear()
    (kimi / "model.safetensors").unlink()

    with pytest.raises(ProblemsError) as error:
        engine.states([[1, 2, 3]])

    [problem] = error.value.problems
    assert (problem.where, problem.kind) == (str(kimi / "model.safetensors"), "file.missing")


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_routers_bias_that_is_not_finite_is_named(kimi: Path, value: str) -> None:
    name = "language_model.model.layers.2.mlp.gate.e_score_correction_bias"
    assert check_vectors(streamed(kimi, [0]).skeleton.all_recipes()) == []
    edit(kimi, lambda tensors: tensors[name][3:4].fill_(float(value)))

    [problem] = check_vectors(streamed(kimi, [0]).skeleton.all_recipes())

    assert (problem.kind, problem.message) == ("target.non_finite", f"{name} has NaN or infinity")
