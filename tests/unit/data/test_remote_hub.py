"""A store in a repository of the Hugging Face hub."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import get_session

from eagle3.config import CacheSection
from eagle3.data import remote_folder
from eagle3.data.open_reader import open_cache, open_reader
from eagle3.data.remote_verify import verify_remote
from eagle3.data.store import StoreReader
from eagle3.errors import ProblemsError
from tests.hub import Hub, local_hub
from tests.stores import write_random_store

URL = "hf://datasets/me/states/kimi"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(remote_folder, "_WAITS", ())
    with local_hub() as hub:
        yield hub


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[CacheSection]:
    section = CacheSection(folder=str(tmp_path / "cache"), max_bytes=1 << 20, threads=4)
    yield section
    open_cache(section, "").close()


def files(store: Path) -> dict[str, bytes]:
    return {f"kimi/{path.name}": path.read_bytes() for path in store.iterdir() if path.suffix != ".lock"}


def test_a_store_is_read_as_of_the_commit_that_was_newest_when_it_was_opened(
    tmp_path: Path, hub: Hub, cache: CacheSection
) -> None:
    store, newer = (write_random_store(tmp_path / str(seed), count=12, seed=seed) for seed in (0, 1))
    hub.commits.append(files(store))
    remote = open_reader(URL, cache)
    hub.commits.append(files(newer))
    for at, local in (("as opened", store), ("opened again", newer)):
        reader = remote if at == "as opened" else open_reader(URL, cache)
        for index in range(12):
            mine, theirs = StoreReader(local).read(index), reader.read(index)
            for name in ("input_ids", "loss_mask", "aux_hidden_states", "last_hidden_states"):
                assert torch.equal(getattr(mine, name), getattr(theirs, name))
    shard = len(files(store)["kimi/shard-00000.safetensors"])
    stretches = [value.removeprefix("bytes=").split("-") for name, value in hub.ranges if value and "shard-" in name]
    assert stretches and all(int(end) < shard * 2 for _, end in stretches)
    one_sample = [int(end) - int(begin) for begin, end in stretches if begin != "0"]
    assert max(one_sample) < shard // 2  # nothing is read beside what is asked for
    assert verify_remote(URL, True, cache) == []


def test_what_the_hub_refuses_is_named(tmp_path: Path, hub: Hub, cache: CacheSection) -> None:
    def problem(url: str) -> tuple[str, str]:
        with pytest.raises(ProblemsError) as error:
            open_reader(url, cache)
        return error.value.problems[0].kind, error.value.problems[0].where

    assert problem(URL) == ("remote.missing", f"{URL}/manifest.json")
    assert problem("hf://datasets/me") == ("remote.refused", "hf://datasets/me")
    assert problem("hf://datasets/me/nothing/kimi") == ("remote.missing", "hf://datasets/me/nothing/kimi")
    hub.private = True
    kind, where = problem("hf://datasets/me/states/private")
    assert (kind, where) == ("remote.permission", "hf://datasets/me/states/private")


def test_a_hub_that_cannot_be_reached_is_named(
    tmp_path: Path, hub: Hub, cache: CacheSection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object, **__: object) -> None:
        client = sys.modules[type(get_session()).__module__.split(".")[0]]  # httpx or httpx2
        raise client.ConnectError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", unreachable)
    with pytest.raises(ProblemsError) as error:
        open_reader("hf://datasets/me/elsewhere/kimi", cache)
    (problem,) = error.value.problems
    assert (problem.kind, problem.where) == ("remote.connection", "hf://datasets/me/elsewhere/kimi")
