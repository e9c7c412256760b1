"""Figures of passes whose times are known."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from eagle3.serve.bench.figures import busy, percentiles, speed_of, speedup_of
from eagle3.serve.bench.measured import Pass, Request


def request(talk: str, sent: float, at: list[float], tokens: list[int]) -> Request:
    return Request(talk, "s", 0, f"d{talk}", 5, sent, tuple(at), tuple(tokens), "stop", None, "", {})


def one_pass(requests: list[Request], full: float, seconds: float, concurrency: int = 2) -> Pass:
    return Pass("k", concurrency, 0, 0.0, seconds, full, None, tuple(requests))


def test_the_end_of_a_pass_where_fewer_are_left_does_not_count() -> None:
    # Two at a time, 10 tokens/s each, until one is alone at 100 tokens/s from second 2 on.
    first = request("a", 0.0, [0.1 * (place + 1) for place in range(20)], [1] * 20)
    alone = [2 + 0.01 * place for place in range(1, 101)]
    second = request("b", 0.0, [0.1 * (place + 1) for place in range(20)] + alone, [1] * 120)
    item = one_pass([first, second], full=2.0, seconds=3.0)
    found = speed_of([item], 2, 0)
    assert found.tok_s.value == pytest.approx(20) and found.wall_tok_s == pytest.approx(140 / 3)
    assert found.decode_tok_s.value == pytest.approx(20) and found.full_share == pytest.approx(2 / 3)
    assert found.by_request.value == pytest.approx((19 + 119) / (1.9 + 2.9))
    assert speed_of([replace(item, full=3.0)], 2, 0).tok_s.value == pytest.approx(2 * 140 / 5)


def test_a_request_counts_as_far_as_all_were_busy() -> None:
    item = request("a", 1.0, [0.5, 1.0, 1.5], [1, 3, 2])
    assert busy(item, 5.0).tokens == 6 and busy(item, 5.0).decoding == 1.0
    cut = busy(item, 2.2)
    assert (cut.tokens, cut.decoded) == (4, 3) and cut.seconds == pytest.approx(1.2)
    assert busy(item, 1.2).tokens == 0 and busy(item, 1.2).decoding == 0
    assert busy(item, 0.5).seconds == 0


def test_a_speed_up_is_of_the_conversations_that_both_answered_and_what_they_share_does_not_widen_it() -> None:
    lengths = [5, 50, 7, 90, 20, 33, 12, 64]
    fast = [request(f"t{n}", 0.0, [0.01 * (1 + place) for place in range(count)], [1] * count)
            for n, count in enumerate(lengths)]  # fmt: skip
    slow = [request(f"t{n}", 0.0, [0.02 * (1 + place) for place in range(count)], [1] * count)
            for n, count in enumerate(lengths[:6])]  # fmt: skip
    found = speedup_of([one_pass(fast, 99, 99)], [one_pass(slow, 99, 99)], 0)
    assert found is not None
    for figure in found:
        assert figure.value == pytest.approx(2) and figure.interval == pytest.approx((2, 2))
    assert speedup_of([one_pass(fast, 99, 99)], [], 0) is None


def test_percentiles_weigh_and_have_intervals_over_conversations() -> None:
    values = [float(value) for value in range(1, 101)]
    owners = [f"t{value % 10}" for value in range(100)]
    found = percentiles(values, owners, None, 0)
    assert found is not None and found["p50"].value == 50 and found["p95"].value == 95 and found["p99"].value == 99
    assert found["p50"].interval[0] <= 50 <= found["p50"].interval[1]
    weighted = percentiles([1.0, 10.0], ["a", "b"], [99, 1], 0)
    assert weighted is not None and weighted["p95"].value == 1.0
    assert percentiles([], [], None, 0) is None
    assert not math.isnan(weighted["p99"].interval[0])
