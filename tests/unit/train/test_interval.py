"""What the trainer says of its time."""

from __future__ import annotations

import pytest

from eagle3.data.batch_plan import BatchPlan
from eagle3.train import interval as module
from eagle3.train.feed import StoreFeed
from eagle3.train.interval import Interval


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def run(clock: Clock, waits: float, works: float) -> Interval:
    interval = Interval()
    interval.begin()
    for _ in range(2):
        with interval.waiting():
            clock.now += waits
        clock.now += works
        interval.end(100)
        interval.begin()
    return interval


def test_waiting_is_a_share_of_the_time(clock: Clock) -> None:
    assert run(clock, 1, 4).take() == {"tokens_per_second": 20, "seconds": 10, "data_wait": 0.2}


def test_waiting_is_said_in_words_where_it_matters(clock: Clock) -> None:
    feed = StoreFeed(None, [], BatchPlan(seed=0, lengths=[4], max_length=4), 1)  # type: ignore[arg-type]
    slow, fast, short = run(clock, 1, 4), run(clock, 1, 99), run(clock, 0.2, 0.2)
    for interval in (slow, fast, short):
        interval.take()

    assert "waited for data 20% of its time (2 s)" in feed.note(*slow.in_all())
    assert feed.note(*fast.in_all()) == feed.note(*short.in_all()) == ""
