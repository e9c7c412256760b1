"""Pushing and pulling stores: killed at any moment and begun again, and what is refused."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from eagle3.config import CacheSection
from eagle3.data import remote_copy, remote_files, remote_folder
from eagle3.data.open_reader import open_cache, open_reader
from eagle3.data.remote_copy import pull, push
from eagle3.data.remote_verify import verify_remote
from eagle3.data.store import verify
from eagle3.errors import ProblemsError
from eagle3.files import read_json_object
from tests.remote import file_system, local_s3, proxied, upload
from tests.stores import rewrite_manifest, write_random_store

ROOT = Path(__file__).parents[3]
FILES = 7
"""Of the store: six shards and the target head."""


@pytest.fixture(autouse=True)
def _s3() -> Iterator[None]:
    with local_s3():
        yield


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return write_random_store(tmp_path / "store", count=24)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[CacheSection]:
    section = CacheSection(folder=str(tmp_path / "cache"), max_bytes=96 << 10, threads=4)
    yield section
    open_cache(section, "").close()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"s3://bucket/{tmp_path.name}"


def names_at(url: str) -> set[str]:
    return {path.split("/")[-1] for path in file_system().ls(url.removeprefix("s3://"))}


def kinds(action: Callable[[], object]) -> set[tuple[str, str]]:
    with pytest.raises(ProblemsError) as error:
        action()
    return {(item.kind, item.where) for item in error.value.problems}


def assert_equal_stores(one: Path, other: Path) -> None:
    names = {path.name for path in one.iterdir() if path.suffix != ".lock"}
    assert names == {path.name for path in other.iterdir() if path.suffix != ".lock"}
    assert all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


def run_until(code: str, arguments: list[str], condition: Callable[[], bool]) -> None:
    """Runs Python code with slow copies, and kills it when the condition holds."""
    slow = (
        "import sys, time\n"
        "from eagle3.data.remote_folder import RemoteFolder\n"
        "put, read = RemoteFolder.put, RemoteFolder.read\n"
        "RemoteFolder.put = lambda self, *args: (time.sleep(0.1), put(self, *args))\n"
        "RemoteFolder.read = lambda self, *args: (time.sleep(0.1), read(self, *args))[1]\n"
        "from eagle3.data.remote_copy import pull, push\n"
    )
    child = subprocess.Popen([sys.executable, "-c", slow + code, *arguments], cwd=ROOT)
    end = time.monotonic() + 60
    while not condition():
        assert child.poll() is None and time.monotonic() < end
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL


def test_a_pushed_store_is_pulled_byte_for_byte_and_another_is_refused(
    tmp_path: Path, store: Path, cache: CacheSection, url: str
) -> None:
    assert push(store, url, workers=2).copied == FILES
    assert push(store, url, workers=2).copied == 0
    assert verify_remote(url, True, cache) == []
    assert pull(url, tmp_path / "back", workers=2).copied == FILES
    assert pull(url, tmp_path / "back", workers=2).copied == 0
    assert_equal_stores(store, tmp_path / "back")
    other = write_random_store(tmp_path / "other", seed=1)
    assert kinds(lambda: push(other, url, workers=2)) == {("remote.other_store", url)}
    upload(other, f"{url}-other")
    assert kinds(lambda: pull(f"{url}-other", tmp_path / "back", workers=2)) == {
        ("remote.other_store", str(tmp_path / "back"))
    }


def test_a_killed_push_is_no_store_and_goes_on(store: Path, cache: CacheSection, url: str, tmp_path: Path) -> None:
    begun = lambda: file_system().exists(url) and len(names_at(url)) >= 4  # noqa: E731
    run_until("push(sys.argv[1], sys.argv[2], 1)", [str(store), url], begun)
    there = names_at(url)
    assert "manifest.json" not in there and "push.json" in there
    assert kinds(lambda: open_reader(url, cache)) == {("remote.push_unfinished", url)}
    assert kinds(lambda: pull(url, tmp_path / "back", 2)) == {("remote.push_unfinished", url)}
    other = write_random_store(tmp_path / "other", seed=1)
    assert kinds(lambda: push(other, url, 2)) == {("remote.other_store", url)}
    report = push(store, url, 2)
    assert report.there >= len(there) - 2 and report.there + report.copied == FILES
    assert "push.json" not in names_at(url)
    assert verify_remote(url, True, cache) == []


def test_a_killed_pull_is_no_store_and_goes_on(store: Path, url: str, tmp_path: Path) -> None:
    push(store, url, 2)
    back = tmp_path / "back"
    run_until("pull(sys.argv[1], sys.argv[2], 1)", [url, str(back)], lambda: len(list(back.glob("*.safetensors"))) >= 3)
    there = len(list(back.glob("*.safetensors")))
    assert (back / "pull.json").exists() and not (back / "manifest.json").exists()
    assert {item.kind for item in verify(back)} == {"file.missing"}
    (back / "shard-00004.safetensors.tmp").write_bytes(b"half")
    report = pull(url, back, 2)
    assert report.there == there and report.there + report.copied == FILES
    assert_equal_stores(store, back)


def test_stores_that_are_not_whole_are_not_pushed(store: Path, url: str, tmp_path: Path) -> None:
    shard = store / "shard-00003.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[-5] ^= 1
    shard.write_bytes(raw)
    assert kinds(lambda: push(store, url, 2)) == {("store.checksum", str(shard))}
    assert "manifest.json" not in names_at(url)
    shard.unlink()
    assert kinds(lambda: push(store, f"{url}-2", 2)) == {("store.shard_missing", str(shard))}
    short = write_random_store(tmp_path / "short", count=8)
    manifest = read_json_object(short / "manifest.json", "manifest")
    manifest["settings"]["sample_count"] = 9
    rewrite_manifest(short / "manifest.json", manifest)
    assert kinds(lambda: push(short, f"{url}-2", 2)) == {("store.incomplete", str(short))}
    assert not file_system().exists(f"{url}-2")


def test_a_damaged_object_is_not_pulled(store: Path, url: str, tmp_path: Path) -> None:
    push(store, url, 2)
    path = f"{url.removeprefix('s3://')}/shard-00003.safetensors"
    raw = bytearray(file_system().cat_file(path))
    raw[-5] ^= 1
    file_system().pipe_file(path, bytes(raw))
    back = tmp_path / "back"
    assert kinds(lambda: pull(url, back, 2)) == {("store.checksum", f"{url}/shard-00003.safetensors")}
    assert not (back / "manifest.json").exists() and not (back / "shard-00003.safetensors").exists()


def test_places_that_hold_something_else_are_left_alone(store: Path, url: str, tmp_path: Path) -> None:
    file_system().pipe_file(f"{url.removeprefix('s3://')}/thesis.tex", b"years of work")
    assert kinds(lambda: push(store, url, 2)) == {("remote.other_store", url)}
    assert names_at(url) == {"thesis.tex"}
    file_system().pipe_file(f"{url.removeprefix('s3://')}-3/push.json", b"{ no JSON")
    assert kinds(lambda: push(store, f"{url}-3", 2)) == {("remote.other_store", f"{url}-3")}
    upload(store, f"{url}-2")
    (tmp_path / "somebody").mkdir()
    (tmp_path / "somebody/thesis.tex").write_text("years of work")
    assert kinds(lambda: pull(f"{url}-2", tmp_path / "somebody", 2)) == {
        ("remote.other_store", str(tmp_path / "somebody"))
    }
    (tmp_path / "file").write_text("")
    assert kinds(lambda: pull(f"{url}-2", tmp_path / "file", 2)) == {("store.not_a_store", str(tmp_path / "file"))}


def test_places_that_are_not_written_to_are_refused(store: Path, tmp_path: Path) -> None:
    assert kinds(lambda: push(store, "hf://datasets/me/states", 2)) == {("remote.read_only", "hf://datasets/me/states")}
    assert kinds(lambda: push(store, "HF://datasets/me/states", 2)) == {("remote.read_only", "HF://datasets/me/states")}
    assert kinds(lambda: push(store, str(tmp_path / "copy"), 2)) == {("remote.protocol", str(tmp_path / "copy"))}
    assert kinds(lambda: pull("s3://bucket/a", "s3://bucket/b", 2)) == {("remote.not_here", "s3://bucket/b")}
    assert kinds(lambda: push("s3://bucket/a", "s3://bucket/b", 2)) == {("remote.not_here", "s3://bucket/a")}
    assert kinds(lambda: push(store, "s3://no-such-bucket/a", 2)) == {("remote.missing", "s3://no-such-bucket/a")}
    with proxied() as proxy:
        proxy.fault = lambda method, path: "deny" if method == "PUT" else None
        assert kinds(lambda: push(store, "s3://bucket/denied", 2)) == {
            ("remote.permission", "s3://bucket/denied/push.json")
        }


def test_a_large_file_is_there_when_all_its_parts_are(url: str, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(os.urandom(1 << 20) * 101)  # s3fs uploads below 100 MiB at once
    with proxied() as proxy:
        remote = remote_folder.RemoteFolder(url)
        proxy.fault = lambda method, path: "deny" if "partNumber=2" in path else None
        assert kinds(lambda: remote.put(tmp_path / "large", "large")) == {("remote.permission", f"{url}/large")}
        assert remote.list() == {}
        proxy.fault = lambda method, path: None
        remote.put(tmp_path / "large", "large")
        assert sum("partNumber=" in path for _, path, _ in proxy.requests) > 3
    assert remote.look("large").size == 101 << 20
    end = 55 << 20
    assert remote.read("large", end - 100, end) == (tmp_path / "large").read_bytes()[end - 100 : end]
    file_system().rm_file(f"{url.removeprefix('s3://')}/large")


def test_two_pushes_at_once_to_a_new_place_one_is_refused(
    store: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, real = write_random_store(tmp_path / "other", seed=1), remote_folder.RemoteFolder.put_bytes

    def late(self: remote_folder.RemoteFolder, name: str, data: bytes, new: bool = False) -> None:
        if new:
            with monkeypatch.context() as patch:
                patch.setattr(remote_folder.RemoteFolder, "put_bytes", real)
                real(self, name, b"{}", new=True)  # the other one was faster
        real(self, name, data, new)

    monkeypatch.setattr(remote_folder.RemoteFolder, "put_bytes", late)
    assert kinds(lambda: push(other, url, 2)) == {("remote.exists", f"{url}/push.json")}


def test_a_full_disk_stops_a_pull_with_one_problem_a_file_and_it_goes_on(
    store: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(store, url, 2)
    back = tmp_path / "back"

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(remote_files, "copy_bytes", full)
        found = kinds(lambda: pull(url, back, 1))
    assert {kind for kind, _ in found} == {"disk.full"} and all(where.startswith(str(back)) for _, where in found)
    with monkeypatch.context() as patch:
        patch.setattr(remote_copy.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        assert kinds(lambda: pull(url, back, 1)) == {("store.no_room", str(back))}
    pull(url, back, 1)
    assert_equal_stores(store, back)
