"""Checkpoints that other tools wrote: recognised, checked as far as they can be, and the rest said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.errors import ProblemsError
from eagle3.wiring import assert_wiring, check_checkpoint, describe_checkpoint
from eagle3.wiring.checkpoint_layers import readings
from eagle3.wiring.checkpoint_options import check_names
from eagle3.wiring.conventions import LAYER_IDS
from eagle3.wiring.layouts import recognise
from tests.unit.wiring.cases import HIDDEN, kinds, make_contract, write_checkpoint, write_store
from tests.unit.wiring.foreign import (
    EAGLE,
    MLA,
    MODEL_OPTIMIZER,
    SPECFORGE,
    SPECULATORS,
    llama_tensors,
    mla_tensors,
    write_foreign,
    write_target,
)

OLD, NEW = "0.5.12.post1", "0.5.23"


@pytest.mark.parametrize(
    ("config", "tool"),
    [
        (SPECFORGE, "SpecForge"),
        (SPECULATORS, "speculators"),
        ({"speculators_model_type": "eagle3"}, "speculators"),
        (EAGLE, "EAGLE's own repository"),
        (MLA, "TorchSpec"),
        (MODEL_OPTIMIZER, "Model-Optimizer"),
        (SPECFORGE | {"eagle3": {}}, "eagle3"),
        ({"architectures": ["LlamaForCausalLM"]}, "no tool that is known"),
        ({"architectures": "x"}, "no tool that is known"),
        ({}, "no tool that is known"),
    ],
)
def test_the_tool_is_recognised(config: dict[str, Any], tool: str) -> None:
    assert recognise(config).tool.startswith(tool)


def test_a_checkpoint_without_a_contract_says_what_nobody_can_know_and_what_each_version_reads(tmp_path: Path) -> None:
    checkpoint = write_foreign(tmp_path / "draft", SPECFORGE, llama_tensors())
    target = write_target(tmp_path / "target")

    (problem,) = check_checkpoint(checkpoint, target=target, engine_version=OLD)

    assert problem.kind == "checkpoint.no_contract"
    for part in (
        "looks like SpecForge",
        "which layers it was trained on (--layers)",
        "SGLang 0.5.10 to 0.5.10.post1: the outputs of layers 2, 30, 58, but its CUDA graphs capture the outputs of "
        "layers 1, 29, 57",
        "SGLang 0.5.11 to 0.5.12.post1: the outputs of layers 2, 30, 58;",
        "SGLang 0.5.13 to 0.5.23: the outputs of layers 1, 29, 57",
        "vLLM 0.33.0: its default layers",
    ):
        assert part in problem.message
    assert "which target" not in problem.message
    for part in ("--layers", "eagle3 wiring probe --server URL", "tokenizer", "final norm"):
        assert part in problem.fix


def test_without_a_target_both_are_said_to_be_missing_and_the_rest_is_checked(tmp_path: Path) -> None:
    tensors = llama_tensors() | {"fc.weight": torch.ones(HIDDEN, 2 * HIDDEN)}
    checkpoint = write_foreign(tmp_path / "draft", SPECFORGE, tensors)

    problems = check_checkpoint(checkpoint)

    assert kinds(problems) == ["checkpoint.no_contract", "tensor.shape"]
    assert "which layers" in problems[0].message and "which target it is for (--target)" in problems[0].message
    assert kinds(check_checkpoint(checkpoint, layers=[2, 30, 58]))[0] == "checkpoint.no_contract"


@pytest.mark.parametrize(
    ("version", "layers", "expected"),
    [
        (OLD, (2, 30, 58), []),
        (NEW, (1, 29, 57), []),
        (NEW, (2, 30, 58), ["wiring.one_early"]),
        (OLD, (1, 29, 57), ["wiring.one_late"]),
        ("0.5.10", (2, 30, 58), ["wiring.cuda_graphs"]),
        (NEW, (2, 30), ["wiring.other_layers"]),
        (NEW, (2, 30, 61), ["layers.out_of_range"]),
        (NEW, (30, 2, 58), ["layers.unsorted"]),
    ],
)
def test_layers_that_the_caller_knows_are_checked(
    tmp_path: Path, version: str, layers: tuple[int, ...], expected: list[str]
) -> None:
    checkpoint = write_foreign(tmp_path / "draft", SPECFORGE, llama_tensors())
    target = write_target(tmp_path / "target")

    found = check_checkpoint(checkpoint, target=target, layers=layers, engine_version=version)

    assert kinds(found) == expected
    if expected:
        with pytest.raises(ProblemsError):
            assert_wiring(checkpoint, engine_version=version, target=target, layers=layers)
    else:
        assert_wiring(checkpoint, engine_version=version, target=target, layers=layers)


def test_layers_that_cuda_graphs_do_not_capture_are_named_with_those_that_they_do(tmp_path: Path) -> None:
    checkpoint = write_foreign(tmp_path / "draft", SPECFORGE, llama_tensors())
    target = write_target(tmp_path / "target")

    said = check_checkpoint(checkpoint, target=target, layers=(2, 30, 58), engine_version="0.5.10")
    unsaid = check_checkpoint(checkpoint, target=target, engine_version="0.5.10")

    assert kinds(said) == ["wiring.cuda_graphs"] and kinds(unsaid) == ["checkpoint.no_contract", "wiring.cuda_graphs"]
    assert said[0] == unsaid[1]
    assert said[0].message == (
        "SGLang 0.5.10 would verify with other layers than the outputs of layers 2, 30, 58: its CUDA graphs capture "
        "the outputs of layers 1, 29, 57, whatever the ids (sglang PR 22836, fixed in 0.5.11)"
    )
    assert "--disable-cuda-graph" in said[0].fix


def test_what_a_server_reads_is_described_with_the_targets_help(tmp_path: Path) -> None:
    checkpoint = write_foreign(tmp_path / "draft", SPECFORGE, llama_tensors())
    target = write_target(tmp_path / "target")

    assert describe_checkpoint(checkpoint, target=target).startswith(
        "SGLang 0.5.23 (the newest known) reads the outputs of layers 1, 29, 57 of "
    )
    with pytest.raises(ProblemsError, match=r"file\.missing"):
        describe_checkpoint(checkpoint)


@pytest.mark.parametrize(
    ("ids", "kind"),
    [([2, 30, 61], "wiring.never_captured"), ([-1, 30, 58], "wiring.never_captured"), ([30, 2, 58], "wiring.permuted")],
)
def test_ids_that_no_drafter_could_be_served_with_are_named_without_a_contract(
    tmp_path: Path, ids: list[int], kind: str
) -> None:
    config = SPECFORGE | {"eagle_config": {LAYER_IDS: ids}}
    checkpoint = write_foreign(tmp_path / "draft", config, llama_tensors())

    problems = check_checkpoint(checkpoint, target=write_target(tmp_path / "target"))

    assert kinds(problems) == ["checkpoint.no_contract", kind]
    assert "--layers" in problems[1].fix


def test_layers_that_the_contract_contradicts(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path)

    assert check_checkpoint(checkpoint, layers=[2, 30, 58]) == []
    (problem,) = check_checkpoint(checkpoint, layers=[1, 29, 57])
    assert problem.kind == "contract.output_indices"
    assert "trained on the outputs of layers 2, 30, 58, not on the outputs of layers 1, 29, 57" in problem.message
    assert kinds(check_checkpoint(checkpoint, layers=[2, 30, 61])) == ["layers.out_of_range"]


def test_layers_beside_a_contract_that_cannot_be_read_are_no_further_error(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path)
    (checkpoint / "eagle3_contract.json").write_text("{", encoding="utf-8")

    assert kinds(check_checkpoint(checkpoint, layers=[2, 30, 58])) == ["file.not_json"]


def test_a_dataset_does_not_prove_what_a_checkpoint_was_trained_on(tmp_path: Path) -> None:
    checkpoint = write_foreign(tmp_path / "draft", SPECFORGE, llama_tensors())
    dataset = write_store(tmp_path / "store", make_contract())

    found = kinds(check_checkpoint(checkpoint, dataset=dataset))

    assert found == ["checkpoint.no_contract", "wiring.one_early"]


@pytest.mark.parametrize(
    ("change", "kind"), [({"hidden_size": 16}, "target.hidden_size"), ({"vocab_size": 13}, "target.vocab_size")]
)
def test_a_target_of_another_shape_is_named(tmp_path: Path, change: dict[str, int], kind: str) -> None:
    checkpoint = write_foreign(tmp_path / "draft", SPECFORGE, llama_tensors())
    target = write_target(tmp_path / "target", **change)

    found = check_checkpoint(checkpoint, target=target, layers=(2, 30, 58), engine_version=OLD)

    assert kinds(found) == [kind]
    assert str(next(iter(change.values()))) in found[0].message


def test_what_each_version_reads_is_said_once_for_versions_that_read_alike() -> None:
    def lines(ids: list[int], family: str = "deepseek", layers: int = 61) -> list[str]:
        return readings({"eagle_config": {LAYER_IDS: ids}, LAYER_IDS: ids}, family, layers)

    assert lines([1, 29, 57]) == [
        "SGLang 0.5.4.post2 to 0.5.23: the outputs of layers 1, 29, 57",
        "vLLM 0.33.0: the outputs of layers 0, 28, 56",
    ]
    assert lines([0, 61, 62, -2], "qwen3") == [
        "SGLang 0.4.9 to 0.5.10.post1: the output of layer 0, but its CUDA graphs capture the outputs of layers "
        "1, 29, 57, whatever the ids (sglang PR 22836, fixed in 0.5.11)",
        "SGLang 0.5.11 to 0.5.23: the output of layer 0",
        "vLLM 0.33.0: the embedding and the output of layer 60",
    ]
    assert lines([2, 12, 24], "gpt_oss", 24)[-2:] == [
        "SGLang 0.5.17 to 0.5.23: the outputs of layers 1, 11, 23",
        "vLLM 0.33.0: the outputs of layers 1, 11, 23",
    ]
    assert readings({}, "gemma3", 26) == ["SGLang 0.5.12 to 0.5.16: its default layers"]


# speculators.


def test_speculators_layout_is_for_vllm_and_its_ids_are_boundaries(tmp_path: Path) -> None:
    checkpoint = write_foreign(tmp_path / "draft", SPECULATORS, llama_tensors("layers.0."))
    target = write_target(tmp_path / "target")

    assert check_checkpoint(checkpoint, target=target, layers=(2, 30, 58), engine="vllm") == []
    found = kinds(check_checkpoint(checkpoint, target=target, layers=(2, 30, 58)))
    assert found == ["config.architectures", "layer_ids.missing", "config.option_unknown"]


def test_a_qwen3_drafter_of_speculators_has_norms_on_its_heads(tmp_path: Path) -> None:
    layer = SPECULATORS["transformer_layer_config"] | {"model_type": "qwen3"}
    tensors = llama_tensors("layers.0.")
    norms = {f"layers.0.self_attn.{name}_norm.weight": torch.ones(4) for name in "qk"}
    config = SPECULATORS | {"transformer_layer_config": layer}
    target = write_target(tmp_path / "target")

    def found(name: str, stored: dict[str, torch.Tensor]) -> list[str]:
        checkpoint = write_foreign(tmp_path / name, config, stored)
        return kinds(check_checkpoint(checkpoint, target=target, layers=(2, 30, 58), engine="vllm"))

    assert found("good", tensors | norms) == []
    assert found("bad", tensors) == ["tensor.missing", "tensor.missing"]


def test_a_checkpoint_with_sglangs_key_only_gets_default_layers_from_vllm(tmp_path: Path) -> None:
    checkpoint = write_foreign(tmp_path / "draft", SPECFORGE, llama_tensors())
    target = write_target(tmp_path / "target")

    (problem,) = check_checkpoint(checkpoint, target=target, layers=(2, 30, 58), engine="vllm")

    assert problem.kind == "layer_ids.nested_only"
    assert "V2 runner" in problem.message and "V1" in problem.message
    with pytest.raises(ProblemsError, match=r"layer_ids\.nested_only"):
        describe_checkpoint(checkpoint, "vllm", target=target)


# EAGLE's own repository.


def test_eagles_own_config_names_no_layers_and_a_class_that_sglang_does_not_load(tmp_path: Path) -> None:
    checkpoint = write_foreign(tmp_path / "draft", EAGLE, llama_tensors())
    target = write_target(tmp_path / "target")

    found = kinds(check_checkpoint(checkpoint, target=target, layers=(1, 29, 57)))
    vllm = kinds(check_checkpoint(checkpoint, target=target, layers=(1, 29, 57), engine="vllm"))

    assert found == ["config.architectures", "layer_ids.missing"]
    assert vllm == ["layer_ids.missing"]


# MLA drafters.


@pytest.mark.parametrize("q_lora_rank", [6, None])
def test_an_mla_drafter_is_checked_tensor_by_tensor(tmp_path: Path, q_lora_rank: int | None) -> None:
    config = MLA | {"q_lora_rank": q_lora_rank}
    target = write_target(tmp_path / "target")
    stored = mla_tensors(q_lora_rank)

    def found(name: str, tensors: dict[str, torch.Tensor]) -> list[str]:
        checkpoint = write_foreign(tmp_path / name, config, tensors)
        return kinds(check_checkpoint(checkpoint, target=target, layers=(2, 30, 58), engine_version="0.5.12"))

    assert found("good", stored) == []
    attention = [name for name in stored if "self_attn" in name]
    assert len(attention) == (7 if q_lora_rank else 5)
    for name in attention:
        assert found("missing", {key: value for key, value in stored.items() if key != name}) == ["tensor.missing"]
        wider = torch.ones(*stored[name].shape[:-1], stored[name].shape[-1] + 1)
        assert found("wider", stored | {name: wider}) == ["tensor.shape"]


def test_an_mla_drafter_needs_a_server_that_knows_it(tmp_path: Path) -> None:
    checkpoint = write_foreign(tmp_path / "draft", MLA, mla_tensors())
    target = write_target(tmp_path / "target")

    (problem, *others) = check_checkpoint(checkpoint, target=target, layers=(2, 30, 58), engine_version="0.5.11")

    assert (problem.kind, kinds(others)) == ("config.architectures", ["tensor.unread"])
    assert "0.5.12" in problem.fix


@pytest.mark.parametrize("key", ["kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"])
def test_an_mla_drafter_needs_all_its_widths(tmp_path: Path, key: str) -> None:
    config = {name: value for name, value in MLA.items() if name != key}
    checkpoint = write_foreign(tmp_path / "draft", config, mla_tensors())

    assert kinds(check_checkpoint(checkpoint)) == ["checkpoint.no_contract", "config.size"]


# Fields that another tool may leave out, but not get wrong.


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("tie_word_embeddings", True, "config.tie_word_embeddings"),
        ("tie_word_embeddings", None, "config.tie_word_embeddings"),
        ("rms_norm_eps", 0, "config.rms_norm_eps"),
        ("rope_theta", None, "config.rope_theta"),
        ("model_type", "qwen3", "config.model_type"),
        ("num_hidden_layers", 2, "config.num_hidden_layers"),
    ],
)
def test_a_wrong_value_in_a_foreign_config_is_named(tmp_path: Path, key: str, value: object, kind: str) -> None:
    target = write_target(tmp_path / "target")

    def found(name: str, config: dict[str, Any]) -> list[str]:
        checkpoint = write_foreign(tmp_path / name, config, llama_tensors())
        return kinds(check_checkpoint(checkpoint, target=target, layers=(1, 29, 57)))

    assert found("wrong", SPECFORGE | {key: value}) == [kind]
    absent = {name: other for name, other in SPECFORGE.items() if name != key}
    assert found("absent", absent) == ([] if key in ("tie_word_embeddings", "rms_norm_eps") else [kind])


@pytest.mark.parametrize("key", ["tie_word_embeddings", "rms_norm_eps"])
def test_a_field_that_our_export_leaves_out_is_named(tmp_path: Path, key: str) -> None:
    assert kinds(check_checkpoint(write_checkpoint(tmp_path, config={key: None}))) == [f"config.{key}"]


# Names.


@pytest.mark.parametrize(
    ("config", "tensors", "engine", "version", "expected"),
    [
        (SPECFORGE, llama_tensors(), "sglang", OLD, []),
        (SPECFORGE, llama_tensors("layers.0."), "sglang", "0.5.12", []),
        (SPECFORGE, llama_tensors("layers.0."), "sglang", "0.5.11", ["tensor.unread"]),
        (SPECFORGE, llama_tensors("model.midlayer."), "sglang", "0.5.11", []),
        (SPECFORGE, llama_tensors("model.layers.0."), "sglang", "0.5.11", ["tensor.unread"]),
        (SPECULATORS, llama_tensors("model.layers.0."), "vllm", None, ["tensor.unread"]),
        (MLA, {f"model.{name}" if "self_attn" in name else name: value for name, value in mla_tensors().items()},
         "sglang", OLD, ["tensor.unread"]),
    ],
)  # fmt: skip
def test_names_that_a_server_does_not_read_are_named(
    tmp_path: Path,
    config: dict[str, Any],
    tensors: dict[str, Any],
    engine: str,
    version: str | None,
    expected: list[str],
) -> None:
    checkpoint = write_foreign(tmp_path / "draft", config, tensors)
    target = write_target(tmp_path / "target")

    found = check_checkpoint(checkpoint, target=target, layers=(2, 30, 58), engine=engine, engine_version=version)

    assert kinds(found) == expected


def test_what_old_sglang_releases_skip_says_nothing_about_other_engines() -> None:
    names = ["layers.0.mlp.up_proj.weight", "fc.weight"]

    assert check_names(recognise(SPECFORGE), names, "vllm", "0.1", "x") == []
    (problem,) = check_names(recognise(SPECFORGE), names, "sglang", "0.5.11", "x")
    assert problem.message == "SGLang 0.5.11 does not read layers.0.mlp.up_proj.weight and 0 more"


def test_vllms_own_name_for_d2t_is_read_by_nobody_but_its_values_are_checked(tmp_path: Path) -> None:
    tensors = llama_tensors()
    renamed = {name: value for name, value in tensors.items() if name != "d2t"}
    renamed["draft_id_to_target_id"] = torch.tensor([2, 4, 5, 9])
    checkpoint = write_foreign(tmp_path / "draft", SPECFORGE, renamed)

    found = kinds(check_checkpoint(checkpoint))

    assert found == ["checkpoint.no_contract", "draft_vocab.out_of_range", "tensor.unread"]


def test_t2d_may_be_missing_since_servers_do_not_read_it(tmp_path: Path) -> None:
    tensors = {name: value for name, value in llama_tensors().items() if name != "t2d"}
    target = write_target(tmp_path / "target")

    def found(d2t: list[int]) -> list[str]:
        checkpoint = write_foreign(tmp_path / "draft", SPECFORGE, tensors | {"d2t": torch.tensor(d2t)})
        return kinds(check_checkpoint(checkpoint, target=target, layers=(2, 30, 58), engine_version=OLD))

    assert found([2, 4, 5, 6]) == []
    assert found([2, 4, 5, 9]) == ["draft_vocab.out_of_range"]
    assert found([2, 2, 1, 0]) == ["draft_vocab.duplicate"]
    assert found([2, 1, -1, -2]) == ["draft_vocab.duplicate"]
    assert found([5, 3, 0, -2]) == ["draft_vocab.not_ascending"]
