from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.errors import ProblemsError
from eagle3.wiring import WiringContract
from eagle3.wiring.layers import LayerWiring, describe_layers
from tests.unit.wiring.cases import digest, kinds, make_contract
from tests.unit.wiring.test_layers import wirings

OTHER_VALUES: dict[str, Any] = {
    "target_name": "other",
    "target_family": "deepseek",
    "target_config_digest": digest("1"),
    "num_hidden_layers": 62,
    "hidden_size": 16,
    "vocab_size": 13,
    "output_indices": (1, 29, 57),
    "last_hidden_states": "pre_norm",
    "dtype": "float32",
    "tokenizer_digest": digest("2"),
    "chat_template_digest": digest("3"),
    "draft_vocab_digest": digest("4"),
}


@given(wirings(), st.sampled_from(["post_norm", "pre_norm"]), st.none() | st.just(digest("9")))
def test_a_contract_survives_json(wiring: LayerWiring, norm: str, draft_vocab: str | None) -> None:
    contract = make_contract(
        output_indices=wiring.output_indices,
        num_hidden_layers=wiring.num_hidden_layers,
        last_hidden_states=norm,
        draft_vocab_digest=draft_vocab,
    )

    assert WiringContract.from_dict(json.loads(json.dumps(contract.to_dict()))) == contract
    assert contract.wiring == wiring


def test_a_contract_is_saved_into_a_folder_and_loaded_back(tmp_path: Path) -> None:
    make_contract().save(tmp_path)

    assert (tmp_path / "eagle3_contract.json").is_file()
    assert WiringContract.load(tmp_path) == make_contract()
    assert WiringContract.load(tmp_path / "eagle3_contract.json") == make_contract()


def test_a_contract_is_saved_under_a_name_of_its_own_and_loaded_back(tmp_path: Path) -> None:
    make_contract().save(tmp_path / "mine.json")

    assert WiringContract.load(tmp_path / "mine.json") == make_contract()
    assert not (tmp_path / "eagle3_contract.json").exists()


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_a_difference_in_any_field_is_named(name: str) -> None:
    other = make_contract(**{name: OTHER_VALUES[name]})

    assert kinds(make_contract().compare(other, "checkpoint", "dataset")) == [f"contract.{name}"]


def test_the_fields_of_the_test_above_are_all_fields() -> None:
    assert list(OTHER_VALUES) == [field.name for field in dataclasses.fields(WiringContract)]


def test_all_differences_are_listed() -> None:
    problems = make_contract().compare(make_contract(**OTHER_VALUES), "run", "dataset")

    assert kinds(problems) == [f"contract.{name}" for name in OTHER_VALUES]


def test_equal_contracts_have_no_difference() -> None:
    assert make_contract().compare(make_contract(), "run", "dataset") == []


def test_a_draft_vocab_that_one_side_has_not_chosen_yet_is_no_difference() -> None:
    before = make_contract(draft_vocab_digest=None)

    assert before.compare(make_contract(), "dataset", "run") == []
    assert make_contract().compare(before, "run", "dataset") == []
    assert before.with_draft_vocab(digest("4")).draft_vocab_digest == digest("4")


@pytest.mark.parametrize(
    ("indices", "words"),
    [
        ((1, 29, 57), "every layer is one too early"),
        ((3, 31, 59), "every layer is one too late"),
        ((-1, 2, 30, 58), "the embedding was added"),
        ((2, 30, 57), "these are other layers"),
    ],
)
def test_differing_layers_are_put_in_words(indices: tuple[int, ...], words: str) -> None:
    (problem,) = make_contract(output_indices=indices).compare(make_contract(), "dataset", "run")

    assert problem.message.endswith(f"in dataset, {words}")
    assert "run has the outputs of layers 2, 30, 58 [2, 30, 58]" in problem.message
    assert f"dataset has {describe_layers(indices)} {list(indices)}" in problem.message


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"target_name": ""}, "contract.value"),
        ({"target_family": 3}, "contract.value"),
        ({"target_config_digest": "sha256:short"}, "contract.value"),
        ({"tokenizer_digest": None}, "contract.value"),
        ({"draft_vocab_digest": "x"}, "contract.value"),
        ({"hidden_size": "8"}, "contract.value"),
        ({"vocab_size": True}, "contract.value"),
        ({"num_hidden_layers": 61.0}, "contract.value"),
        ({"last_hidden_states": "normed"}, "contract.value"),
        ({"dtype": ["bfloat16"]}, "contract.value"),
        ({"output_indices": [30, 2]}, "layers.unsorted"),
        ({"output_indices": "2,30"}, "layers.type"),
        ({"output_indices": [61]}, "layers.out_of_range"),
        ({"output_indices": None}, "layers.type"),
        ({"format": "other"}, "contract.format"),
        ({"format_version": 2}, "contract.format_version"),
        ({"format_version": True}, "contract.format_version"),
        ({"surprise": 1}, "contract.unknown"),
    ],
)
def test_a_wrong_field_is_one_named_error(change: dict[str, Any], kind: str) -> None:
    with pytest.raises(ProblemsError) as caught:
        WiringContract.from_dict(make_contract().to_dict() | change, "file.json")

    (problem,) = caught.value.problems
    assert problem.kind == kind
    assert problem.where.startswith("file.json")


@pytest.mark.parametrize("name", [*OTHER_VALUES])
def test_a_missing_field_is_named(name: str) -> None:
    values = make_contract().to_dict()
    del values[name]

    with pytest.raises(ProblemsError) as caught:
        WiringContract.from_dict(values)

    assert kinds(caught.value.problems) == ["contract.missing"]
    assert name in str(caught.value)


@pytest.mark.parametrize("value", [None, [], "contract", 1, {}])
def test_what_is_no_contract_is_one_error(value: object) -> None:
    with pytest.raises(ProblemsError) as caught:
        WiringContract.from_dict(value)

    assert kinds(caught.value.problems) == ["contract.format"]


def test_every_wrong_field_is_listed() -> None:
    values = make_contract().to_dict() | {"hidden_size": 0, "dtype": "int8", "output_indices": [5, 5, 99]}

    with pytest.raises(ProblemsError) as caught:
        WiringContract.from_dict(values)

    expected = ["contract.value", "contract.value", "layers.out_of_range", "layers.duplicate"]
    assert kinds(caught.value.problems) == expected
