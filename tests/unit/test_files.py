"""Whole or absent: folders and locks."""

import os
from pathlib import Path

import pytest

from eagle3.errors import ProblemsError
from eagle3.files import atomic_folder, explained_os_errors, only_writer, read_into


def test_two_writers_of_one_folder_do_not_mix(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "out") as first:
        (first / "a").write_text("first")
        with pytest.raises(ProblemsError, match=r"disk\.locked"), atomic_folder(tmp_path / "out"):
            pass
    assert (tmp_path / "out" / "a").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_a_killed_writer_left_is_cleared(tmp_path: Path) -> None:
    (tmp_path / "out.tmp").mkdir()
    (tmp_path / "out.tmp" / "half").write_text("half")
    with atomic_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("whole")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a"]


def test_a_link_keeps_leading_to_the_folder_that_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with atomic_folder(tmp_path / "link") as folder:
        (folder / "a").write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "a").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


def test_every_error_of_the_file_system_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "x", tmp_path / ("a" * 300)):
        with pytest.raises(ProblemsError, match=r"disk\."), explained_os_errors(path):
            path.mkdir(parents=True)


def test_a_lock_ends_with_its_block(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with only_writer(run, "lock"), pytest.raises(ProblemsError, match=r"disk\.locked"), only_writer(run, "lock"):
        pass
    with only_writer(run, "lock"):
        pass


def test_a_link_to_itself_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ProblemsError, match=r"disk\."), atomic_folder(tmp_path / "loop"):
        pass


def test_a_stretch_is_read_whole_though_the_system_gives_it_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = tmp_path / "file", os.preadv
    path.write_bytes(bytes(range(100)))
    monkeypatch.setattr(os, "preadv", lambda descriptor, targets, at: real(descriptor, [targets[0][:7]], at))
    whole, cut = bytearray(50), bytearray(50)
    with open(path, "rb") as handle:
        assert read_into(handle.fileno(), memoryview(whole), 20) == 50
        assert read_into(handle.fileno(), memoryview(cut), 70) == 30
    assert whole == bytes(range(20, 70)) and cut[:30] == bytes(range(70, 100))
