"""Several processes write one store: it is the store that one writes, and who must not share it is refused by name."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eagle3.data import store_joint
from eagle3.data.store import StoreReader, verify
from eagle3.data.store_format import load_manifest
from eagle3.errors import ProblemsError, problem_error
from tests.children import in_a_child, killed

from .cases import contract, kinds, make_store, target_head, writer
from .joint_cases import SETTINGS, content, joint, shard_samples, write, write_share


def test_one_process_writes_what_a_single_writer_writes(tmp_path: Path) -> None:
    write_share(tmp_path / "joint", 0, 1, 3)
    with writer(tmp_path / "single", settings=SETTINGS) as store:
        for number in range(3):
            store.write_shard(shard_samples(number))
    assert content(tmp_path / "joint") == content(tmp_path / "single")
    assert verify(tmp_path / "joint", deep=True) == []


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_the_order_in_which_processes_come_changes_no_byte(tmp_path: Path, order: tuple[int, ...]) -> None:
    write_share(tmp_path / "alone", 0, 1, 7)
    for index in order:
        write_share(tmp_path / "shared", index, 3, 7)
    assert content(tmp_path / "shared") == content(tmp_path / "alone")


def test_processes_that_list_shards_at_the_same_time_lose_none(tmp_path: Path) -> None:
    write_share(tmp_path / "alone", 0, 1, 40)
    children = [in_a_child(lambda: write_share(tmp_path / "shared", index, 4, 40)) for index in range(4)]  # noqa: B023
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0, 0]
    assert content(tmp_path / "shared") == content(tmp_path / "alone")
    assert len(StoreReader(tmp_path / "shared")) == 80


# Head, first manifest, shard, manifest, shard, manifest: each is synced, renamed, and its folder synced.
@pytest.mark.parametrize(("function", "calls"), [("replace", 6), ("fsync", 12)])
def test_a_kill_at_any_write_leaves_a_store_that_can_be_finished(tmp_path: Path, function: str, calls: int) -> None:
    write_share(tmp_path / "whole", 0, 1, 4)
    write_share(tmp_path / "other", 1, 2, 4)
    assert not killed(lambda: write_share(tmp_path / "unharmed", 0, 2, 4), function, calls + 1)
    for call in range(1, calls + 1):
        folder = tmp_path / f"store{call}"
        assert killed(lambda: write_share(folder, 0, 2, 4), function, call)  # noqa: B023
        write_share(folder, 1, 2, 4)
        write_share(folder, 0, 2, 4)
        assert content(folder) == content(tmp_path / "whole"), call


def test_who_comes_first_settles_what_later_ones_leave_open(tmp_path: Path) -> None:
    def open_settings(begun: Any) -> dict[str, Any]:
        return {**SETTINGS, "stream": {"chunk_tokens": 4} if begun is None else begun["stream"]}

    with joint(tmp_path / "store", 1, 2), joint(tmp_path / "store", 0, 2, settings=open_settings) as second:
        assert second.settings == SETTINGS
    with joint(tmp_path / "other", 0, 2, settings=open_settings) as first:
        assert first.settings["stream"] == {"chunk_tokens": 4}


@pytest.mark.parametrize("beside", [True, False])
def test_other_settings_and_another_contract_are_refused_each_by_name(tmp_path: Path, beside: bool) -> None:
    folder = tmp_path / "store"
    first = joint(folder, 0, 2)
    if not beside:
        first.close()
    before = content(folder)
    with pytest.raises(ProblemsError) as error:
        joint(
            folder,
            1,
            2,
            settings=lambda begun: {"data": {"max_length": 32}, "stream": {"chunk_tokens": 9}},
            contract=contract(output_indices=(1, 2, 4)),
        )
    assert kinds(error.value) == ["contract.output_indices", "store.other_settings", "store.other_settings"]
    assert "settings.stream.chunk_tokens: it was begun with 8, this run has 9" in str(error.value)
    assert content(folder) == before
    first.close()
    joint(folder, 1, 2).close()


def test_another_head_is_refused(tmp_path: Path) -> None:
    joint(tmp_path / "store").close()
    with pytest.raises(ProblemsError) as error:
        joint(tmp_path / "store", target_head=target_head(scale=2.0))
    assert kinds(error.value) == ["store.other_target"]


def test_a_second_process_of_the_same_number_is_refused_by_name(tmp_path: Path) -> None:
    with joint(tmp_path / "store", 1, 3), joint(tmp_path / "store", 2, 3):
        with pytest.raises(ProblemsError, match="another process with index 1 is at work here") as error:
            joint(tmp_path / "store", 1, 3)
        assert kinds(error.value) == ["store.same_process"]
    joint(tmp_path / "store", 1, 3).close()


def test_a_process_that_counts_otherwise_is_refused_by_name(tmp_path: Path) -> None:
    with joint(tmp_path / "store", 1, 3):
        with pytest.raises(ProblemsError, match="process 1 at work here counts 3 processes, this one 2") as error:
            joint(tmp_path / "store", 0, 2)
        assert kinds(error.value) == ["store.other_count"]
        joint(tmp_path / "store", 0, 3).close()
    joint(tmp_path / "store", 0, 2).close()


def test_a_single_writer_and_joint_ones_exclude_each_other(tmp_path: Path) -> None:
    with joint(tmp_path / "joint", 0, 2), joint(tmp_path / "joint", 1, 2):
        with pytest.raises(ProblemsError, match="another writer is at work here") as error:
            writer(tmp_path / "joint")
        assert kinds(error.value) == ["store.locked"]
    with writer(tmp_path / "single", settings=SETTINGS):
        with pytest.raises(ProblemsError, match="another writer is at work here") as error:
            joint(tmp_path / "single")
        assert kinds(error.value) == ["store.locked"]
    joint(tmp_path / "single").close()
    writer(tmp_path / "joint", settings=SETTINGS).close()


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    script = (
        "import sys, time; from pathlib import Path; from tests.unit.data.joint_cases import joint\n"
        "store = joint(Path(sys.argv[1]), 1, 3); print('open', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script, folder], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"open\n"
        try:
            with pytest.raises(ProblemsError) as error:
                joint(folder, 1, 2)
            assert kinds(error.value) == ["store.same_process", "store.other_count"]
        finally:
            other.send_signal(signal.SIGKILL)
    assert list(folder.glob("process-*.lock"))
    joint(folder, 1, 2).close()
    assert not list(folder.glob("process-*.lock"))


def test_only_who_is_alone_cleans_up(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with joint(folder, 0, 2):
        work = folder / "shard-00004.safetensors.tmp"
        work.write_bytes(b"of the other process")
        joint(folder, 1, 2).close()
        assert work.exists()
    joint(folder, 1, 2).close()
    assert not work.exists()


def test_a_damaged_shard_is_dropped_with_the_fingerprint_that_is_of_it(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    write_share(folder, 0, 1, 3)
    whole = content(folder)
    path = folder / "shard-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    with joint(folder) as store:
        assert [problem.kind for problem in store.redone] == ["store.shard_truncated"]
        assert store.manifest().fingerprint is None
        assert [shard.file for shard in store.manifest().shards] == [
            "shard-00001.safetensors",
            "shard-00002.safetensors",
        ]
    write_share(folder, 0, 1, 3)
    assert content(folder) == whole


def test_the_fingerprint_comes_with_the_lowest_shard_and_not_before(tmp_path: Path) -> None:
    write_share(tmp_path / "store", 1, 2, 4)
    assert load_manifest(tmp_path / "store").fingerprint is None
    assert [problem.kind for problem in verify(tmp_path / "store")] == ["fingerprint.missing"]
    write_share(tmp_path / "store", 0, 2, 4)
    assert verify(tmp_path / "store", deep=True) == []


def test_a_shard_is_listed_once(tmp_path: Path) -> None:
    with joint(tmp_path / "store", 0, 2) as store:
        write(store, 1)
        with pytest.raises(ProblemsError, match=r"shard-00001\.safetensors") as error:
            write(store, 1)
        assert kinds(error.value) == ["store.duplicate_shard"]
        assert len(store.manifest().shards) == 1


def test_a_manifest_that_cannot_be_written_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, value: object) -> None:
        raise problem_error(str(path), "disk.full", "cannot write: No space left on device", "free space there")

    with joint(tmp_path / "store") as store:
        write(store, 0)
        with monkeypatch.context() as patch, pytest.raises(ProblemsError, match="No space left"):
            patch.setattr(store_joint, "save_manifest", full)
            write(store, 1)
        assert len(store.manifest().shards) == 1
        write(store, 2)
        assert len(store.manifest().shards) == 2


def test_what_is_no_store_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tmp").write_text("mine")
    with pytest.raises(ProblemsError, match=r"holds thesis\.tmp") as error:
        joint(tmp_path)
    assert kinds(error.value) == ["store.not_a_store"]
    assert (tmp_path / "thesis.tmp").read_text() == "mine"


def test_a_store_of_a_single_writer_is_gone_on_with_if_its_settings_fit(tmp_path: Path) -> None:
    folder = make_store(tmp_path / "store", samples=4, settings=SETTINGS)
    with joint(folder) as store:
        write(store, 2)
    assert [sample.id for sample in StoreReader(folder).samples] == [f"s{number}" for number in range(6)]


def test_a_disk_that_is_full_for_a_lock_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store_joint.json, "dump", full)
    with pytest.raises(ProblemsError) as error:
        joint(tmp_path / "store")

    assert kinds(error.value) == ["disk.full"]
    monkeypatch.undo()
    joint(tmp_path / "store").close()


def test_a_lock_file_that_is_a_folder_is_one_error(tmp_path: Path) -> None:
    joint(tmp_path / "store").close()
    (tmp_path / "store" / "process-00003.lock").mkdir()

    with pytest.raises(ProblemsError) as error:
        joint(tmp_path / "store")

    assert kinds(error.value) == ["disk.error"]


def test_a_lock_that_is_held_and_says_nothing_is_refused(tmp_path: Path) -> None:
    with joint(tmp_path / "store", 0, 2):
        (tmp_path / "store" / "process-00000.lock").write_text("")
        with pytest.raises(ProblemsError) as error:
            joint(tmp_path / "store", 1, 2)

    assert kinds(error.value) == ["store.locked"]
