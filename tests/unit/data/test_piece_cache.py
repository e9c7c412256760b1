"""The cache of files from elsewhere: its limit, what goes first, and what it does when anything fails."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import eagle3.data.piece_cache as piece_cache
from eagle3.config import CacheSection
from eagle3.data.cache_order import AT_ONCE, ReadingOrder
from eagle3.data.open_reader import open_cache
from eagle3.data.piece_cache import Piece, PieceCache
from eagle3.errors import ProblemsError, problem_error
from eagle3.files import write_atomic
from tests.caches import BLOCK, used

ROOT = Path(__file__).parents[3]


class Source:
    """Pieces `p0`, `p1` ... of their number's byte; fetches are counted, and fail where they are told to."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.fetched: list[int] = []
        self.broken: set[int] = set()
        self.short: set[int] = set()
        self.gate: threading.Event | None = None

    def piece(self, number: int, kept: bool = False) -> Piece:
        return Piece(
            name=f"store/p{number}",
            where=f"s3://bucket/store: sample 'p{number}'",
            size=lambda: self.sizes[number],
            fetch=lambda path: self._fetch(number, path),
            is_whole=lambda path: path.stat().st_size == self.sizes[number],
            kept=kept,
        )

    def content(self, number: int) -> bytes:
        return bytes([number % 256]) * self.sizes[number]

    def _fetch(self, number: int, path: Path) -> None:
        if self.gate is not None:
            assert self.gate.wait(20)
        self.fetched.append(number)
        if number in self.broken:
            raise problem_error(self.piece(number).where, "remote.connection", "failed", "try again")
        path.write_bytes(self.content(number)[: -1 if number in self.short else None])


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[list[PieceCache]]:
    caches: list[PieceCache] = []
    yield caches
    for cache in caches:
        cache.close()


def open_at(opened: list[PieceCache], folder: Path, blocks: int, threads: int = 2) -> PieceCache:
    opened.append(PieceCache(folder, blocks * BLOCK, threads))
    return opened[-1]


def kind_and_where(error: pytest.ExceptionInfo[ProblemsError]) -> tuple[str, str]:
    (problem,) = error.value.problems
    return problem.kind, problem.where


def wait_until(condition: object, seconds: float = 10) -> None:
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


@pytest.mark.parametrize("seed", range(8))
def test_random_plans_and_readers_get_the_right_bytes_within_the_limit(
    tmp_path: Path, opened: list[PieceCache], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(seed)
    source = Source([random.randint(1, 3 * BLOCK) for _ in range(40)])
    limit = random.choice([9, 14, 30])
    cache = open_at(opened, tmp_path / "c", limit, threads=random.choice([1, 4, 8]))
    worst = [0]

    def watched(path: Path, write: object) -> None:
        write_atomic(path, write)  # type: ignore[arg-type]
        with cache._changed:  # no other file comes or goes
            worst[0] = max(worst[0], cache._used)
            assert used(tmp_path / "c") <= limit * BLOCK
            assert cache._used == sum(cache._files.values()) + sum(cache._flying.values())

    monkeypatch.setattr(piece_cache, "write_atomic", watched)

    def read(number: int) -> None:
        with cache.held(source.piece(number, kept=number % 7 == 0)) as path:
            assert path.read_bytes() == source.content(number)

    def consume(plan: list[int]) -> None:
        for number in plan:
            read(number)

    with ThreadPoolExecutor(3) as readers:
        for _ in range(3):
            plan, beside = random.choices(range(40), k=60), random.choices(range(40), k=30)
            other = readers.submit(consume, beside)
            with cache.ahead(
                [f"store/p{number}" for number in plan], lambda at, plan=plan: source.piece(plan[at])
            ) as done:
                for begin in range(0, len(plan), 3):
                    list(readers.map(read, plan[begin : begin + 3]))
                    done(len(plan[begin : begin + 3]))
            other.result(timeout=60)
    assert 0 < worst[0] <= limit * BLOCK
    wait_until(lambda: not cache._flying)
    assert not cache._pins


@given(st.data())
def test_what_goes_first_is_what_a_plain_search_finds(data: st.DataObject) -> None:
    names = [f"p{number}" for number in range(8)]
    order, plans, there = ReadingOrder(), [], []
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["begin", "end", "done", "use", "forget"]))
        if action == "begin" and len(plans) < 3:
            plans.append(order.begin(data.draw(st.permutations(names))[:6], lambda at: None))  # type: ignore[arg-type,return-value]
        elif action == "end" and plans:
            order.end(plans.pop(data.draw(st.integers(0, len(plans) - 1))))
        elif action == "done" and plans:
            order.done(data.draw(st.sampled_from(plans)), data.draw(st.integers(0, 3)))
        elif action == "use":
            name = data.draw(st.sampled_from(names))
            order.use(name)
            there = [item for item in there if item != name] + [name]
        elif action == "forget" and there:
            order.forget(name := data.draw(st.sampled_from(there)))
            there.remove(name)
        spared = data.draw(st.sets(st.sampled_from(names), max_size=3))
        before = data.draw(st.sampled_from([AT_ONCE, (2, -1), (1, -4)]))

        def need(name: str) -> tuple[int, int]:
            for plan in sorted(plans, key=lambda plan: -plan.number):
                if name in plan.names[plan.done :]:
                    return plan.number, -plan.names.index(name)
            return -1, 0

        left = [name for name in there if name not in spared]
        found = order.last(before, spared)
        if any(need(name) == (-1, 0) for name in left):
            assert found is not None and found in left and need(found) == (-1, 0)
        else:
            assert found == min((name for name in left if need(name) < before), key=need, default=None)


def test_what_is_read_next_is_fetched_beforehand_and_the_furthest_goes(
    tmp_path: Path, opened: list[PieceCache]
) -> None:
    source = Source([BLOCK] * 8)
    cache = open_at(opened, tmp_path / "c", 4)
    with cache.ahead([f"store/p{number}" for number in range(8)], source.piece) as done:
        wait_until(lambda: cache._used == 4 * BLOCK and not cache._flying)
        assert sorted(cache._files) == [f"store/p{number}" for number in range(4)]
        with cache.held(source.piece(7)):  # out of turn: the furthest of the four makes room
            assert "store/p3" not in cache and "store/p0" in cache
        done(2)
        wait_until(lambda: "store/p3" in cache._files and "store/p4" in cache._files)
        assert "store/p2" in cache._files and "store/p0" not in cache._files


def test_a_file_that_is_held_stays_and_who_needs_its_room_waits(tmp_path: Path, opened: list[PieceCache]) -> None:
    source = Source([2 * BLOCK] * 3)
    cache = open_at(opened, tmp_path / "c", 4)
    came = threading.Event()

    def read() -> None:
        with cache.held(source.piece(2)):
            came.set()

    with cache.held(source.piece(0)) as first, cache.held(source.piece(1)):
        thread = threading.Thread(target=read)
        thread.start()
        assert not came.wait(0.2)
        assert first.read_bytes() == source.content(0)
    assert came.wait(10)
    thread.join()


def test_readers_that_wait_for_room_come_before_what_is_fetched_beforehand(
    tmp_path: Path, opened: list[PieceCache]
) -> None:
    source = Source([2 * BLOCK] * 12)
    cache = open_at(opened, tmp_path / "c", 2, threads=4)
    with cache.ahead([f"store/p{number}" for number in range(12)], source.piece), ThreadPoolExecutor(6) as pool:

        def read(number: int) -> bool:
            with cache.held(source.piece(number)) as path:
                time.sleep(0.002)
                return path.read_bytes() == source.content(number)

        found = list(pool.map(read, [11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0] * 3, timeout=60))
    assert found == [True] * 36


def test_a_piece_that_cannot_fit_is_named_with_the_store(tmp_path: Path, opened: list[PieceCache]) -> None:
    source = Source([5 * BLOCK])
    cache = open_at(opened, tmp_path / "c", 4)
    with pytest.raises(ProblemsError) as error, cache.held(source.piece(0)):
        pass
    assert kind_and_where(error) == ("cache.too_small", "s3://bucket/store: sample 'p0'")
    assert str(tmp_path / "c") in error.value.problems[0].message


def test_a_fetch_that_fails_beforehand_is_raised_by_who_reads_and_stops_nothing_else(
    tmp_path: Path, opened: list[PieceCache]
) -> None:
    source = Source([BLOCK] * 4)
    source.broken = {1}
    cache = open_at(opened, tmp_path / "c", 8)
    with cache.ahead([f"store/p{number}" for number in range(4)], source.piece):
        wait_until(lambda: len(cache._files) == 3 and "store/p1" in cache._failed)
        with pytest.raises(ProblemsError) as error, cache.held(source.piece(1)):
            pass
        assert kind_and_where(error) == ("remote.connection", "s3://bucket/store: sample 'p1'")
    assert cache._used == 3 * BLOCK and not cache._pins
    source.broken = set()
    with cache.held(source.piece(1)) as path:
        assert path.read_bytes() == source.content(1)


def test_a_fetch_that_brings_fewer_bytes_is_named_and_leaves_nothing(tmp_path: Path, opened: list[PieceCache]) -> None:
    source = Source([100])
    source.short = {0}
    cache = open_at(opened, tmp_path / "c", 4)
    with pytest.raises(ProblemsError) as error, cache.held(source.piece(0)):
        pass
    assert kind_and_where(error) == ("remote.wrong_size", "s3://bucket/store: sample 'p0'")
    assert "99 bytes came, 100 were expected" in str(error.value)
    assert used(tmp_path / "c") == 0 == cache._used


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_is_named_with_what_was_read(
    tmp_path: Path, opened: list[PieceCache], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    source = Source([BLOCK] * 3)
    cache = open_at(opened, tmp_path / "c", 8)
    real = Path.write_bytes

    def full(self: Path, data: bytes) -> int:
        real(self, data[: len(data) // 2])
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with cache.ahead([f"store/p{number}" for number in range(3)], source.piece):
            with pytest.raises(ProblemsError) as error, cache.held(source.piece(0)):
                pass
            wait_until(lambda: len(cache._failed) >= 2 and not cache._flying)
    kind, where = kind_and_where(error)
    assert where == "s3://bucket/store: sample 'p0'"
    assert kind == ("disk.full" if code == errno.ENOSPC else "disk.error")
    assert str(tmp_path / "c") in error.value.problems[0].message
    assert used(tmp_path / "c") == 0 == cache._used
    with cache.held(source.piece(0)) as path:
        assert path.read_bytes() == source.content(0)


def test_the_next_process_uses_what_is_whole_and_fetches_again_what_is_not(
    tmp_path: Path, opened: list[PieceCache]
) -> None:
    source = Source([BLOCK] * 4)
    cache = open_at(opened, tmp_path / "c", 8)
    for number in range(4):
        with cache.held(source.piece(number)):
            pass
    opened.pop().close()
    (tmp_path / "c/store/p1").write_bytes(b"torn")
    (tmp_path / "c/store/p2").unlink()
    (tmp_path / "c/store/p3.tmp").write_bytes(b"killed in the middle")
    source.fetched.clear()
    cache = open_at(opened, tmp_path / "c", 8)
    assert not (tmp_path / "c/store/p3.tmp").exists()
    for number in range(4):
        with cache.held(source.piece(number)) as path:
            assert path.read_bytes() == source.content(number)
    assert sorted(source.fetched) == [1, 2]
    (tmp_path / "c/store/p0").unlink()  # while it is open
    with cache.held(source.piece(0)) as path:
        assert path.read_bytes() == source.content(0)


def test_a_smaller_limit_removes_what_was_used_first(tmp_path: Path, opened: list[PieceCache]) -> None:
    source = Source([BLOCK] * 4)
    cache = open_at(opened, tmp_path / "c", 8)
    for number in (2, 0, 3, 1, 2):
        with cache.held(source.piece(number)):
            time.sleep(0.01)  # times of use differ
    opened.pop().close()
    assert set(open_at(opened, tmp_path / "c", 2)._files) == {"store/p1", "store/p2"}


def test_forgetting_a_store_leaves_what_is_held(tmp_path: Path, opened: list[PieceCache]) -> None:
    source = Source([BLOCK] * 2)
    cache = open_at(opened, tmp_path / "c", 8)
    held = cache.hold(source.piece(0))
    with cache.held(source.piece(1)):
        pass
    cache.forget("store", keep="other")
    assert held.read_bytes() == source.content(0)
    assert "store/p1" not in cache and cache._used == BLOCK


def test_a_second_process_is_refused(tmp_path: Path, opened: list[PieceCache]) -> None:
    folder = tmp_path / "c"
    open_at(opened, folder / "rank-00000", 8)
    code = (
        "from eagle3.config import CacheSection\n"
        "from eagle3.data.open_reader import open_cache\n"
        f"open_cache(CacheSection(folder={str(folder)!r}, max_bytes=9999999), 's3://bucket/store')\n"
    )
    child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert child.returncode == 1
    assert "[cache.in_use] s3://bucket/store: its cache" in child.stderr
    assert "another process uses this cache" in child.stderr


def test_one_process_has_one_cache_a_folder(tmp_path: Path) -> None:
    section = CacheSection(folder=str(tmp_path), max_bytes=8 * BLOCK)
    cache = open_cache(section, "s3://bucket/store")
    try:
        assert open_cache(section, "s3://bucket/other") is cache
        with pytest.raises(ProblemsError) as error:
            open_cache(section.model_copy(update={"max_bytes": 4 * BLOCK}), "s3://bucket/other")
        assert kind_and_where(error) == ("cache.in_use", "s3://bucket/other")
    finally:
        cache.close()


def test_folders_that_cannot_be_a_cache_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(folder: str, max_bytes: int = 8 * BLOCK) -> tuple[str, str]:
        with pytest.raises(ProblemsError) as error:
            open_cache(CacheSection(folder=folder, max_bytes=max_bytes), "s3://bucket/store")
        kind, where = kind_and_where(error)
        assert "s3://bucket/store" in str(error.value)
        return kind, where

    assert refusal("s3://bucket/cache") == ("remote.not_here", "s3://bucket/cache")
    (tmp_path / "somebody/rank-00000").mkdir(parents=True)
    (tmp_path / "somebody/rank-00000/thesis.tex").write_text("years of work")
    assert refusal(str(tmp_path / "somebody")) == ("cache.not_a_cache", "s3://bucket/store")
    assert (tmp_path / "somebody/rank-00000/thesis.tex").exists()
    (tmp_path / "file").write_text("")
    assert refusal(str(tmp_path / "file")) == ("disk.not_a_folder", "s3://bucket/store")
    assert refusal(str(tmp_path / "huge"), 1 << 60) == ("cache.too_large", "s3://bucket/store")
    assert not (tmp_path / "huge").exists()

    def read_only(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(piece_cache.fcntl, "flock", read_only)
    assert refusal(str(tmp_path / "read_only")) == ("disk.read_only", "s3://bucket/store")
