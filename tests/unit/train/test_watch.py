"""What the watch over one process says, and how it tells who is behind; several processes: test_watch_ranks.py."""

from __future__ import annotations

import re
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eagle3.data.loader import Ahead
from eagle3.train import pulse
from eagle3.train.pulse import Heard, Place, Pulse, own_store
from eagle3.train.trainer import run_training
from eagle3.train.watch import COMPUTING, READING, SAVING, WAITING, Watch, explain
from tests.stores import train_config, write_random_store


def ranks(index: int, count: int) -> Any:
    return SimpleNamespace(process_index=index, num_processes=count)


def heard(rank: int, step: int, doing: str, silent: float = 0.0) -> Heard:
    return Heard(rank, Place(step, doing, doing == WAITING, 4.0), silent)


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ([(0, 5, WAITING), (1, 5, COMPUTING, 9.0)], "no sign of life from rank 1 for 9.0 s"),
        ([(0, 5, WAITING), (1, 5, COMPUTING), (2, 5, WAITING)], "rank 1 behind: rank 1 was computing in step 5 (for"),
        ([(0, 5, COMPUTING), (1, 5, READING), (2, 5, READING)], "ranks 1, 2 behind: rank 1 was reading data in step 5"),
        ([(0, 5, SAVING), (1, 6, COMPUTING)], "rank 0 behind: rank 0 was saving a checkpoint in step 5"),
        ([(0, 5, COMPUTING), (1, 5, COMPUTING)], "no rank is behind, as far as they can tell: all are computing in"),
        ([(0, 5, COMPUTING)], "all are computing in step 5 (of 1 ranks nothing is known)"),
        ([*((rank, 5, READING) for rank in range(12)), (12, 5, COMPUTING)], "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more"),
    ],
)  # fmt: skip
def test_who_is_behind(places: list[tuple[Any, ...]], words: str) -> None:
    found = [heard(*place) for place in places]
    assert words in explain(found, max(len(found), 2), patience=3.0)


def test_a_single_process_that_reads_for_long_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = write_random_store(tmp_path / "store", [(8, (2, 8))] * 8)
    take, taken = Ahead.take, []

    def slow(self: Ahead) -> Any:
        taken.append(None)
        time.sleep(1.0 * (len(taken) == 5))
        return take(self)

    monkeypatch.setattr(Ahead, "take", slow)
    run_training(train_config(store, tmp_path / "run", tracking={"stall_seconds": 0.3}))
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("stalled", "training goes on"))]
    words = r"stalled: rank 0 has been reading data for \d s in step 5, usually \d+ ms; there are no others"
    assert re.match(words, said[0]), said
    assert said[-1] == "training goes on: rank 0 was reading data for 1 s"
    assert 2 <= len(said) <= 3, "again after twice the time only"


def test_what_always_takes_long_is_no_stall(capsys: pytest.CaptureFixture[str]) -> None:
    with Watch(ranks(0, 1), 0.2) as watch:
        with watch.doing(COMPUTING):  # the first time ten times as long is nothing yet: kernels are compiled
            time.sleep(0.6)
        for _ in range(2):
            with watch.doing(COMPUTING), watch.doing(WAITING):
                time.sleep(0.4)
        time.sleep(0.5)
    assert "stalled" not in capsys.readouterr().err


def test_a_watch_that_fails_says_so_and_training_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Watch, "_limit", lambda *_: 1 / 0)
    with Watch(ranks(0, 1), 0.1) as watch, watch.doing(READING):
        time.sleep(0.2)
    said = capsys.readouterr().err
    assert "the watch over stalls ended, training goes on without: ZeroDivisionError" in said


class Store:
    """A store in which rank 0 was heard of, and that may hang or fail from then on."""

    def __init__(self) -> None:
        self.values = {"eagle3/0/0": Place(3, COMPUTING, False, 0.1).spell(1)}
        self.hangs, self.fails = threading.Event(), False

    def set(self, key: str, value: str) -> None:
        if self.fails:
            raise RuntimeError("Connection reset by peer\nmore")
        if self.hangs.is_set():
            time.sleep(3)
        self.values[key] = value

    def check(self, keys: list[str]) -> bool:
        return keys[0] in self.values

    def get(self, key: str) -> bytes:
        return self.values[key].encode()


@pytest.mark.parametrize("fails", [False, True])
def test_a_store_that_does_not_answer_is_said_and_holds_nobody_up(
    fails: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store()
    with Watch(ranks(1, 2), 0.2, store) as watch:
        with watch.doing(COMPUTING):
            time.sleep(0.1)
        store.hangs.set()
        store.fails = fails
        with watch.doing(COMPUTING):
            time.sleep(1.5)
        begin = time.monotonic()
    assert time.monotonic() - begin < 1
    said = capsys.readouterr().err
    assert "stalled: rank 1 has been computing for" in said
    assert "rank 0 or its launcher holds, has not answered for" in said
    assert ("(RuntimeError: Connection reset by peer)" in said) == fails


def test_only_the_first_living_rank_speaks(capsys: pytest.CaptureFixture[str]) -> None:
    store = Store()
    first = Pulse(0, store, partial(Place, 3, READING, False, 1.0), 0.02)
    first.start()
    with Watch(ranks(1, 2), 0.8, store) as watch:
        with watch.doing(COMPUTING):
            time.sleep(0.02)
        with watch.doing(COMPUTING):
            time.sleep(1.5)
    first.close()
    assert "stalled" not in capsys.readouterr().err


def test_without_a_store_each_rank_speaks_for_itself(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulse.dist, "is_initialized", lambda: True)
    store = own_store()
    assert store is None and "note: in a stall each rank will know of itself only: " in capsys.readouterr().err
    with Watch(ranks(1, 2), 0.1, store) as watch:
        with watch.doing(COMPUTING):
            pass
        with watch.doing(READING), watch.doing(WAITING):
            time.sleep(1.5)
    assert "stalled: rank 1 has been reading data for 1 s" in capsys.readouterr().err
