from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eagle3.wiring import check_dataset
from tests.unit.wiring.cases import HIDDEN, kinds, make_contract, write_store

SHARD = "shard-00000.safetensors"


def test_a_good_store_has_no_problem(tmp_path: Path) -> None:
    assert check_dataset(write_store(tmp_path, make_contract())) == []
    assert check_dataset(tmp_path, make_contract()) == []


@pytest.mark.parametrize("indices", [(1, 29, 57), (-1, 2, 30, 58), (3, 31, 59)])
def test_a_store_of_other_layers_than_expected_is_named(tmp_path: Path, indices: tuple[int, ...]) -> None:
    store = write_store(tmp_path, make_contract(output_indices=indices))

    assert kinds(check_dataset(store, make_contract())) == ["contract.output_indices"]


def test_permuted_slots_cannot_even_be_said(tmp_path: Path) -> None:
    contract = make_contract().to_dict() | {"output_indices": [30, 2, 58]}

    assert kinds(check_dataset(write_store(tmp_path, make_contract(), contract=contract))) == ["layers.unsorted"]


@pytest.mark.parametrize(
    ("aux", "last"),
    [
        (torch.zeros(2, 4 * HIDDEN, dtype=torch.bfloat16), torch.zeros(2, HIDDEN, dtype=torch.bfloat16)),
        (torch.zeros(2, 3 * HIDDEN), torch.zeros(2, HIDDEN, dtype=torch.bfloat16)),
        (torch.zeros(2, 3, HIDDEN, dtype=torch.bfloat16), torch.zeros(2, HIDDEN, dtype=torch.bfloat16)),
        (torch.zeros(2, 3 * HIDDEN, dtype=torch.bfloat16), torch.zeros(2, HIDDEN + 1, dtype=torch.bfloat16)),
        (torch.zeros(2, 3 * HIDDEN, dtype=torch.bfloat16), None),
    ],
)
def test_a_shard_of_other_widths_than_the_contract_is_named(
    tmp_path: Path, aux: torch.Tensor, last: torch.Tensor | None
) -> None:
    store = write_store(tmp_path, make_contract())
    tensors = {"aux_hidden_states": aux} | ({"last_hidden_states": last} if last is not None else {})
    save_file(tensors, store / SHARD)

    (problem,) = check_dataset(store)

    assert problem.kind == "dataset.width"
    assert problem.where.endswith(SHARD)


def test_fault_7_a_truncated_or_missing_shard_is_named(tmp_path: Path) -> None:
    store = write_store(tmp_path, make_contract())
    shard = store / SHARD
    shard.write_bytes(shard.read_bytes()[:-40])
    assert kinds(check_dataset(store)) == ["safetensors.truncated"]
    shard.unlink()
    assert kinds(check_dataset(store)) == ["file.missing"]


@pytest.mark.parametrize("shards", [None, {}, "x", [None], [{}], [{"file": 3}], [{"file": "../x"}], [["x"]]])
def test_a_broken_list_of_shards_is_one_error(tmp_path: Path, shards: Any) -> None:
    assert kinds(check_dataset(write_store(tmp_path, make_contract(), shards=shards))) == ["dataset.manifest"]


@pytest.mark.parametrize("contract", [None, [], "x", {}])
def test_a_broken_contract_is_one_error(tmp_path: Path, contract: Any) -> None:
    assert kinds(check_dataset(write_store(tmp_path, make_contract(), contract=contract))) == ["contract.format"]


def test_what_is_no_store_is_one_error(tmp_path: Path) -> None:
    assert kinds(check_dataset(tmp_path / "absent")) == ["file.missing"]
    (tmp_path / "manifest.json").write_text("{}", encoding="utf-8")
    assert kinds(check_dataset(tmp_path)) == ["dataset.manifest"]
