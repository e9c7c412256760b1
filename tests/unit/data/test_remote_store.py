"""A store in a local S3 against the same store on disk."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from eagle3.config import CacheSection
from eagle3.data import remote_folder
from eagle3.data.loader import BatchPlan, load_windows
from eagle3.data.open_reader import open_cache, open_reader
from eagle3.data.remote_copy import pull, push
from eagle3.data.remote_verify import verify_remote
from eagle3.data.store import StoreReader
from eagle3.errors import ProblemsError
from tests.remote import file_system, start_s3, upload
from tests.stores import write_random_store


@pytest.fixture(autouse=True)
def _s3(monkeypatch: pytest.MonkeyPatch) -> None:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    start_s3()
    monkeypatch.setattr(remote_folder, "_WAITS", ())


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


def kind_of(error: pytest.ExceptionInfo[ProblemsError]) -> str:
    return error.value.problems[0].kind


def used(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_batches_equal_those_of_the_local_store_and_the_cache_keeps_its_limit(
    tmp_path: Path, store: Path, cache: CacheSection
) -> None:
    local, remote = StoreReader(store), open_reader(upload(store, url_of(tmp_path)), cache)
    plan = BatchPlan(seed=1, lengths=[item.tokens for item in local.samples], max_length=16, batch_size=2)
    indices = range(len(local))
    count = 0
    for windows in (plan.epoch(0), plan.epoch(1)):
        pairs = zip(load_windows(local, windows, indices, 16), load_windows(remote, windows, indices, 16), strict=True)
        for (mine,), (theirs,) in pairs:
            assert mine.sample_ids == theirs.sample_ids
            for name in ("input_ids", "loss_mask", "aux", "last_hidden", "document_ids", "position_ids"):
                assert torch.equal(getattr(mine, name), getattr(theirs, name))
            assert used(Path(cache.folder)) <= cache.max_bytes
            count += 1
    assert count == 24


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


def test_a_pushed_store_is_pulled_byte_for_byte_and_another_is_refused(
    tmp_path: Path, store: Path, cache: CacheSection
) -> None:
    url = url_of(tmp_path)
    assert push(store, url, workers=2).copied == 7
    assert push(store, url, workers=2).copied == 0
    assert verify_remote(url, True, cache) == []
    pull(url, tmp_path / "back", workers=2)
    for path in store.iterdir():
        if path.suffix != ".lock":
            assert path.read_bytes() == (tmp_path / "back" / path.name).read_bytes()
    with pytest.raises(ProblemsError) as error:
        push(write_random_store(tmp_path / "other", seed=1), url, workers=2)
    assert kind_of(error) == "remote.other_store"


def test_a_push_that_was_stopped_is_no_store_and_goes_on(
    tmp_path: Path, store: Path, cache: CacheSection, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, real = url_of(tmp_path), remote_folder.RemoteFolder.put

    def put(self: remote_folder.RemoteFolder, path: Path, name: str) -> None:
        if name == "shard-00003.safetensors":
            raise KeyboardInterrupt
        real(self, path, name)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(remote_folder.RemoteFolder, "put", put)
        push(store, url, workers=1)
    with pytest.raises(ProblemsError) as error:
        open_reader(url, cache)
    assert kind_of(error) == "remote.push_unfinished"
    report = push(store, url, workers=1)
    assert 4 <= report.there < 7 and report.there + report.copied == 7
    assert len(open_reader(url, cache)) == 24
