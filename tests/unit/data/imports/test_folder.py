"""Which files of a folder are samples, whose they are, and which folders are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from eagle3.data.imports.folder import check_places, find_dump, warn_of_locks
from eagle3.errors import ProblemsError
from tests.dumps import WRITERS, random_dump_sample, write_modelopt, write_specforge, write_speculators

SAMPLES = [random_dump_sample(seed=seed) for seed in range(2)]


@pytest.mark.parametrize("name", WRITERS)
def test_a_format_is_told_by_its_files(tmp_path: Path, name: str) -> None:
    dump = find_dump(WRITERS[name](tmp_path / "dump", SAMPLES))

    assert dump.format.name == name
    assert len(dump.names) == 2


def test_names_are_paths_inside_the_folder_in_order(tmp_path: Path) -> None:
    write_specforge(tmp_path, SAMPLES)
    (tmp_path / "vocab_mapping").mkdir()
    torch.save({}, tmp_path / "vocab_mapping" / "vocab_mapping.pt")
    (tmp_path / "rows_0-2" / "data_7.ckpt.tmp").write_text("half-written")

    assert find_dump(tmp_path).names == ["rows_0-2/data_0.ckpt", "rows_0-2/data_1.ckpt"]


def test_older_speculators_files_are_told_from_modelopts(tmp_path: Path) -> None:
    torch.save({"input_ids": torch.arange(3), "hidden_states": [torch.zeros(3, 4)] * 3}, tmp_path / "data_0.pt")

    assert find_dump(tmp_path).format.name == "speculators"


def test_a_bad_first_file_does_not_decide(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(b"")
    torch.save({"input_ids": torch.arange(3), "hidden_states": [torch.zeros(3, 4)] * 3}, tmp_path / "b.pt")

    dump = find_dump(tmp_path)

    assert (dump.format.name, len(dump.names)) == ("speculators", 2)


def test_several_formats_are_refused_unless_one_is_named(tmp_path: Path) -> None:
    write_specforge(tmp_path, SAMPLES)
    write_modelopt(tmp_path, SAMPLES)

    with pytest.raises(ProblemsError, match=r"2 of specforge.*2 of modelopt") as caught:
        find_dump(tmp_path)

    assert caught.value.problems[0].kind == "import.mixed"
    assert find_dump(tmp_path, "modelopt").names == ["conversation-0.pt", "conversation-1.pt"]


@pytest.mark.parametrize(
    ("make", "kind"), [("empty", "import.empty"), ("absent", "import.source"), ("file", "import.source")]
)
def test_a_folder_without_samples_is_refused(tmp_path: Path, make: str, kind: str) -> None:
    source = tmp_path / "dump"
    if make == "empty":
        source.mkdir()
        (source / "notes.txt").write_text("")
    elif make == "file":
        source.write_text("")

    with pytest.raises(ProblemsError) as caught:
        find_dump(source)

    assert [problem.kind for problem in caught.value.problems] == [kind]


def test_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    torch.save({}, tmp_path / os.fsdecode(b"\xff.pt"))

    with pytest.raises(ProblemsError) as caught:
        find_dump(tmp_path)

    assert [problem.kind for problem in caught.value.problems] == ["import.name"]


@pytest.mark.parametrize(("source", "output"), [("a", "a"), ("a", "a/b"), ("a/b", "a"), ("a/../c", "c/d")])
def test_source_and_output_inside_each_other_are_refused(tmp_path: Path, source: str, output: str) -> None:
    assert [problem.kind for problem in check_places(tmp_path / source, tmp_path / output)] == ["import.same_place"]


def test_source_and_output_beside_each_other_are_right(tmp_path: Path) -> None:
    assert check_places(tmp_path / "a", tmp_path / "ab") == []


def test_a_link_does_not_hide_that_the_output_is_inside_the_source(tmp_path: Path) -> None:
    (tmp_path / "dump").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "dump")

    assert len(check_places(tmp_path / "dump", tmp_path / "link" / "store")) == 1


def test_lock_files_beside_samples_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    states = write_speculators(tmp_path, SAMPLES)
    capsys.readouterr()
    warn_of_locks(find_dump(states))
    assert capsys.readouterr().err == ""
    (states / "hs_1.safetensors.lock").touch()

    warn_of_locks(find_dump(states))

    assert "1 samples: hs_1.safetensors" in capsys.readouterr().err
