"""Shards that change while they are in use: each is one error that names shard and samples, and never a signal."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle3.data import store_verify
from eagle3.data.batch_plan import BatchPlan
from eagle3.data.loader import load_windows, read_batches
from eagle3.data.open_shard import OpenShard
from eagle3.data.store import StoreReader
from eagle3.data.vocab_count import count_supervised
from eagle3.errors import Problem, ProblemsError
from tests.children import in_a_child

from .cases import sample, writer

TOKENS = 3000
"""Many pages: a map of bytes beyond a file's last page would be a SIGBUS."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with writer(tmp_path / "store") as store:
        for number in range(0, 6, 2):
            store.write_shard([sample(f"s{number}", TOKENS), sample(f"s{number + 1}", TOKENS, start=1)])
    return tmp_path / "store"


def shard(folder: Path, number: int = 0) -> Path:
    return folder / f"shard-0000{number}.safetensors"


def windows(reader: StoreReader, harm: Callable[[], object]) -> None:
    plan = BatchPlan(0, [item.tokens for item in reader.samples], TOKENS, batch_size=2)
    batches = load_windows(reader, plan.epoch(0), range(6), TOKENS)
    next(batches)
    harm()
    list(batches)


def samples(reader: StoreReader, harm: Callable[[], object]) -> None:
    kept = reader.read(0)
    harm()
    assert kept.aux_hidden_states.any(), "what was read stays"
    for number in range(6):
        reader.read(number)


def tokens(reader: StoreReader, harm: Callable[[], object]) -> None:
    reader.read_tokens(0)
    harm()
    count_supervised(reader)


USES = [windows, samples, tokens]
Use = Callable[[StoreReader, Callable[[], object]], None]


def problems(use: Use, reader: StoreReader, harm: Callable[[], object]) -> list[Problem]:
    with pytest.raises(ProblemsError) as error:
        use(reader, harm)
    return list(error.value.problems)


@pytest.mark.parametrize("use", USES)
def test_a_shard_that_is_cut_while_in_use_is_an_error_and_no_signal(folder: Path, use: Use) -> None:
    def cut() -> None:
        for path in folder.glob("shard-*"):
            os.truncate(path, 9000)

    def child() -> None:
        for problem in problems(use, StoreReader(folder), cut):
            assert problem.kind == "store.shard_truncated" and str(folder / "shard-0000") in problem.where
            assert "sample 's" in problem.where or "(samples s" in problem.message
            assert "has 9000 bytes" in problem.message

    assert os.waitpid(in_a_child(child), 0)[1] == 0


@pytest.mark.parametrize("use", USES)
def test_a_shard_that_is_gone_before_it_is_opened_is_named(folder: Path, use: Use) -> None:
    def remove() -> None:
        for path in folder.glob("shard-*"):
            path.unlink()

    [problem, *_] = problems(use, StoreReader(folder), remove)

    assert problem.kind == "store.shard_missing" and "sample 's" in problem.where


def test_a_shard_that_is_open_may_be_removed_or_replaced(folder: Path) -> None:
    reader = StoreReader(folder)
    before = reader.read(0)
    shard(folder, 1).replace(shard(folder))

    assert before.aux_hidden_states.equal(reader.read(0).aux_hidden_states)


@pytest.mark.parametrize("use", USES)
def test_a_shard_that_another_took_the_place_of_is_named_when_it_is_opened(folder: Path, use: Use) -> None:
    reader = StoreReader(folder)
    content = shard(folder).read_bytes()
    for number in (1, 2):
        shard(folder, number).write_bytes(content)  # as long, and as well formed

    found = problems(use, reader, lambda: None)

    assert {problem.kind for problem in found} == {"store.sample_missing", "store.sample_unlisted"}
    assert all("sample 's" in problem.where for problem in found)


@pytest.mark.parametrize("use", USES)
def test_a_disk_that_fails_is_named_with_shard_and_sample(
    folder: Path, monkeypatch: pytest.MonkeyPatch, use: Use
) -> None:
    def failing(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    [problem, *_] = problems(use, StoreReader(folder), lambda: monkeypatch.setattr(os, "preadv", failing))

    assert problem.kind == "store.unreadable" and "Input/output error" in problem.message
    assert f"{folder}/shard-0000" in problem.where and "sample 's" in problem.where


def test_all_samples_whose_states_cannot_be_read_are_in_one_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, real = StoreReader(folder), os.preadv
    bad = {shard(folder, number).stat().st_ino for number in (0, 2)}

    def failing(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if os.fstat(descriptor).st_ino in bad and len(buffers[0]) > TOKENS * 4:  # more than its token ids
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)

    with pytest.raises(ProblemsError) as error:
        read_batches(reader, [[[0, 1], [2, 3]], [[4]]], TOKENS)
    assert [problem.where for problem in error.value.problems] == [
        f"{shard(folder)}: samples 's0', 's1'",
        f"{shard(folder, 2)}: sample 's4'",
    ]


def test_a_shard_that_is_cut_while_it_is_verified_is_a_problem_of_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = store_verify._state_faults

    def cut_first(file: OpenShard, *rest: Any) -> Any:
        os.truncate(file.path, 9000)
        return real(file, *rest)

    def child() -> None:
        problems = store_verify.verify(folder, deep=True, workers=1)
        assert [problem.where for problem in problems] == [str(shard(folder, number)) for number in range(3)]
        assert {problem.kind for problem in problems} == {"store.shard_truncated"}
        assert "(samples s2, s3)" in problems[1].message and "data repair" in problems[1].fix

    monkeypatch.setattr(store_verify, "_state_faults", cut_first)
    assert os.waitpid(in_a_child(child), 0)[1] == 0
