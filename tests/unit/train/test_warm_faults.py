"""What `init_from` refuses, all at once and before anything is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle3.config import TrainConfig
from eagle3.data.store import StoredSample
from eagle3.errors import Problem, ProblemsError
from eagle3.serve.export import export_run
from eagle3.train.setup import make_setup
from eagle3.train.trainer import run_training
from tests.stores import HIDDEN, VOCAB, random_contract, write_random_store
from tests.unit.serve.cases import edit_tensors, make_kimi_run, serve
from tests.unit.train.warm_cases import LAYER_IDS, make_first_run, warm_config, write_as_another_tool

NAN = float("nan")
Make = Callable[..., TrainConfig]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_first_run(tmp_path_factory.mktemp("first"))


@pytest.fixture
def config_of(first: Path, tmp_path: Path) -> Make:
    """The config of a run that starts from the export as another tool would write it, changed."""

    def make(values: dict[str, object] | None = None, **changes: Any) -> TrainConfig:
        start = write_as_another_tool(first / "export", tmp_path / "other", **changes)
        return warm_config(first, tmp_path / "run", start, **(values or {}))

    return make


def problems(config: TrainConfig) -> list[Problem]:
    with pytest.raises(ProblemsError) as caught:
        run_training(config)
    assert not Path(config.output).exists()
    return list(caught.value.problems)


def kinds(config: TrainConfig) -> list[str]:
    return sorted(problem.kind for problem in problems(config))


def ids(*values: int) -> dict[str, Any]:
    return {"eagle_config": {"use_aux_hidden_state": True, LAYER_IDS: list(values)}}


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({"fc__weight": None}, ["tensor.missing"]),
        ({"midlayer__mlp__bias": torch.ones(3)}, ["tensor.extra"]),
        ({"layers__1__mlp__up_proj__weight": torch.ones(24, HIDDEN)}, ["tensor.extra"]),
        ({"fc__weight": torch.ones(HIDDEN, 2 * HIDDEN)}, ["tensor.shape"]),
        ({"lm_head__weight": torch.ones(23, HIDDEN)}, ["tensor.shape"]),
        ({"norm__weight": torch.tensor([NAN] * HIDDEN)}, ["tensor.not_finite"]),
        ({"norm__weight": torch.tensor([float("-inf")] * HIDDEN, dtype=torch.bfloat16)}, ["tensor.not_finite"]),
        ({"norm__weight": torch.ones(HIDDEN, dtype=torch.int64)}, ["tensor.dtype"]),
        ({"norm__weight": torch.ones(HIDDEN, dtype=torch.float64)}, ["tensor.dtype"]),
        ({"layers__0__input_layernorm__weight": torch.ones(HIDDEN)}, ["tensor.repeated", "tensor.repeated"]),
        ({"d2t": None}, ["tensor.missing"]),
        ({"d2t": torch.arange(24) + 2, "t2d": None}, ["draft_vocab.out_of_range"]),
        ({"d2t": torch.zeros(24, dtype=torch.int32)}, ["tensor.dtype"]),
        ({"d2t": torch.zeros(24, dtype=torch.int64)}, ["draft_vocab.disagree"]),
        ({"d2t": -torch.arange(24)}, ["draft_vocab.duplicate"]),
    ],
)
def test_tensors_that_do_not_fit_are_named(config_of: Make, tensors: dict[str, Any], expected: list[str]) -> None:
    assert kinds(config_of(**tensors)) == expected


def test_absolute_ids_are_told_from_offsets(first: Path, config_of: Make) -> None:
    d2t = load_file(first / "export" / "model.safetensors")["d2t"]
    assert kinds(config_of(d2t=d2t + torch.arange(24))) == ["draft_vocab.absolute_ids"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_hidden_layers": 2}, {"config.num_hidden_layers"}),
        ({"tie_word_embeddings": True}, {"config.tie_word_embeddings"}),
        ({"hidden_act": "gelu"}, {"config.hidden_act"}),
        ({"attention_bias": True}, {"config.attention_bias"}),
        ({"rms_norm_eps": 0}, {"config.rms_norm_eps"}),
        ({"rope_theta": None}, {"config.rope_theta"}),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, {"draft.rope.kind"}),
        ({"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}}, {"draft.rope.value"}),
        ({"norm_before_residual": True}, {"init.architecture"}),
        ({"norm_output": "yes"}, {"init.architecture"}),
        ({"architectures": ["Eagle3OfTomorrow"]}, {"init.architecture"}),
        ({"architectures": ["LlamaForCausalLMEagle3", "LlamaForCausalLM"]}, {"init.architecture"}),
        ({"eagle_config": ids(0, 2, 5)["eagle_config"] | {"parallel_draft_step": 2}}, {"init.architecture"}),
        ({"model_type": "qwen3"}, {"init.architecture", "config.model_type"}),
        ({"draft_vocab_size": None}, {"config.size"}),
        ({"hidden_size": "16"}, {"config.size"}),
        ({"draft_vocab_size": 23}, {"tensor.shape"}),
        ({"target_hidden_size": 8}, {"tensor.shape", "tensor.missing", "init.target_hidden_size",
         "draft.target_hidden_size"}),
        ({"vocab_size": 40}, {"init.vocab_size", "tensor.shape"}),
        ({"norm_before_fc": True}, {"tensor.missing"}),
        ({"fc_norm": True}, {"tensor.missing"}),
        ({"num_aux_hidden_states": 4}, {"init.num_aux", "tensor.shape"}),
        (ids(0, 2), {"init.num_aux", "tensor.shape", "init.layers"}),
        (ids(0, 2, 2), {"layer_ids.duplicate", "init.layers_unknown"}),
        ({"eagle_config": {LAYER_IDS: "0,2,5"}}, {"layer_ids.type", "init.layers_unknown"}),
        (ids(1, 3, 6), {"init.layers"}),
        (ids(-1, 0, 2, 5), {"init.layers", "init.num_aux", "tensor.shape"}),
        ({"eagle_config": None}, {"init.layers_unknown"}),
        (ids(0, 2, 99), {"init.layers_unknown"}),
        ({LAYER_IDS: [0, 2, 5]}, {"init.layers_ambiguous"}),
        (ids(5, 0, 2), {"init.layers_ambiguous"}),
    ],
)  # fmt: skip
def test_a_config_json_that_does_not_fit_is_named(config_of: Make, config: dict[str, Any], expected: set[str]) -> None:
    assert set(kinds(config_of(config=config))) == expected


def test_everything_that_is_wrong_is_listed_at_once(config_of: Make) -> None:
    config = config_of(
        {"draft": {"intermediate_size": 40, "draft_vocab_size": 16}},
        config={"tie_word_embeddings": True, **ids(1, 3, 6)},
        norm__weight=torch.tensor([NAN] * HIDDEN),
        fc__weight=None,
        d2t=torch.arange(24),
    )
    assert set(kinds(config)) == {
        "config.tie_word_embeddings", "init.layers", "tensor.not_finite", "tensor.missing", "init.shape",
        "draft_vocab.out_of_range",
    }  # fmt: skip


def test_layers_of_another_drafter_are_described(config_of: Make) -> None:
    (problem,) = problems(config_of(config=ids(1, 3, 6)))
    assert "layers 1, 3, 6 by" in problem.message and "every layer is one too late" in problem.message


def test_without_ids_fc_says_how_many_layers_it_reads(config_of: Make) -> None:
    config = config_of(config={"eagle_config": None}, fc__weight=torch.ones(HIDDEN, 2 * HIDDEN))
    assert kinds(config) == ["init.layers_unknown", "init.num_aux"]


@pytest.mark.parametrize("version", ["0.5.12.post1", "0.5.23"])
def test_our_own_export_for_kimi_needs_no_explanation(tmp_path: Path, version: str) -> None:
    run = make_kimi_run(tmp_path)
    export_run(serve(run, tmp_path / "out", engine_version=version))
    values = {"dataset": run.dataset, "output_indices": [2, 30, 58], "eval_fraction": 0.0}
    setup = make_setup(warm_config(tmp_path, tmp_path / "new", tmp_path / "out", **values))
    assert setup.contract == run.contract


def test_what_is_not_in_config_json_has_to_be_said(first: Path, config_of: Make) -> None:
    config = config_of({"init_layers": [0, 2, 5]}, config={"eagle_config": None})
    assert any("as init_layers says" in note for note in make_setup(config).notes)
    other = config.model_copy(update={"init_layers": [1, 3, 6]})
    assert kinds(other) == ["init.layers"]
    assert kinds(config.model_copy(update={"init_layers": [5, 99]})) == ["layers.out_of_range"]


def test_what_is_said_must_be_a_reading_of_config_json(config_of: Make) -> None:
    (problem,) = problems(config_of({"init_layers": [0, 2, 5]}, config=ids(1, 3, 6)))
    assert problem.kind == "init.layers" and "which nobody reads from its config.json" in problem.message


@pytest.mark.parametrize(
    ("nested", "stored", "said", "expected"),
    [
        ([2, 30, 58], (2, 30, 58), None, ["init.layers_ambiguous"]),
        ([2, 30, 58], (2, 30, 58), [2, 30, 58], []),
        ([2, 30, 58], (1, 29, 57), [1, 29, 57], []),
        ([2, 30, 58], (1, 29, 57), None, ["init.layers_ambiguous"]),
        ([2, 30, 58], (1, 29, 57), [2, 30, 58], ["init.layers"]),
        ([3, 31, 59], (2, 30, 58), None, ["init.layers_ambiguous"]),
        ([3, 31, 59], (2, 30, 58), [2, 30, 58], []),
        ([1, 29, 57], (1, 29, 57), None, []),
        ([1, 29, 57], (2, 30, 58), None, ["init.layers"]),
        ([5, 31, 59], (2, 30, 58), None, ["init.layers"]),
    ],
)
def test_kimis_ids_mean_two_things_unless_they_start_with_1(
    first: Path, tmp_path: Path, nested: list[int], stored: tuple[int, ...], said: list[int] | None, expected: list[str]
) -> None:
    contract = replace(random_contract(), target_family="kimi_k25", num_hidden_layers=61, output_indices=stored)
    store = write_random_store(tmp_path / "store", contract=contract)
    start = write_as_another_tool(first / "export", tmp_path / "other", config=ids(*nested))
    values = {"dataset": store, "output_indices": list(stored), "init_layers": said}
    config = warm_config(first, tmp_path / "run", start, **values)
    if expected:
        assert kinds(config) == expected
    else:
        make_setup(config)


def test_the_contract_beside_an_export_is_the_truth(first: Path, tmp_path: Path) -> None:
    contract = replace(random_contract(), output_indices=(1, 3, 6), tokenizer_digest="sha256:" + "9" * 64)
    store = write_random_store(tmp_path / "store", contract=contract)
    config = warm_config(first, tmp_path / "run", first / "export", dataset=store, output_indices=[1, 3, 6])
    for start in ("export", "run"):
        found = problems(config.model_copy(update={"init_from": str(first / start)}))
        assert [item.kind for item in found] == ["contract.output_indices", "contract.tokenizer_digest"]
        assert "one too early" in found[0].message
    (problem,) = problems(warm_config(first, tmp_path / "run", first / "export", init_layers=[1, 3, 6]))
    assert (problem.where, problem.kind) == ("init_layers", "contract.output_indices")
    make_setup(warm_config(first, tmp_path / "run", first / "export", init_layers=[0, 2, 5]))


def test_an_export_that_was_edited_is_refused(first: Path, tmp_path: Path) -> None:
    start = tmp_path / "edited"
    start.mkdir()
    for file in (first / "export").iterdir():
        (start / file.name).write_bytes(file.read_bytes())
    config = json.loads((start / "config.json").read_text())
    config["eagle_config"][LAYER_IDS] = [-1, 0, 2, 5]
    (start / "config.json").write_text(json.dumps(config))
    edit_tensors(start / "model.safetensors", **{"norm.weight": torch.full((HIDDEN,), NAN)})
    found = kinds(warm_config(first, tmp_path / "run", start))
    assert {"wiring.embedding_added", "tensor.not_finite", "tensor.shape"} <= set(found)


def test_states_of_another_type_are_no_difference(first: Path, tmp_path: Path) -> None:
    def halve(sample: StoredSample) -> StoredSample:
        aux, last = (part.bfloat16() for part in (sample.aux_hidden_states, sample.last_hidden_states))
        return replace(sample, aux_hidden_states=aux, last_hidden_states=last)

    contract = replace(random_contract(), dtype="bfloat16")
    store = write_random_store(tmp_path / "store", contract=contract, change=halve)
    config = warm_config(first, tmp_path / "run", first / "export", dataset=store)
    setup = make_setup(config)
    assert setup.contract.dtype == "bfloat16"
    assert torch.equal(setup.module.model.fc.weight, load_file(first / "export" / "model.safetensors")["fc.weight"])
    other = replace(random_contract(), dtype="bfloat16", last_hidden_states="pre_norm")
    store = write_random_store(tmp_path / "other", contract=other, change=halve)
    assert kinds(config.model_copy(update={"dataset": str(store)})) == ["contract.last_hidden_states"]


def test_a_full_draft_vocab_needs_no_tables(first: Path, tmp_path: Path) -> None:
    head = {"lm_head__weight": torch.randn(VOCAB, HIDDEN), "d2t": None, "t2d": None}
    start = write_as_another_tool(first / "export", tmp_path / "o", config={"draft_vocab_size": VOCAB}, **head)
    setup = make_setup(warm_config(first, tmp_path / "run", start))
    assert setup.vocab.ids.tolist() == list(range(VOCAB))


def test_weights_that_are_no_safetensors_are_refused_unread(first: Path, tmp_path: Path, config_of: Make) -> None:
    config = config_of()
    folder = Path(str(config.init_from))
    (folder / "model.safetensors").unlink()
    assert kinds(config) == ["checkpoint.no_weights"]
    torch.save({"fc.weight": torch.ones(2)}, folder / "pytorch_model.bin")
    (problem,) = problems(config)
    assert problem.kind == "checkpoint.pickle" and "pytorch_model.bin" in problem.message
    (folder / "pytorch_model.bin").rename(folder / "model.safetensors")
    assert kinds(config) == ["safetensors.pickle"]


def test_damaged_shards_are_named(config_of: Make) -> None:
    config = config_of(shards=2)
    shard = Path(str(config.init_from)) / "model-00002-of-00002.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-7])
    (problem,) = problems(config)
    assert problem.kind == "safetensors.truncated" and shard.name in problem.where
    shard.write_bytes(whole[:20])
    assert kinds(config) == ["safetensors.truncated"]
    shard.unlink()
    assert kinds(config) == ["checkpoint.incomplete"]


def test_places_that_are_no_drafter_are_named(first: Path, tmp_path: Path) -> None:
    def found(start: str | Path) -> Problem:
        (problem,) = problems(warm_config(first, tmp_path / "run", start))
        return problem

    assert "no such folder" in found(tmp_path / "none").message
    assert "is a file" in found(first / "export" / "model.safetensors").message
    assert "holds no drafter" in found(first / "store").message
    assert found("hf://somebody/drafter").kind == "remote.not_here"
    assert found("s3://bucket/drafter").kind == "remote.not_here"
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "config.json").write_text("[1]")
    assert found(tmp_path / "json").kind == "file.not_an_object"


def test_a_run_whose_best_checkpoint_is_damaged_is_refused_with_whatever_else_is_wrong(
    first: Path, tmp_path: Path
) -> None:
    other = make_first_run(tmp_path / "again")
    best = json.loads((other / "run" / "best.json").read_text())["checkpoint"]
    weights = other / "run" / "checkpoints" / best / "draft.safetensors"
    edit_tensors(weights, **{"norm.weight": torch.full((HIDDEN,), NAN)})
    config = warm_config(first, tmp_path / "run", other / "run", draft={"intermediate_size": 99})
    assert kinds(config) == ["init.shape", "tensor.not_finite"]
    weights.write_bytes(weights.read_bytes()[:-1])
    assert kinds(config) == ["checkpoint.damaged", "init.shape"]
