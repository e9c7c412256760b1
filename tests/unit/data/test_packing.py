import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.data import packing
from eagle3.data.packing import pack_evenly, pack_rows


@given(st.lists(st.integers(1, 50), max_size=60), st.randoms())
def test_every_sample_is_in_one_row_no_row_overflows_and_order_does_not_change_their_number(lengths, random) -> None:  # type: ignore[no-untyped-def]
    rows = pack_rows(lengths, 50)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= 50 for row in rows)
    shuffled = random.sample(lengths, len(lengths))
    assert len(pack_rows(shuffled, 50)) == len(rows)


@given(st.lists(st.integers(1, 50), max_size=60))
def test_no_two_rows_could_be_one(lengths: list[int]) -> None:
    fills = sorted(sum(lengths[index] for index in row) for row in pack_rows(lengths, 50))
    assert sum(fills[:2]) > 50 or len(fills) < 2


def test_the_fullest_row_with_room_is_taken() -> None:
    assert pack_rows([2, 6, 7, 3], 10) == [[2, 3], [1, 0]]
    assert pack_rows([10, 10], 10) == [[0], [1]]
    assert pack_rows([], 10) == []


samples_of = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 1000)), max_size=60)


@given(samples_of, st.randoms())
def test_even_rows_hold_every_sample_once_and_are_hardly_more(samples, random) -> None:  # type: ignore[no-untyped-def]
    lengths, costs = [length for length, _ in samples], [cost for _, cost in samples]
    rows = pack_evenly(lengths, costs, 50)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[index] for index in row) <= 50 for row in rows)
    fewest = len(pack_rows(lengths, 50))
    assert len(rows) <= fewest + fewest // 100
    shuffled = random.sample(samples, len(samples))
    assert len(pack_evenly([length for length, _ in shuffled], [cost for _, cost in shuffled], 50)) == len(rows)


def test_a_dear_sample_meets_a_cheap_one() -> None:
    assert pack_evenly([5, 5, 5, 5], [9, 1, 9, 1], 10) == [[2, 1], [0, 3]]
    assert pack_evenly([6, 5, 4, 4], [1, 9, 1, 9], 10) == [[0, 3], [1, 2]]


def test_rows_of_even_cost_take_the_room_of_the_fullest() -> None:
    lengths = [1 + index * 37 % 200 for index in range(2000)]
    costs = [length * (1 + index % 10) for index, length in enumerate(lengths)]
    spread = []
    for rows in (pack_rows(lengths, 800), pack_evenly(lengths, costs, 800)):
        totals = [sum(costs[index] for index in row) for row in rows]
        spread.append((len(rows), max(totals) / (sum(totals) / len(totals))))
    (fewest, uneven), (number, even) = spread
    assert number <= 1.01 * fewest and even < 1.1 < 1.3 < uneven


def test_where_even_rows_would_be_too_many_they_are_the_fullest(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, costs = [2, 6, 7, 3], [4, 3, 2, 1]
    monkeypatch.setattr(packing, "_fill_evenly", lambda lengths, *_: [[index] for index in range(len(lengths))])
    assert pack_evenly(lengths, costs, 10) == pack_rows(lengths, 10)
