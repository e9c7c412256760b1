"""Whole checkpoints: a good one, every seeded fault, and malformed input."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eagle3.errors import Problem, ProblemsError
from eagle3.wiring import assert_wiring, check_checkpoint, describe_checkpoint, draft_vocab_digest, target_facts
from eagle3.wiring.conventions import LAYER_IDS
from tests.unit.wiring.cases import (
    CONTEXT,
    DRAFT_IDS,
    HIDDEN,
    VOCAB,
    change_ids,
    digest,
    kinds,
    make_config,
    make_contract,
    make_tensors,
    write_checkpoint,
    write_store,
)

OLD, NEW = "0.5.12", "0.5.23"


def only(problems: list[Problem], kind: str) -> Problem:
    assert kinds(problems) == [kind], problems
    return problems[0]


@pytest.mark.parametrize("version", ["0.5.11", OLD, "0.5.12.post1", "0.5.13", NEW])
def test_a_good_checkpoint_has_no_problem(tmp_path: Path, version: str) -> None:
    contract = make_contract()
    checkpoint = write_checkpoint(tmp_path / "draft", contract, version)
    dataset = write_store(tmp_path / "store", make_contract(draft_vocab_digest=None))

    assert check_checkpoint(checkpoint, dataset=dataset) == []
    assert check_checkpoint(checkpoint, engine_version=version) == []
    assert check_checkpoint(checkpoint, engine="vllm") == []
    assert_wiring(checkpoint, dataset)


@pytest.mark.parametrize(
    "changes",
    [
        {"target_family": "llama", "num_hidden_layers": 32, "output_indices": (1, 15, 28)},
        {"target_family": "qwen3", "num_hidden_layers": 36, "output_indices": (-1, 2, 18, 33)},
        {"target_family": "kimi_k25", "output_indices": (-1, 2, 30)},
        {"target_family": "gpt_oss", "num_hidden_layers": 24, "output_indices": (1, 11, 23)},
        {"target_family": "deepseek", "output_indices": (1, 29, 57)},
    ],
)
def test_other_families_and_numbers_of_layers(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert check_checkpoint(write_checkpoint(tmp_path, make_contract(**changes))) == []


# The incident and its kin.


@pytest.mark.parametrize(
    ("exported", "served", "kind", "read", "write"),
    [
        (OLD, NEW, "wiring.one_early", "layers 1, 29, 57", "[3, 31, 59]"),
        (NEW, OLD, "wiring.one_late", "layers 3, 31, 59", "[2, 30, 58]"),
    ],
)
def test_a_checkpoint_of_one_version_served_by_another_is_named(
    tmp_path: Path, exported: str, served: str, kind: str, read: str, write: str
) -> None:
    problem = only(check_checkpoint(write_checkpoint(tmp_path, version=exported), engine_version=served), kind)

    assert f"SGLang {served} read the outputs of {read}" in problem.message
    assert f"exported for SGLang {exported}" in problem.message
    assert "trained on the outputs of layers 2, 30, 58" in problem.message
    assert f"write {write}" in problem.fix
    assert f"--engine-version {served}" in problem.fix


def test_the_version_that_it_was_exported_for_is_only_said_where_another_is_checked(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, config=change_ids([2, 30, 58]))

    assert "exported for" not in only(check_checkpoint(checkpoint), "wiring.one_early").message
    unrecorded = write_checkpoint(tmp_path, config={"eagle3": None} | change_ids([2, 30, 58]))
    assert "exported for" not in only(check_checkpoint(unrecorded), "wiring.one_early").message


def test_layers_that_both_versions_read_alike_pass_for_both(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, make_contract(output_indices=(1, 29, 57)), OLD)

    assert check_checkpoint(checkpoint, engine_version=OLD) == []
    assert check_checkpoint(checkpoint, engine_version=NEW) == []


@pytest.mark.parametrize(
    ("version", "ids", "expected"),
    [
        (NEW, [2, 30, 58], ["wiring.one_early"]),
        (NEW, [4, 32, 60], ["wiring.one_late"]),
        (NEW, [0, 3, 31, 59], ["wiring.embedding_added", "tensor.shape"]),
        (NEW, [-1, 3, 31, 59], ["wiring.never_captured", "tensor.shape"]),
        (NEW, [-1, 2, 30, 58], ["wiring.never_captured", "wiring.one_early", "tensor.shape"]),
        (OLD, [-1, 2, 30, 58], ["wiring.never_captured", "wiring.embedding_added", "tensor.shape"]),
        (OLD, [-1, 2, 30], ["wiring.never_captured", "wiring.other_layers"]),
        (NEW, [31, 3, 59], ["wiring.permuted"]),
        (NEW, [30, 2, 58], ["wiring.permuted", "wiring.one_early"]),
        (NEW, [3, 31, 61], ["wiring.never_captured", "wiring.other_layers"]),
        (NEW, [3, 31, 99], ["wiring.never_captured", "wiring.other_layers"]),
        (NEW, [3, 31], ["wiring.other_layers", "tensor.shape"]),
        (NEW, [1, 29, 57], ["wiring.one_early"]),
    ],
)
def test_wrong_layer_ids_are_named(tmp_path: Path, version: str, ids: list[int], expected: list[str]) -> None:
    checkpoint = write_checkpoint(tmp_path, version=version, config=change_ids(ids))

    assert kinds(check_checkpoint(checkpoint)) == expected


@pytest.mark.parametrize(
    ("version", "ids", "reason"),
    [
        (NEW, [-1, 3, 31], "is no layer of the target (the embedding is id 0) in SGLang 0.5.23"),
        (NEW, [3, 31, 99], "is no layer of the target in SGLang 0.5.23"),
        (NEW, [3, 31, 61], "is the last layer's output, which is never visited for this target in SGLang 0.5.23"),
        (OLD, [-1, 30, 58], "is the embedding, which cannot be captured for this target in SGLang 0.5.12"),
    ],
)
def test_why_an_id_is_never_captured_is_said(tmp_path: Path, version: str, ids: list[int], reason: str) -> None:
    problems = check_checkpoint(write_checkpoint(tmp_path, version=version, config=change_ids(ids)))

    assert problems[0].kind == "wiring.never_captured"
    assert problems[0].message.endswith(f"{ids} {reason}")


def test_the_embedding_of_the_incident_is_put_in_words(tmp_path: Path) -> None:
    problems = check_checkpoint(write_checkpoint(tmp_path, version=OLD, config=change_ids([-1, 2, 30, 58])))
    added = next(problem for problem in problems if problem.kind == "wiring.embedding_added")

    assert "the embedding and the outputs of layers 2, 30, 58" in added.message
    assert "write [2, 30, 58]" in added.fix


def test_fault_22_the_ids_of_the_other_convention_are_refused_both_ways(tmp_path: Path) -> None:
    contract = make_contract(num_hidden_layers=8, output_indices=(2, 4, 5), target_family="deepseek")
    early = write_checkpoint(tmp_path / "early", contract, config=change_ids([2, 4, 5]))
    right = write_checkpoint(tmp_path / "right", contract, config=change_ids([3, 5, 6]))

    assert kinds(check_checkpoint(early)) == ["wiring.one_early"]
    assert check_checkpoint(right) == []
    assert kinds(check_checkpoint(right, engine_version=OLD)) == ["wiring.one_late"]


def test_what_no_list_can_say_is_said(tmp_path: Path) -> None:
    contract = make_contract(output_indices=(0, 2, 30))
    checkpoint = write_checkpoint(tmp_path, contract, OLD)

    problem = only(check_checkpoint(checkpoint, engine_version=NEW), "wiring.one_early")

    assert "no list of ids is right for SGLang 0.5.23" in problem.fix


@pytest.mark.parametrize(
    ("top_level", "kind"),
    [
        ([2, 30, 58], "wiring.vllm_key"),
        ([0, 3, 31, 59], "wiring.vllm_key"),
        ([31, 3, 59], "wiring.vllm_key"),
        ("3,31,59", "layer_ids.type"),
    ],
)
def test_the_key_for_vllm_is_checked_too(tmp_path: Path, top_level: object, kind: str) -> None:
    checkpoint = write_checkpoint(tmp_path, config={LAYER_IDS: top_level})

    assert kinds(check_checkpoint(checkpoint)) == [kind]


@pytest.mark.parametrize("recorded", [[1, 29, 57], [], "2,30,58"])
def test_recorded_output_indices_that_are_not_the_contracts(tmp_path: Path, recorded: object) -> None:
    checkpoint = write_checkpoint(tmp_path, config={"eagle3": {"output_indices": recorded}})

    only(check_checkpoint(checkpoint), "wiring.recorded")


def test_vllm_needs_its_own_key_and_ignores_sglangs(tmp_path: Path) -> None:
    nested_wrong = write_checkpoint(tmp_path / "a", config=change_ids([2, 30, 58]))
    absent = write_checkpoint(tmp_path / "b", config={LAYER_IDS: None})

    assert check_checkpoint(nested_wrong, engine="vllm") == []
    assert kinds(check_checkpoint(absent, engine="vllm")) == ["layer_ids.nested_only"]
    assert check_checkpoint(absent) == []


def test_vllm_takes_boundaries(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, config={LAYER_IDS: [2, 30, 58]})

    assert "layers 1, 29, 57" in only(check_checkpoint(checkpoint, engine="vllm"), "wiring.one_early").message


# Contracts of other artifacts.


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"output_indices": (1, 29, 57)}, "contract.output_indices"),
        ({"output_indices": (-1, 2, 30, 58)}, "contract.output_indices"),
        ({"target_name": "other"}, "contract.target_name"),
        ({"target_config_digest": digest("1")}, "contract.target_config_digest"),
        ({"tokenizer_digest": digest("2")}, "contract.tokenizer_digest"),
        ({"chat_template_digest": digest("3")}, "contract.chat_template_digest"),
        ({"draft_vocab_digest": digest("4")}, "contract.draft_vocab_digest"),
        ({"last_hidden_states": "pre_norm"}, "contract.last_hidden_states"),
    ],
)
def test_a_dataset_that_the_checkpoint_does_not_belong_to(tmp_path: Path, change: dict[str, Any], kind: str) -> None:
    checkpoint = write_checkpoint(tmp_path / "draft")
    dataset = write_store(tmp_path / "store", make_contract(**change))

    only(check_checkpoint(checkpoint, dataset=dataset), kind)
    with pytest.raises(ProblemsError, match=kind.replace(".", r"\.")):
        assert_wiring(checkpoint, dataset)


def test_a_dataset_extracted_one_layer_early_is_put_in_words(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "draft")
    dataset = write_store(tmp_path / "store", make_contract(output_indices=(1, 29, 57)))

    (problem,) = check_checkpoint(checkpoint, dataset=dataset)

    assert "in dataset, every layer is one too early" in problem.message


def test_a_contract_with_another_draft_vocab_than_the_tables(tmp_path: Path) -> None:
    contract = make_contract(draft_vocab_digest=draft_vocab_digest((1, 5, 7, 9), VOCAB))

    only(check_checkpoint(write_checkpoint(tmp_path, contract)), "contract.draft_vocab_digest")


def test_a_contract_that_does_not_say_which_draft_vocab(tmp_path: Path) -> None:
    only(
        check_checkpoint(write_checkpoint(tmp_path, make_contract(draft_vocab_digest=None))),
        "contract.draft_vocab_digest",
    )


def test_a_contract_for_a_target_of_other_widths(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, make_contract(hidden_size=16, vocab_size=13))

    assert kinds(check_checkpoint(checkpoint)) == ["contract.hidden_size", "contract.vocab_size"]


def test_a_missing_contract_still_leaves_the_dataset_to_compare_with(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "draft", version=OLD)
    (checkpoint / "eagle3_contract.json").unlink()
    dataset = write_store(tmp_path / "store", make_contract())

    assert kinds(check_checkpoint(checkpoint)) == ["checkpoint.no_contract"]
    found = kinds(check_checkpoint(checkpoint, dataset=dataset, engine_version=NEW))
    assert found == ["checkpoint.no_contract", "wiring.one_early"]


# The target.


def write_target(folder: Path, **changes: Any) -> Path:
    folder.mkdir()
    config = {
        "model_type": "kimi_k25",
        "num_hidden_layers": 61,
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
    }
    (folder / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
    return folder


def test_the_target_itself_is_compared(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "draft")
    target = write_target(tmp_path / "t", model_type="deepseek_v3", num_hidden_layers=60, hidden_size=16, vocab_size=13)

    found = kinds(check_checkpoint(checkpoint, target=target))

    fields = ["family", "num_hidden_layers", "hidden_size", "vocab_size", "config_digest"]
    assert found == [f"target.{field}" for field in fields]


def test_the_targets_own_config_is_recognised(tmp_path: Path) -> None:
    target = write_target(tmp_path / "t")
    contract = make_contract(target_config_digest=target_facts(target).config_digest)

    assert check_checkpoint(write_checkpoint(tmp_path / "draft", contract), target=target) == []


def test_a_known_targets_name_is_compared(tmp_path: Path) -> None:
    found = kinds(check_checkpoint(write_checkpoint(tmp_path), target="kimi-k2.5"))

    assert found == ["target.hidden_size", "target.vocab_size"]


def test_an_unknown_target_is_named(tmp_path: Path) -> None:
    only(check_checkpoint(write_checkpoint(tmp_path), target="nothing"), "target.unknown")


def test_a_context_below_the_targets_is_refused_with_both_numbers(tmp_path: Path) -> None:
    contract = make_contract(target_name="kimi-k2.5")
    checkpoint = write_checkpoint(tmp_path / "a", contract, config={"max_position_embeddings": 2048})

    problem = only(check_checkpoint(checkpoint), "context.too_short")

    assert "2048" in problem.message
    assert "262144" in problem.message


def test_the_context_that_it_is_served_with_may_be_recorded(tmp_path: Path) -> None:
    contract = make_contract(target_name="kimi-k2.5")
    for context, expected in ((2048, []), (2049, ["context.too_short"])):
        config = {"max_position_embeddings": 2048, "eagle3": {"context_length": context}}
        assert kinds(check_checkpoint(write_checkpoint(tmp_path, contract, config=config))) == expected


def test_the_context_comes_from_the_dataset_or_the_target(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "draft", config={"max_position_embeddings": 2048})
    dataset = write_store(tmp_path / "store", make_contract(), target_config={"max_position_embeddings": 4096})
    target = write_target(tmp_path / "t")

    assert check_checkpoint(checkpoint) == []
    assert kinds(check_checkpoint(checkpoint, dataset=dataset)) == ["context.too_short"]
    assert "context.too_short" in kinds(check_checkpoint(checkpoint, target=target))


# The version that is checked.


def test_the_checked_version_is_said_and_why(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "a", version=OLD)
    unrecorded = write_checkpoint(tmp_path / "b", config={"eagle3": None})

    assert describe_checkpoint(checkpoint) == (
        "SGLang 0.5.12 (config.json says it was exported for it) reads the outputs of layers 2, 30, 58 of tiny-kimi "
        "from [2, 30, 58]"
    )
    assert "SGLang 0.5.23 (the newest known) reads the outputs of layers 2, 30, 58" in describe_checkpoint(unrecorded)
    assert "SGLang 0.5.16 (as asked)" in describe_checkpoint(unrecorded, engine_version="0.5.16")
    assert "vLLM 0.33.0 (the newest known) reads the outputs of layers 2, 30, 58" in describe_checkpoint(
        checkpoint, "vllm"
    )


@pytest.mark.parametrize(
    ("engine", "version", "kind"),
    [
        ("sglang", "0.5.24", "engine.version_unknown"),
        ("sglang", "0.5.9", "engine.unsupported"),
        ("sglang", "newest", "engine.version_malformed"),
        ("vllm", "0.1", "engine.version_unknown"),
        ("tgi", None, "engine.unknown"),
        ("transformers", None, "engine.unknown"),
    ],
)
def test_a_version_that_is_not_known_is_one_error(tmp_path: Path, engine: str, version: str | None, kind: str) -> None:
    found = kinds(check_checkpoint(write_checkpoint(tmp_path), engine=engine, engine_version=version))

    assert found == [kind]


def test_a_family_that_is_not_known_is_one_error(tmp_path: Path) -> None:
    contract = make_contract()
    checkpoint = write_checkpoint(tmp_path, contract)
    make_contract(target_family="mamba").save(checkpoint)

    only(check_checkpoint(checkpoint), "engine.family_unknown")


# config.json.


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "config.architectures"),
        ({"architectures": None}, "config.architectures"),
        ({"model_type": "qwen3"}, "config.model_type"),
        ({"num_hidden_layers": 2}, "config.num_hidden_layers"),
        ({"num_hidden_layers": True}, "config.num_hidden_layers"),
        ({"tie_word_embeddings": True}, "config.tie_word_embeddings"),
        ({"tie_word_embeddings": None}, "config.tie_word_embeddings"),
        ({"rms_norm_eps": "1e-5"}, "config.rms_norm_eps"),
        ({"rms_norm_eps": True}, "config.rms_norm_eps"),
        ({"rope_theta": None}, "config.rope_theta"),
        ({"hidden_act": "gelu"}, "config.hidden_act"),
        ({"attention_bias": True}, "config.attention_bias"),
        ({"bias": True}, "config.bias"),
        ({"hidden_size": None}, "config.size"),
        ({"hidden_size": "8"}, "config.size"),
        ({"draft_vocab_size": None}, "config.size"),
        ({"draft_vocab_size": 13}, "config.size"),
        ({"draft_vocab_size": 4.0}, "config.size"),
        ({"num_attention_heads": 3}, "config.size"),
        ({"head_dim": 0}, "config.size"),
        ({"target_hidden_size": 0}, "config.size"),
        ({"num_aux_hidden_states": "3"}, "config.size"),
        ({"q_lora_rank": -1}, "config.size"),
        ({"max_position_embeddings": True}, "config.size"),
        ({"eagle3": []}, "config.eagle3"),
        ({"eagle3": {"exported_for": {"engine": "sglang"}}}, "config.eagle3"),
        ({"eagle3": {"exported_for": "0.5.23"}}, "config.eagle3"),
        ({"eagle3": {"context_length": 0}}, "config.eagle3"),
        ({"eagle_config": {"use_aux_hidden_state": False, LAYER_IDS: [3, 31, 59]}}, "config.use_aux_hidden_state"),
    ],
)
def test_a_wrong_config_value_is_one_named_error(tmp_path: Path, change: dict[str, Any], kind: str) -> None:
    problem = only(check_checkpoint(write_checkpoint(tmp_path, config=change)), kind)

    assert kind.split(".")[-1] in ("size", "architectures", "model_type") or kind.split(".")[-1] in problem.message


@pytest.mark.parametrize(
    ("ids", "kind"),
    [
        (["3", "31", "59"], "layer_ids.type"),
        ([3.0, 31.0, 59.0], "layer_ids.type"),
        ([True, 31, 59], "layer_ids.type"),
        (None, "layer_ids.type"),
        ([[3, 31, 59]], "layer_ids.type"),
        ([3, None, 59], "layer_ids.type"),
        ({"0": 3}, "layer_ids.type"),
        ("3,31,59", "layer_ids.type"),
        ([], "layer_ids.type"),
        (3, "layer_ids.type"),
        (True, "layer_ids.type"),
        ([3, 31, 31], "layer_ids.duplicate"),
    ],
)
def test_ids_of_a_wrong_type_are_one_error(tmp_path: Path, ids: object, kind: str) -> None:
    config = {"eagle_config": {LAYER_IDS: ids}}

    found = kinds(check_checkpoint(write_checkpoint(tmp_path, config=config)))

    assert found == [kind]


@pytest.mark.parametrize("eagle_config", [None, {}])
def test_missing_ids_are_named_with_what_the_server_would_do(
    tmp_path: Path, eagle_config: dict[str, Any] | None
) -> None:
    checkpoint = write_checkpoint(tmp_path, config={"eagle_config": eagle_config})

    assert "silently" in only(check_checkpoint(checkpoint), "layer_ids.missing").message


def test_rope_in_the_new_layout_is_accepted(tmp_path: Path) -> None:
    config = {"rope_theta": None, "rope_parameters": {"rope_theta": 50000.0, "rope_type": "default"}}

    assert check_checkpoint(write_checkpoint(tmp_path, config=config)) == []


def test_options_that_an_old_server_would_skip(tmp_path: Path) -> None:
    options = write_checkpoint(tmp_path / "a", version="0.5.11", config={"norm_output": True})
    four = write_checkpoint(tmp_path / "b", make_contract(output_indices=(2, 30, 40, 58)), "0.5.11")

    assert kinds(check_checkpoint(options)) == ["config.option_unknown"]
    assert kinds(check_checkpoint(four)) == ["config.option_unknown"]
    for checkpoint in (options, four):
        assert check_checkpoint(checkpoint, engine_version="0.5.12") == []


# The weights.


@pytest.mark.parametrize("name", sorted(make_tensors(make_contract())))
def test_fault_23_every_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    problem = only(check_checkpoint(write_checkpoint(tmp_path, tensors={name: None})), "tensor.missing")

    assert f"no tensor {name}," in problem.message


def test_fault_23_a_promised_head_that_is_absent_is_named(tmp_path: Path) -> None:
    problem = only(check_checkpoint(write_checkpoint(tmp_path, tensors={"lm_head.weight": None})), "tensor.missing")

    assert "promises an own head" in problem.message


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("lm_head.weight", "the config promises an own head, which the server would leave uninitialised"),
        ("d2t", "draft ids would be taken for target ids"),
        ("t2d", "it says which target ids the drafter can propose"),
        ("fc.weight", "the server would leave it uninitialised"),
    ],
)
def test_a_missing_tensor_says_what_would_happen(tmp_path: Path, name: str, why: str) -> None:
    problem = only(check_checkpoint(write_checkpoint(tmp_path, tensors={name: None})), "tensor.missing")

    assert problem.message.endswith(f": {why}")


@pytest.mark.parametrize("name", sorted(make_tensors(make_contract())))
def test_every_tensor_of_another_shape_is_named(tmp_path: Path, name: str) -> None:
    tensor = make_tensors(make_contract())[name]
    wider = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 1, dtype=tensor.dtype)

    problem = only(check_checkpoint(write_checkpoint(tmp_path, tensors={name: wider})), "tensor.shape")

    assert problem.message.startswith(name)


@pytest.mark.parametrize("name", sorted(make_tensors(make_contract())))
def test_fault_19_every_tensor_of_another_type_is_named(tmp_path: Path, name: str) -> None:
    tensor = make_tensors(make_contract())[name].to(torch.int32)

    problem = only(check_checkpoint(write_checkpoint(tmp_path, tensors={name: tensor})), "tensor.dtype")

    assert problem.message.startswith(name)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.bfloat16])
def test_fault_09_d2t_of_another_type_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    d2t = make_tensors(make_contract())["d2t"].to(dtype)

    only(check_checkpoint(write_checkpoint(tmp_path, tensors={"d2t": d2t})), "tensor.dtype")


@pytest.mark.parametrize(
    ("d2t", "kind"),
    [
        ([2, 5, 7, 9], "draft_vocab.absolute_ids"),
        ([2, 4, 5, 4], "draft_vocab.duplicate"),
        ([2, 4, 5, 9], "draft_vocab.out_of_range"),
        ([2, 4, 5, 5], "draft_vocab.disagree"),
    ],
)
def test_fault_09_wrong_values_of_d2t_are_refused(tmp_path: Path, d2t: list[int], kind: str) -> None:
    only(check_checkpoint(write_checkpoint(tmp_path, tensors={"d2t": torch.tensor(d2t)})), kind)


def test_fault_09_a_mask_that_marks_another_number_of_tokens(tmp_path: Path) -> None:
    t2d = make_tensors(make_contract())["t2d"].clone()
    t2d[0] = True

    only(check_checkpoint(write_checkpoint(tmp_path, tensors={"t2d": t2d})), "draft_vocab.count")


def test_fault_19_a_whole_vocab_needs_no_tables_a_reduced_one_does(tmp_path: Path) -> None:
    whole = make_contract(draft_vocab_digest=draft_vocab_digest(range(VOCAB), VOCAB))
    head = {"lm_head.weight": torch.ones(VOCAB, HIDDEN), "d2t": None, "t2d": None}
    config = {"draft_vocab_size": VOCAB}

    assert check_checkpoint(write_checkpoint(tmp_path / "a", whole, config=config, tensors=head)) == []
    reduced = write_checkpoint(tmp_path / "b", tensors={"d2t": None, "t2d": None})
    assert kinds(check_checkpoint(reduced)) == ["tensor.missing", "tensor.missing"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_may_have_any_type_that_servers_cast(tmp_path: Path, dtype: torch.dtype) -> None:
    floats = {name: value for name, value in make_tensors(make_contract()).items() if value.is_floating_point()}
    tensors = {name: value.to(dtype) for name, value in floats.items()}

    assert check_checkpoint(write_checkpoint(tmp_path, tensors=tensors)) == []


def test_extra_and_repeated_tensors_are_named(tmp_path: Path) -> None:
    tensors = {"surprise.weight": torch.ones(1), "model.norm.weight": torch.ones(HIDDEN)}

    found = kinds(check_checkpoint(write_checkpoint(tmp_path, tensors=tensors)))

    assert sorted(found) == ["tensor.extra", "tensor.repeated", "tensor.repeated"]


def test_an_embedding_is_welcome_but_only_of_the_right_shape(tmp_path: Path) -> None:
    good = {"embed_tokens.weight": torch.ones(VOCAB, HIDDEN)}
    bad = {"embed_tokens.weight": torch.ones(VOCAB + 1, HIDDEN)}

    assert check_checkpoint(write_checkpoint(tmp_path / "a", tensors=good)) == []
    assert kinds(check_checkpoint(write_checkpoint(tmp_path / "b", tensors=bad))) == ["tensor.shape"]


def test_the_layer_may_be_called_layers_0_but_old_servers_skip_it(tmp_path: Path) -> None:
    stored = make_tensors(make_contract())
    renamed: dict[str, torch.Tensor | None] = {name: None for name in stored if name.startswith("midlayer.")}
    renamed |= {f"model.{name.replace('midlayer', 'layers.0')}": stored[name] for name in renamed}
    checkpoint = write_checkpoint(tmp_path, version=OLD, tensors=renamed)

    assert check_checkpoint(checkpoint) == []
    assert kinds(check_checkpoint(checkpoint, engine_version="0.5.11")) == ["tensor.unread"]


# Malformed input: one clear error each, never a traceback.


def test_what_is_no_checkpoint_is_one_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x", encoding="utf-8")

    for path in (tmp_path, tmp_path / "absent", file):
        only(check_checkpoint(path), "checkpoint.not_a_checkpoint")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff", b"3"])
def test_a_broken_config_is_one_error(tmp_path: Path, content: bytes) -> None:
    checkpoint = write_checkpoint(tmp_path)
    (checkpoint / "config.json").write_bytes(content)

    (problem,) = check_checkpoint(checkpoint)

    assert problem.kind.startswith("file.not_")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}"])
def test_a_broken_contract_is_one_error(tmp_path: Path, content: bytes) -> None:
    checkpoint = write_checkpoint(tmp_path)
    (checkpoint / "eagle3_contract.json").write_bytes(content)

    (problem,) = check_checkpoint(checkpoint)

    assert problem.kind in ("file.not_json", "contract.format")


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"{}"])
def test_a_broken_dataset_is_one_error(tmp_path: Path, content: bytes | None) -> None:
    checkpoint = write_checkpoint(tmp_path / "draft")
    dataset = write_store(tmp_path / "store", make_contract())
    if content is None:
        shutil.rmtree(dataset)
    else:
        (dataset / "manifest.json").write_bytes(content)

    assert len(check_checkpoint(checkpoint, dataset=dataset)) == 1


def test_broken_weights_are_one_error(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path)
    weights = checkpoint / "model.safetensors"
    whole = weights.read_bytes()
    cases = {
        "safetensors.truncated": whole[:-5],
        "safetensors.too_long": whole + b"x",
        "safetensors.format": b"not weights at all",
        "safetensors.pickle": pickle.dumps({"fc.weight": [1.0] * 99}),
    }
    for kind, content in cases.items():
        weights.write_bytes(content)
        only(check_checkpoint(checkpoint), kind)
    weights.unlink()
    only(check_checkpoint(checkpoint), "checkpoint.no_weights")
    (checkpoint / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    only(check_checkpoint(checkpoint), "checkpoint.pickle")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 70) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
KEYS = st.sampled_from([*sorted(make_config(make_contract())), "rope_parameters", "target_hidden_size", "norm_output"])


@pytest.fixture(scope="module")
def rewritten(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], Path]:
    """A good checkpoint whose config.json is replaced."""
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("checkpoint"))

    def rewrite(config: dict[str, Any]) -> Path:
        (checkpoint / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return checkpoint

    return rewrite


@settings(deadline=None, max_examples=60)
@given(key=KEYS, value=JSON)
def test_no_config_value_ends_in_a_traceback(
    rewritten: Callable[[dict[str, Any]], Path], key: str, value: object
) -> None:
    checkpoint = rewritten(make_config(make_contract()) | {key: value})

    for problem in check_checkpoint(checkpoint, target="kimi-k2.5"):
        assert problem.message
        assert problem.fix


@settings(deadline=None, max_examples=60)
@given(ids=st.lists(st.integers(-2, 62), min_size=1, max_size=4), version=st.sampled_from(["0.5.11", OLD, "0.5.13"]))
@example(ids=[2, 30, 58], version=OLD)
@example(ids=[3, 31, 59], version="0.5.13")
@example(ids=[31, 3, 59], version="0.5.13")
def test_no_ids_but_the_right_ones_pass(
    rewritten: Callable[[dict[str, Any]], Path], ids: list[int], version: str
) -> None:
    right = [3, 31, 59] if version == "0.5.13" else [2, 30, 58]
    checkpoint = rewritten(make_config(make_contract(), version, **change_ids(ids)))

    assert (check_checkpoint(checkpoint) == []) == (ids == right)


def test_the_draft_ids_of_the_cases_are_what_the_tables_say() -> None:
    tensors = make_tensors(make_contract())

    assert (tensors["d2t"] + torch.arange(4)).tolist() == list(DRAFT_IDS)
