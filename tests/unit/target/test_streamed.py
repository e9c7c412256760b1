"""A streamed target is the target: every boundary equals Transformers' own, whatever the sizes, types and layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.errors import ProblemsError
from eagle3.files import read_json_object, write_json_atomic
from eagle3.target.engines.streamed import StreamedEngine, StreamSizes
from eagle3.target.extract import run_extract
from eagle3.target.families.kimi import KIMI_K2
from eagle3.target.selfcheck import self_check_streamed
from eagle3.target.streaming import fused
from eagle3.target.tiny import make_tiny_deepseek_v3, make_tiny_kimi, make_tiny_llama, make_tiny_qwen3
from tests.unit.target.cases import SHARED_PREFIX_BATCH, make_engine, relative
from tests.unit.target.stream_cases import stream_config
from tests.unit.target.streaming.checkpoints import (
    edit,
    edit_config,
    files_of,
    make_tiny_gpt_oss,
    make_tiny_qwen3_moe,
    plain_copy,
    reference,
    streamed,
    to_fp8,
    to_int4,
)

EXACT = 1e-5
DOCUMENTS = [*SHARED_PREFIX_BATCH, list(range(40)), [5], [9, 9, 9, 9, 9, 9, 9]]
MAKERS: dict[str, Callable[[Path], Path]] = {
    "llama": make_tiny_llama,
    "qwen3 (tied)": make_tiny_qwen3,
    "qwen3_moe": make_tiny_qwen3_moe,
    "deepseek_v3": make_tiny_deepseek_v3,
    "kimi_k25": make_tiny_kimi,
    "gpt_oss": make_tiny_gpt_oss,
}
QUANTIZED: dict[str, tuple[Callable[[Path], Path], Callable[[Path], Any]]] = {
    "kimi_k25 int4": (make_tiny_kimi, to_int4),
    "deepseek_v3 fp8": (make_tiny_deepseek_v3, to_fp8),
}


def three_layers(folder: Path) -> Path:
    return make_tiny_kimi(folder, num_hidden_layers=3)


def worst(engine: StreamedEngine, expected: list[dict[int | str, torch.Tensor]]) -> float:
    found = engine.states(DOCUMENTS)
    assert [states.keys() for states in found] == [states.keys() for states in expected]
    return max(relative(mine[key], theirs[key]) for mine, theirs in zip(found, expected, strict=True) for key in theirs)


@pytest.mark.parametrize("name", MAKERS)
def test_every_boundary_equals_transformers_own(tmp_path: Path, name: str) -> None:
    folder = MAKERS[name](tmp_path / "target")
    engine = streamed(folder, range(-1, files_of(folder).facts.num_hidden_layers))

    assert worst(engine, reference(folder, DOCUMENTS)) < EXACT


@pytest.mark.parametrize("group", [None, 3])
@pytest.mark.parametrize("name", QUANTIZED)
def test_a_quantized_target_is_what_its_numbers_stand_for(tmp_path: Path, name: str, group: int | None) -> None:
    make, quantize = QUANTIZED[name]
    folder = make(tmp_path / "quantized")
    plain = quantize(folder)
    assert len(plain) > 8
    expected = reference(plain_copy(make, tmp_path / "plain", plain), DOCUMENTS)
    engine = streamed(folder, range(-1, len(expected[0]) - 2), StreamSizes(4096, 16, expert_group=group))

    assert worst(engine, expected) < EXACT


@pytest.mark.parametrize(
    "sizes",
    [
        StreamSizes(4096, 1),
        StreamSizes(4096, 4096),
        StreamSizes(4096, 16, "host"),
        StreamSizes(4096, 16, "file"),
        StreamSizes(4096, 16, expert_group=1),
        StreamSizes(4096, 16, expert_group=8),
    ],
)
def test_sizes_change_nothing(tmp_path: Path, sizes: StreamSizes) -> None:
    folder = three_layers(tmp_path / "kimi")

    assert worst(streamed(folder, range(-1, 3), sizes), reference(folder, DOCUMENTS)) < EXACT


def test_the_same_chunk_gives_the_same_bits(tmp_path: Path) -> None:
    folder = three_layers(tmp_path / "kimi")
    first, second = (streamed(folder, range(-1, 3)).states(DOCUMENTS) for _ in range(2))

    assert all(torch.equal(one[key], other[key]) for one, other in zip(first, second, strict=True) for key in one)


def test_bfloat16_differs_by_rounding_alone(tiny_target: Callable[[str], Path]) -> None:
    folder = tiny_target("llama")
    wide = streamed(folder, [1, 4]).states(DOCUMENTS)
    narrow = streamed(folder, [1, 4], dtype="bfloat16").states(DOCUMENTS)

    for mine, theirs in zip(narrow, wide, strict=True):
        assert mine[1].dtype == torch.bfloat16
        assert max(relative(mine[key].float(), theirs[key]) for key in theirs) < 0.05


def test_last_hidden_states_are_normed_only_if_asked_for(tiny_target: Callable[[str], Path]) -> None:
    folder = tiny_target("llama")
    expected = reference(folder, DOCUMENTS)
    pre_norm = streamed(folder, [7], last="pre_norm").states(DOCUMENTS)

    for mine, theirs in zip(pre_norm, expected, strict=True):
        assert torch.equal(mine["last"], mine[7])
        assert relative(mine["last"], theirs[7]) < EXACT
        assert relative(mine["last"], theirs["last"]) > 0.1


def test_a_layer_has_weights_only_while_it_runs(tmp_path: Path) -> None:
    engine = streamed(three_layers(tmp_path / "kimi"), [0])
    filled: list[list[int]] = []
    for layer in engine.skeleton.layers:
        layer.register_forward_hook(
            lambda *_: filled.append([at for at, item in enumerate(engine.skeleton.layers) if not is_meta(item)])
        )

    engine.states(DOCUMENTS[:2])

    assert filled == [[0], [1], [2]]
    assert all(is_meta(layer) for layer in engine.skeleton.layers)


def is_meta(module: torch.nn.Module) -> bool:
    return all(tensor.is_meta for tensor in module.state_dict().values())


def test_only_the_layers_that_are_needed_are_read(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "llama")
    whole = reference(folder, DOCUMENTS)
    edit(folder, lambda tensors: drop(tensors, "model.layers.3.", "model.layers.7."))

    for mine, theirs in zip(streamed(folder, [0, 2], last=None).states(DOCUMENTS), whole, strict=True):
        assert mine.keys() == {0, 2}
        assert relative(mine[2], theirs[2]) < EXACT


def drop(tensors: dict[str, torch.Tensor], *prefixes: str) -> None:
    for name in [name for name in tensors if name.startswith(prefixes)]:
        del tensors[name]


@pytest.mark.parametrize("index", [False, True])
def test_weights_may_lie_in_any_number_of_files(tmp_path: Path, index: bool) -> None:
    folder = three_layers(tmp_path / "kimi")
    whole = reference(folder, DOCUMENTS)
    split(folder, index)

    assert worst(streamed(folder, range(-1, 3)), whole) < EXACT


def split(folder: Path, index: bool) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {name: f"model-{number % 3}.safetensors" for number, name in enumerate(tensors)}
    for file in set(names.values()):
        save_file({name: tensors[name] for name in tensors if names[name] == file}, folder / file)
    if index:
        write_json_atomic(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": names})


def test_kimi_k2_has_no_prefix(tmp_path: Path) -> None:
    folder = three_layers(tmp_path / "kimi")
    whole = reference(folder, DOCUMENTS)
    write_json_atomic(folder / "config.json", read_json_object(folder / "config.json", "config")["text_config"])
    edit(folder, without_prefix)
    assert files_of(folder).spec is KIMI_K2

    assert worst(streamed(folder, range(-1, 3)), whole) < EXACT


def without_prefix(tensors: dict[str, torch.Tensor]) -> None:
    text = {name: tensors.pop(name) for name in list(tensors) if name.startswith("language_model.")}
    tensors.clear()
    tensors.update({name.removeprefix("language_model."): tensor for name, tensor in text.items()})


def test_multi_token_prediction_layers_beyond_the_model_are_left_alone(tmp_path: Path) -> None:
    folder = make_tiny_deepseek_v3(tmp_path / "target", num_hidden_layers=3)
    edit_config(folder, "num_nextn_predict_layers", 1)
    extra = {
        "model.layers.3.eh_proj.weight": torch.ones(2, 2),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    edit(folder, lambda tensors: tensors.update(extra))

    assert worst(streamed(folder, range(-1, 3)), reference(make_again(tmp_path), DOCUMENTS)) < EXACT


def make_again(tmp_path: Path) -> Path:
    return make_tiny_deepseek_v3(tmp_path / "again", num_hidden_layers=3)


def test_head_tensors_are_the_checkpoints(tmp_path: Path) -> None:
    folder = three_layers(tmp_path / "kimi")
    stored = load_file(folder / "model.safetensors")
    found = streamed(folder, [0]).head_tensors()

    assert torch.equal(found["embed_tokens.weight"], stored["language_model.model.embed_tokens.weight"])
    assert torch.equal(found["norm.weight"], stored["language_model.model.norm.weight"])
    assert torch.equal(found["lm_head.weight"], stored["language_model.lm_head.weight"])
    assert "lm_head.weight" not in streamed(make_tiny_qwen3(tmp_path / "tied"), [0]).head_tensors()


@pytest.mark.parametrize("name", MAKERS)
def test_the_self_check_passes(tmp_path: Path, name: str) -> None:
    engine = streamed(MAKERS[name](tmp_path / "target"), [0])

    self_check_streamed(engine, [str(number) for number in range(len(DOCUMENTS))], DOCUMENTS, torch.float32)


@pytest.mark.parametrize("name", ["llama", "kimi_k25", "gpt_oss"])
def test_the_self_check_sees_documents_that_mix(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = streamed(MAKERS[name](tmp_path / "target"), [0])
    monkeypatch.setattr("eagle3.target.streaming.packing._lengths", lambda micro: [sum(micro.lengths)])

    with pytest.raises(ProblemsError) as error:
        self_check_streamed(engine, [str(number) for number in range(len(DOCUMENTS))], DOCUMENTS, torch.float32)

    assert "selfcheck.streamed" in {problem.kind for problem in error.value.problems}


def test_the_self_check_sees_a_wrong_norm(tmp_path: Path) -> None:
    engine = streamed(make_tiny_llama(tmp_path / "target"), [0])
    engine.skeleton.norm.variance_epsilon = 10.0  # not what the config says
    engine.last_hidden_states = "pre_norm"

    with pytest.raises(ProblemsError) as error:
        self_check_streamed(engine, ["a"], DOCUMENTS[:1], torch.float32)

    assert [problem.kind for problem in error.value.problems] == ["selfcheck.logits"]


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_the_self_check_compares_with_transformers_own_experts(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = streamed(MAKERS[name](tmp_path / "target"), [0])
    mixture = fused.mixture
    monkeypatch.setattr(fused, "mixture", lambda *args: mixture(*args) * 1.01)

    with pytest.raises(ProblemsError) as error:
        self_check_streamed(engine, ["a", "b", "c"], SHARED_PREFIX_BATCH, torch.float32)

    assert {problem.kind for problem in error.value.problems} == {"selfcheck.streamed"}


def test_a_head_of_its_own_is_stored_though_the_config_ties_it(tmp_path: Path) -> None:
    folder = make_tiny_qwen3(tmp_path / "target")
    head = torch.randn(load_file(folder / "model.safetensors")["model.embed_tokens.weight"].shape)
    edit(folder, lambda tensors: tensors.update({"lm_head.weight": head}))

    engine = streamed(folder, [0])

    assert torch.equal(engine.head_tensors()["lm_head.weight"], head)
    assert torch.equal(make_engine(folder, [0]).model.get_output_embeddings().weight, head)


def test_a_copy_of_the_embedding_is_no_head_of_its_own(tmp_path: Path) -> None:
    folder = make_tiny_qwen3(tmp_path / "target")
    edit(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))

    assert streamed(folder, [0]).head_tensors().keys() == {"embed_tokens.weight", "norm.weight"}


def test_weights_that_are_not_finite_are_said_to_be(tmp_path: Path) -> None:
    folder = three_layers(tmp_path / "target")
    name = "language_model.model.layers.1.mlp.gate.weight"
    edit(folder, lambda tensors: tensors[name].fill_(float("nan")))

    with pytest.raises(ProblemsError) as error:
        self_check_streamed(streamed(folder, [0]), ["a"], DOCUMENTS[:1], torch.float32)

    [problem] = error.value.problems
    assert (problem.where, problem.kind) == ("a", "selfcheck.non_finite") and "layer 1" in problem.message


@pytest.mark.parametrize(("key", "value"), [("n_group", 0), ("n_group", 3), ("num_experts_per_tok", 99)])
def test_a_config_that_no_forward_can_follow_is_one_error(tmp_path: Path, key: str, value: int) -> None:
    folder = three_layers(tmp_path / "target")
    edit_config(folder, key, value)
    output = tmp_path / "store"

    with pytest.raises(ProblemsError) as error:
        run_extract(stream_config(folder, tmp_path, str(output), output_indices=[0, 1]))

    assert [problem.kind for problem in error.value.problems] == ["target.cannot_load"]
    assert not output.exists()
