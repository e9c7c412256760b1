"""A store in a local S3 against the same store on disk."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import torch

from eagle3.config import CacheSection
from eagle3.data import remote_folder, remote_store
from eagle3.data.batch_plan import BatchPlan
from eagle3.data.loader import load_windows
from eagle3.data.open_reader import open_cache, open_reader
from eagle3.data.remote_verify import verify_remote
from eagle3.data.store import StoredSample, StoreReader
from eagle3.data.store_layout import LastRows
from eagle3.data.vocab_count import count_supervised
from eagle3.errors import Problem, ProblemsError
from eagle3.wiring.safetensors_header import read_header
from tests.caches import used
from tests.remote import file_system, forget_clients, local_s3, proxied, upload
from tests.stores import random_contract, write_random_store

ROOT = Path(__file__).parents[3]


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


def url_of(tmp_path: Path) -> str:
    return f"s3://bucket/{tmp_path.name}"


def cache_of(cache: CacheSection) -> Path:
    return Path(cache.folder) / "rank-00000"


def kind_of(error: pytest.ExceptionInfo[ProblemsError]) -> str:
    return error.value.problems[0].kind


def assert_same_batches(local: StoreReader, remote: StoreReader, epoch: int = 0, pause: float = 0) -> int:
    """How many there are."""
    plan = BatchPlan(seed=1, lengths=[item.tokens for item in local.samples], max_length=16, batch_size=2)
    windows, indices, count = plan.epoch(epoch), range(len(local)), 0
    pairs = zip(load_windows(local, windows, indices, 16), load_windows(remote, windows, indices, 16), strict=True)
    for (mine,), (theirs,) in pairs:
        assert mine.sample_ids == theirs.sample_ids
        for name in ("input_ids", "loss_mask", "aux", "last_hidden", "document_ids", "position_ids"):
            assert torch.equal(getattr(mine, name), getattr(theirs, name))
        assert mine.target_argmax is not None
        for name in ("aux_scales", "last_scales", "target_argmax"):
            one, other = getattr(mine, name), getattr(theirs, name)
            assert (one is None and other is None) or torch.equal(one, other)
        assert used(remote.folder.parents[1]) <= 96 << 10
        count += 1
    return count


@pytest.mark.parametrize(
    ("dtype", "last_rows"),
    [("float32", "supervised"), ("float32", "all"), ("bfloat16", "supervised"), ("float8_e4m3fn", "supervised")],
)
def test_batches_equal_those_of_the_local_store_and_the_cache_keeps_its_limit(
    tmp_path: Path, cache: CacheSection, dtype: str, last_rows: LastRows
) -> None:
    store = write_random_store(
        tmp_path / "store",
        count=24,
        contract=replace(random_contract(), dtype=dtype),
        change=lambda sample: in_type(sample, torch.float32 if dtype == "float32" else torch.bfloat16),
        last_rows=last_rows,
    )
    local, remote = StoreReader(store), open_reader(upload(store, url_of(tmp_path)), cache)
    assert assert_same_batches(local, remote) + assert_same_batches(local, remote, epoch=1) == 24
    for index in range(0, 24, 5):
        mine, theirs = local.read(index), remote.read(index)
        for name in ("input_ids", "loss_mask", "aux_hidden_states", "last_hidden_states", "target_argmax"):
            assert torch.equal(getattr(mine, name), getattr(theirs, name))
    assert torch.equal(count_supervised(local), count_supervised(remote))


def in_type(sample: StoredSample, dtype: torch.dtype) -> StoredSample:
    states = {name: getattr(sample, name).to(dtype) for name in ("aux_hidden_states", "last_hidden_states")}
    return replace(sample, **states)


def test_the_next_run_fetches_no_sample_again(tmp_path: Path, store: Path, cache: CacheSection) -> None:
    url, large = url_of(tmp_path), cache.model_copy(update={"max_bytes": 1 << 20})
    with proxied() as proxy:
        upload(store, url)
        for run in range(2):
            proxy.requests.clear()
            remote = open_reader(url, large)
            count_supervised(remote)
            assert [remote.read(index).id for index in range(24)] == [f"s{index:02}" for index in range(24)]
            open_cache(large, "").close()
            asked = {path.split("?")[0].split("/")[-1] for method, path, _ in proxy.requests if method == "GET"}
            assert asked == ({"manifest.json", "bucket"} if run else {"manifest.json", "bucket", *stored(store)})
    changed = write_random_store(tmp_path / "changed", count=24, seed=1)
    remote = open_reader(upload(changed, url), large)
    assert torch.equal(remote.read(3).aux_hidden_states, StoreReader(changed).read(3).aux_hidden_states)
    assert len(list(cache_of(large).glob("*/*/manifest.json"))) == 1
    open_cache(large, "").close()


def stored(store: Path) -> set[str]:
    return {path.name for path in store.iterdir() if path.suffix == ".safetensors"}


def test_a_reader_that_is_killed_leaves_a_cache_that_the_next_one_uses(tmp_path: Path, cache: CacheSection) -> None:
    store = write_random_store(tmp_path / "store", count=24)
    url = upload(store, url_of(tmp_path))
    code = (
        "import sys, time\n"
        "from eagle3.config import CacheSection\n"
        "from eagle3.data.open_reader import open_reader\n"
        "from eagle3.data.remote_folder import RemoteFolder\n"
        "real, RemoteFolder.read = RemoteFolder.read, lambda self, *args: (time.sleep(0.05), real(self, *args))[1]\n"
        "reader = open_reader(sys.argv[1], CacheSection(folder=sys.argv[2], max_bytes=96 << 10, threads=4))\n"
        "with reader.ahead([[index] for index in range(24)]):\n"
        "    for index in range(24):\n"
        "        reader.read(index)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, url, cache.folder], cwd=ROOT)
    rank = cache_of(cache)
    end = time.monotonic() + 60
    while len(list(rank.glob("*/*/shard-*.safetensors"))) < 5:
        assert child.poll() is None and time.monotonic() < end
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    child.wait()
    there = len(list(rank.glob("*/*/shard-*.safetensors")))
    assert 5 <= there < 24
    with proxied() as proxy:
        remote = open_reader(url, cache)
        assert assert_same_batches(StoreReader(store), remote) == 12
        fetched = len({item for item in proxy.requests if item[0] == "GET" and "shard-" in item[1]})
    assert not list(rank.rglob("*.tmp"))
    assert fetched < 24 * 5


def test_requests_that_fail_once_are_tried_again(
    tmp_path: Path, store: Path, cache: CacheSection, monkeypatch: pytest.MonkeyPatch
) -> None:
    with proxied() as proxy:
        url = upload(store, url_of(tmp_path))
        monkeypatch.setattr(remote_folder, "_WAITS", (0.0, 0.0))
        seen: Counter[tuple[str, str]] = Counter()

        def first_time(method: str, path: str) -> str | None:
            seen[method, path] += 1
            return ("drop" if len(seen) % 2 else "half") if method == "GET" and seen[method, path] == 1 else None

        proxy.fault = first_time
        assert assert_same_batches(StoreReader(store), open_reader(url, cache)) == 12
        assert len(seen) > 8


@pytest.mark.parametrize(("fault", "kind"), [("drop", "connection"), ("half", "connection"), ("deny", "permission")])
def test_requests_that_always_fail_are_named_with_the_sample(
    tmp_path: Path, store: Path, cache: CacheSection, fault: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with proxied() as proxy:
        url = upload(store, url_of(tmp_path))
        remote = open_reader(url, cache)
        monkeypatch.setattr(remote_folder, "_WAITS", (0.0,))
        proxy.fault = lambda method, path: fault if "shard-00003" in path else None
        with pytest.raises(ProblemsError) as error:
            assert_same_batches(StoreReader(store), remote)
        (problem,) = error.value.problems
        assert problem.kind == f"remote.{kind}"
        assert problem.where.startswith(f"{url}/shard-00003.safetensors: sample 's1")
        assert cache.folder not in str(error.value)
        if kind == "connection":
            assert "failed 2 times" in problem.message
        proxy.fault = lambda method, path: "deny"
        with pytest.raises(ProblemsError) as error:
            open_reader(url, cache)
        assert [(item.kind, item.where) for item in error.value.problems] == [
            ("remote.permission", f"{url}/manifest.json")
        ]


def test_without_credentials_it_is_said_which_are_needed(
    tmp_path: Path, cache: CacheSection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    forget_clients()
    with pytest.raises(ProblemsError) as error:
        open_reader("s3://bucket/store", cache)
    forget_clients()
    (problem,) = error.value.problems
    assert (problem.kind, problem.where) == ("remote.credentials", "s3://bucket/store/manifest.json")
    assert "AWS_ACCESS_KEY_ID" in problem.fix


def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it() -> None:
    code = (
        "import sys\n"
        "sys.modules['s3fs'] = sys.modules['gcsfs'] = None\n"
        "from eagle3.data.remote_folder import RemoteFolder\n"
        "from eagle3.errors import ProblemsError\n"
        "for url in ('s3://bucket/store', 'gs://bucket/store'):\n"
        "    try:\n"
        "        RemoteFolder(url)\n"
        "    except ProblemsError as error:\n"
        "        print(error)\n"
    )
    child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert child.stdout.count("[remote.package]") == 2
    assert "pip install 'eagle3[s3]'" in child.stdout and "pip install 'eagle3[gcs]'" in child.stdout


def test_a_local_folder_as_a_url_and_an_unknown_protocol_are_refused(store: Path) -> None:
    with pytest.raises(ProblemsError) as error:
        open_reader(f"file://{store}", CacheSection(folder=str(store.parent / "c")))
    assert kind_of(error) == "remote.protocol"
    assert f"give the plain path: {store}" in error.value.problems[0].fix
    with pytest.raises(ProblemsError) as error:
        open_reader("nosuch://bucket/store", CacheSection(folder=str(store.parent / "c")))
    assert kind_of(error) == "remote.protocol"
    with pytest.raises(ProblemsError) as error:
        open_reader("zip://x::s3://bucket/a.zip", CacheSection(folder=str(store.parent / "c")))
    assert kind_of(error) == "remote.protocol"


def test_a_password_in_a_url_is_refused_and_not_repeated(cache: CacheSection) -> None:
    (problem,) = problems_of_opening("s3://user:secret@bucket/store", cache)
    assert problem.kind == "remote.protocol" and problem.where == "s3://...@bucket" and "secret" not in str(problem)


def test_what_no_request_can_be_made_of_is_said_at_once(cache: CacheSection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_folder, "_WAITS", (60.0,))
    (problem,) = problems_of_opening("s3://no bucket's name/store", cache)
    assert problem.kind == "remote.refused" and "\n" not in problem.message
    forget_clients()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "127.0.0.1:9")
    (problem,) = problems_of_opening("s3://bucket/store", cache)
    forget_clients()
    assert problem.kind == "remote.refused" and "AWS_ENDPOINT_URL" in problem.fix


def test_everything_that_is_wrong_with_a_listing_is_named_at_once(
    tmp_path: Path, store: Path, cache: CacheSection
) -> None:
    url = upload(store, url_of(tmp_path))
    path = url.removeprefix("s3://")
    file_system().rm_file(f"{path}/shard-00002.safetensors")
    file_system().pipe_file(f"{path}/shard-00004.safetensors", b"short")
    file_system().pipe_file(f"{path}/shard-00009.safetensors", b"unlisted")
    for problems in (
        problems_of_opening(url, cache),
        verify_remote(url, False, cache),
        verify_remote(url, True, cache),
    ):
        assert {(item.kind, item.where) for item in problems} == {
            ("store.shard_missing", f"{url}/shard-00002.safetensors"),
            ("store.shard_truncated", f"{url}/shard-00004.safetensors"),
            ("store.shard_unlisted", f"{url}/shard-00009.safetensors"),
        }
        assert not any("eagle3 extract" in item.fix for item in problems), "no extraction writes to a URL"


def problems_of_opening(url: str, cache: CacheSection) -> tuple[Problem, ...]:
    with pytest.raises(ProblemsError) as error:
        open_reader(url, cache)
    return error.value.problems


@pytest.mark.parametrize("name", ["shard-00003.safetensors", "target_head.safetensors"])
def test_deep_verification_finds_a_flipped_bit(tmp_path: Path, store: Path, cache: CacheSection, name: str) -> None:
    url = upload(store, url_of(tmp_path))
    assert verify_remote(url, True, cache) == []
    path = f"{url.removeprefix('s3://')}/{name}"
    raw = bytearray(file_system().cat_file(path))
    raw[-5] ^= 1
    file_system().pipe_file(path, bytes(raw))
    left = cache_of(cache) / remote_store.cache_name(url) / "verify" / name
    open_cache(cache, "").close()
    left.parent.mkdir(exist_ok=True)
    left.write_bytes((store / name).read_bytes())  # by a verification that was killed before the bit was flipped
    problems = verify_remote(url, True, cache)
    assert {item.where for item in problems} == {f"{url}/{name}"}
    assert [item.kind for item in problems].count("store.checksum") == 1
    assert all("new URL" in item.fix for item in problems)


def test_a_damaged_manifest_is_refused(tmp_path: Path, store: Path, cache: CacheSection) -> None:
    url = upload(store, url_of(tmp_path))
    path = f"{url.removeprefix('s3://')}/manifest.json"
    raw = file_system().cat_file(path)
    file_system().pipe_file(path, raw.replace(b'"tokens": 1', b'"tokens": 2', 1))
    assert [item.where for item in problems_of_opening(url, cache)] == [f"{url}/manifest.json"]
    file_system().pipe_file(path, raw[:-40])
    assert [item.kind for item in problems_of_opening(url, cache)] == ["file.not_json"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_of_the_cache_that_fails_is_named_with_url_and_sample(
    tmp_path: Path, store: Path, cache: CacheSection, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    url = upload(store, url_of(tmp_path))
    remote = open_reader(url, cache)

    def fails(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(remote_store, "copy_bytes", fails)
        with pytest.raises(ProblemsError) as error:
            assert_same_batches(StoreReader(store), remote)
    (problem,) = error.value.problems
    assert problem.where.startswith(f"{url}/shard-0000") and ": sample 's" in problem.where
    assert problem.kind == ("disk.full" if code == errno.ENOSPC else "disk.error")
    assert assert_same_batches(StoreReader(store), remote) == 12


def test_any_file_system_of_fsspec_can_be_read(tmp_path: Path, store: Path, cache: CacheSection) -> None:
    memory, folder = fsspec.filesystem("memory"), f"/{tmp_path.name}"
    for path in store.iterdir():
        if path.suffix in {".json", ".safetensors"}:
            memory.pipe_file(f"{folder}/{path.name}", path.read_bytes())
    remote = open_reader(f"memory:/{folder}", cache)
    assert assert_same_batches(StoreReader(store), remote) == 12
    memory.pipe_file(f"{folder}/shard-00005.safetensors", (store / "shard-00005.safetensors").read_bytes())
    open_cache(cache, "").drop(f"{remote.folder.relative_to(cache_of(cache))}/{remote.place(23).file}")
    with pytest.raises(ProblemsError) as error:
        remote.read(23)
    assert kind_of(error) == "remote.changed"
    memory.rm(folder, recursive=True)


def test_a_cache_below_two_steps_is_refused(tmp_path: Path, store: Path) -> None:
    remote = open_reader(
        upload(store, url_of(tmp_path)), section := CacheSection(folder=str(tmp_path / "c"), max_bytes=40 << 10)
    )
    with pytest.raises(ProblemsError) as error, remote.ahead([list(range(12)), list(range(12, 24))]):
        pass
    open_cache(section, "").close()
    assert kind_of(error) == "cache.too_small"


def test_an_object_that_changes_in_use_is_named_with_its_sample(
    tmp_path: Path, store: Path, cache: CacheSection
) -> None:
    remote = open_reader(url := upload(store, url_of(tmp_path)), cache)
    path = f"{url.removeprefix('s3://')}/shard-00005.safetensors"
    file_system().pipe_file(path, file_system().cat_file(path)[:-1] + b"\x07")
    with pytest.raises(ProblemsError) as error:
        remote.read(23)
    assert kind_of(error) == "remote.changed"
    assert "shard-00005.safetensors: sample 's23'" in error.value.problems[0].where


def test_what_is_missing_is_named(tmp_path: Path, store: Path, cache: CacheSection) -> None:
    with pytest.raises(ProblemsError) as error:
        open_reader("s3://no-such-bucket/store", cache)
    assert kind_of(error) == "remote.missing"
    url = upload(store, url_of(tmp_path))
    with pytest.raises(ProblemsError) as error:
        open_reader(url)
    assert kind_of(error) == "cache.missing"
    file_system().rm_file(f"{url.removeprefix('s3://')}/shard-00002.safetensors")
    with pytest.raises(ProblemsError) as error:
        open_reader(url, cache)
    assert kind_of(error) == "store.shard_missing"


def test_a_damaged_copy_is_named_with_the_cache_to_remove(tmp_path: Path, store: Path, cache: CacheSection) -> None:
    url = upload(store, url_of(tmp_path))
    reader = open_reader(url, cache)
    reader.read(3)
    copy = reader.folder / reader.place(3).file
    raw = bytearray(copy.read_bytes())
    header = read_header(copy)
    raw[header.data_start + header.tensors["loss_mask"].begin] = 7
    copy.write_bytes(raw)
    for break_it in (lambda: None, lambda: os.truncate(copy, len(raw) - 8)):
        break_it()
        with pytest.raises(ProblemsError) as error:
            reader.read(3)
        (problem,) = error.value.problems
        assert problem.where.startswith(f"{url}/shard-")
        assert f"remove {cache_of(cache)}" in problem.fix and "repair" not in problem.fix
    open_cache(cache, "").close()
    shutil.rmtree(cache_of(cache))
    assert torch.equal(open_reader(url, cache).read(3).loss_mask, StoreReader(store).read(3).loss_mask)
