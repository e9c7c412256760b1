"""Weights in one file or several, half downloads, and what is no safetensors file."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from eagle3.errors import Problem
from eagle3.wiring import check_checkpoint
from tests.unit.wiring.cases import kinds, make_contract, make_tensors, write_checkpoint

INDEX = "model.safetensors.index.json"


def sharded(folder: Path) -> Path:
    """A good checkpoint whose weights are in two files."""
    checkpoint = write_checkpoint(folder)
    (checkpoint / "model.safetensors").unlink()
    tensors = make_tensors(make_contract())
    names = sorted(tensors)
    weight_map = {name: f"model-{1 + (place % 2):05}-of-00002.safetensors" for place, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, checkpoint / file)
    (checkpoint / INDEX).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    return checkpoint


def only(checkpoint: Path) -> Problem:
    problems = check_checkpoint(checkpoint)
    assert len(problems) == 1, problems
    return problems[0]


def test_weights_in_several_files_are_read_like_one(tmp_path: Path) -> None:
    checkpoint = sharded(tmp_path)

    assert check_checkpoint(checkpoint) == []


def test_the_values_of_tables_in_a_shard_are_checked(tmp_path: Path) -> None:
    checkpoint = sharded(tmp_path)
    tensors = make_tensors(make_contract())
    weight_map = json.loads((checkpoint / INDEX).read_text())["weight_map"]
    file = weight_map["d2t"]
    tensors["d2t"] = tensors["d2t"] + 5
    save_file({name: tensors[name] for name, owner in weight_map.items() if owner == file}, checkpoint / file)

    assert only(checkpoint).kind == "draft_vocab.out_of_range"


def test_half_a_download_with_an_index_names_the_missing_files(tmp_path: Path) -> None:
    checkpoint = sharded(tmp_path)
    (checkpoint / "model-00002-of-00002.safetensors").unlink()

    problem = only(checkpoint)

    assert problem.kind == "checkpoint.incomplete"
    assert "1 of 2 files are missing (model-00002-of-00002.safetensors)" in problem.message


@pytest.mark.parametrize("place", [".", ".cache/huggingface/download"])
def test_half_a_download_without_weights_is_named(tmp_path: Path, place: str) -> None:
    checkpoint = write_checkpoint(tmp_path)
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / place).mkdir(parents=True, exist_ok=True)
    (checkpoint / place / "abc.incomplete").write_bytes(b"x")

    problem = only(checkpoint)

    assert problem.kind == "checkpoint.incomplete"
    assert "1 unfinished files, e.g. abc.incomplete" in problem.message


@pytest.mark.parametrize(
    "index",
    [None, [], {}, {"a": 1}, {"a": "../x"}, {"a": ""}],
)
def test_an_index_of_the_wrong_form_is_one_error(tmp_path: Path, index: Any) -> None:
    checkpoint = sharded(tmp_path)
    (checkpoint / INDEX).write_text(json.dumps({"weight_map": index}), encoding="utf-8")

    assert only(checkpoint).kind == "checkpoint.index"


@pytest.mark.parametrize("content", ["", "[]"])
def test_an_index_that_is_no_object_is_one_error(tmp_path: Path, content: str) -> None:
    checkpoint = sharded(tmp_path)
    (checkpoint / INDEX).write_text(content, encoding="utf-8")

    assert only(checkpoint).kind.startswith("file.not_")


def test_an_index_that_disagrees_with_a_file_is_named(tmp_path: Path) -> None:
    checkpoint = sharded(tmp_path)
    index = json.loads((checkpoint / INDEX).read_text())
    index["weight_map"]["zebra"] = index["weight_map"].pop("fc.weight")
    (checkpoint / INDEX).write_text(json.dumps(index), encoding="utf-8")

    problem = only(checkpoint)

    assert problem.kind == "checkpoint.index"
    assert "disagree about 2 tensors, e.g. fc.weight" in problem.message


def test_a_git_lfs_pointer_is_named(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path)
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (checkpoint / "model.safetensors").write_bytes(pointer)

    problem = only(checkpoint)

    assert problem.kind == "safetensors.lfs_pointer"
    assert "git lfs pull" in problem.fix


@pytest.mark.parametrize("name", ["pytorch_model.bin", "draft.pt", "draft.pth", "draft.ckpt"])
def test_a_pickle_is_refused_unread(tmp_path: Path, name: str) -> None:
    checkpoint = write_checkpoint(tmp_path)
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / name).write_bytes(pickle.dumps({}))

    problem = only(checkpoint)

    assert problem.kind == "checkpoint.pickle"
    assert name in problem.message


def test_an_optimiser_state_beside_the_weights_does_not_matter(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path)
    (checkpoint / "training_state.pt").write_bytes(pickle.dumps({}))

    assert kinds(check_checkpoint(checkpoint)) == []
