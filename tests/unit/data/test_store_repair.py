"""Repair: only what is bad goes, nothing without `yes`, and a writer redoes exactly that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle3.data import store_repair
from eagle3.data.store import StoreReader, verify
from eagle3.data.store_repair import repair
from eagle3.errors import ProblemsError
from eagle3.files import digest_json
from tests.children import killed
from tests.stores import rewrite_manifest

from .cases import kinds, make_store, write_missing, writer
from .test_store_verify import flip, shard


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Shards of s0, s1 | s2, s3 | s4, s5 | s6, s7."""
    return make_store(tmp_path / "store", samples=8)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def damage(folder: Path, number: int) -> None:
    flip(shard(folder, number), 8 * shard(folder, number).stat().st_size - 1)


def test_a_whole_store_is_left_alone(folder: Path) -> None:
    before = content(folder)
    report = repair(folder, yes=True)
    assert (report.problems, report.dropped, report.changed) == ([], [], False)
    assert report.render() == "no problem found" and content(folder) == before


def test_without_yes_nothing_is_changed_and_all_is_shown(folder: Path, tmp_path: Path) -> None:
    damage(folder, 1)
    shard(folder, 3).unlink()
    before = content(folder)
    report = repair(folder, list_file=tmp_path / "list")
    assert content(folder) == before and not report.changed and report.open_problems == report.problems
    assert [item["id"] for item in report.redo] == ["s2", "s3", "s6", "s7"]
    listed = [json.loads(line) for line in (tmp_path / "list").read_text().splitlines()]
    assert listed == report.redo and listed[0] == {"id": "s2", "shard": "shard-00001.safetensors"}
    text = report.render()
    for said in ("store.checksum", "store.shard_missing", "samples to redo: 4: s2, s3, s6, s7", "nothing was changed"):
        assert said in text
    assert json.loads(report.render(as_json=True))["redo"] == listed


def test_with_yes_bad_shards_go_and_the_writer_redoes_exactly_those(folder: Path) -> None:
    before = content(folder)
    damage(folder, 1)
    shard(folder, 3).write_bytes(b"half")
    report = repair(folder, yes=True)
    assert [item.file for item in report.dropped] == [shard(folder, 1).name, shard(folder, 3).name]
    assert report.open_problems == [] and verify(folder, deep=True) == []
    assert [sample.id for sample in StoreReader(folder).samples] == ["s0", "s1", "s4", "s5"]
    assert not list(folder.glob("*.tmp"))
    kept = shard(folder, 2).stat()
    with writer(folder) as store:
        assert store.completed == {"s0", "s1", "s4", "s5"} and store.redone == []
        write_missing(store, 8)
    assert content(folder) == before
    assert shard(folder, 2).stat().st_mtime_ns == kept.st_mtime_ns


def test_the_fingerprint_goes_with_its_shard_and_comes_back_the_same(folder: Path) -> None:
    before = content(folder)
    damage(folder, 0)
    repair(folder, yes=True)
    [problem] = verify(folder, deep=True)
    assert problem.kind == "fingerprint.missing" and "eagle3 extract" in problem.fix
    with writer(folder) as store:
        write_missing(store, 8)
    assert content(folder) == before


def test_a_fingerprint_that_a_sound_shard_contradicts_has_its_shard_redone(folder: Path) -> None:
    before = content(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    fingerprint = manifest["fingerprint"]
    fingerprint["states"]["1"][0][0] += 1
    fingerprint["digest"] = digest_json({key: value for key, value in fingerprint.items() if key != "digest"})
    rewrite_manifest(folder / "manifest.json", manifest)
    assert [problem.kind for problem in verify(folder)] == ["fingerprint.states"]
    report = repair(folder, yes=True)
    assert [item.file for item in report.dropped] == [shard(folder, 0).name] and report.left == []
    with writer(folder) as store:
        write_missing(store, 8)
    assert content(folder) == before


def test_a_damaged_target_head_goes_too_and_is_written_again(folder: Path) -> None:
    before = content(folder)
    flip(folder / "target_head.safetensors", 8 * (folder / "target_head.safetensors").stat().st_size - 1)
    with pytest.raises(ProblemsError, match="other weights"):
        writer(folder)
    report = repair(folder, yes=True)
    assert (report.head, report.dropped, report.left, report.redo) == (True, [], [], [])
    writer(folder).close()
    assert content(folder) == before


def test_what_repair_cannot_mend_is_left_and_said(folder: Path) -> None:
    shard(folder, 7).write_bytes(b"of a killed writer")
    damage(folder, 1)
    report = repair(folder, yes=True)
    assert [problem.kind for problem in report.open_problems] == ["store.shard_unlisted"]
    assert shard(folder, 7).exists() and "not mended" in report.render()
    (folder / "manifest.json").write_text("{")
    with pytest.raises(ProblemsError) as error:
        repair(folder, yes=True)
    assert kinds(error.value) == ["file.not_json"] and shard(folder, 0).exists()


def test_a_writer_at_work_is_not_disturbed_and_none_begins_meanwhile(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(folder, 1)
    before = content(folder)
    with writer(folder), pytest.raises(ProblemsError) as error:
        repair(folder, yes=True)
    assert kinds(error.value) == ["disk.locked"] and content(folder) == before
    assert repair(folder).problems, "looking needs no lock"
    real = store_repair.verify_manifest

    def checking(*args):  # type: ignore[no-untyped-def]
        with pytest.raises(ProblemsError, match="another writer"):
            writer(folder)
        return real(*args)

    monkeypatch.setattr(store_repair, "verify_manifest", checking)
    assert repair(folder, yes=True).changed


def test_a_folder_that_is_no_store_gets_no_lock_file(tmp_path: Path) -> None:
    with pytest.raises(ProblemsError):
        repair(tmp_path, yes=True)
    with pytest.raises(ProblemsError):
        repair(tmp_path / "nowhere", yes=True)
    assert list(tmp_path.iterdir()) == []


def test_a_manifest_that_cannot_be_written_leaves_everything(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damage(folder, 1)
    before = content(folder)

    def full(path: Path, value: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store_repair, "save_manifest", full)
        with pytest.raises(ProblemsError) as error:
            repair(folder, yes=True)
    assert kinds(error.value) == ["disk.full"] and content(folder) == before


def test_the_list_is_not_written_into_the_store(folder: Path) -> None:
    with pytest.raises(ProblemsError) as error:
        repair(folder, list_file=folder / "list")
    assert kinds(error.value) == ["verify.inside_store"] and not (folder / "list").exists()


@pytest.mark.parametrize("function", ["replace", "unlink", "fsync"])
def test_a_kill_at_any_step_never_leaves_a_bad_shard_that_counts(tmp_path: Path, function: str) -> None:
    """Not even under its final name and unlisted: several writers together would take that for whole."""
    whole = content(make_store(tmp_path / "whole", samples=8))
    for call in range(1, 20):
        folder = make_store(tmp_path / f"store{call}", samples=8)
        damage(folder, 0)
        damage(folder, 2)
        bad = {path: path.read_bytes() for path in (shard(folder, 0), shard(folder, 2))}
        if not killed(lambda: repair(folder, yes=True, workers=1), function, call):  # noqa: B023
            assert call > 2
            return
        listed = {item["file"] for item in json.loads((folder / "manifest.json").read_text())["shards"]}
        for path, data in bad.items():
            assert path.name in listed or not path.exists() or path.read_bytes() != data
        repair(folder, yes=True)
        with writer(folder) as store:
            write_missing(store, 8)
        assert content(folder) == whole
    raise AssertionError("it never came to its end")
