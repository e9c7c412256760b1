"""Rows dealt to ranks by what they cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.data.dealing import Window, deal, deal_in_order, rank_loads, rows_of

costs_of = st.lists(st.integers(1, 1000), min_size=1, max_size=40)


def dealt(costs: list[int], batch_size: int, ranks: int) -> Window:
    return deal([[index] for index in range(len(costs))], costs, batch_size, ranks)


def loads(window: Window, costs: list[int]) -> list[int]:
    return rank_loads(window, lambda row: costs[row[0]])


@given(costs_of, st.integers(1, 4), st.integers(1, 8))
def test_each_row_is_dealt_once_in_as_many_micro_batches_as_in_order(
    costs: list[int], batch_size: int, ranks: int
) -> None:
    window = dealt(costs, batch_size, ranks)
    in_order = deal_in_order([[index] for index in range(len(costs))], batch_size, ranks)
    assert sorted(row[0] for row in rows_of(window)) == list(range(len(costs)))
    assert len(window) == len(in_order)
    assert all(len(micro_batch) == ranks for micro_batch in window)
    assert all(len(rows) <= batch_size for micro_batch in window for rows in micro_batch)
    assert max(loads(window, costs)) <= max(loads(in_order, costs))


@given(costs_of, st.integers(1, 4), st.integers(1, 8))
def test_the_busiest_rank_has_no_more_than_rounds_allow(costs: list[int], batch_size: int, ranks: int) -> None:
    """Two ranks differ by at most what two rows of one round do, an absent one costing nothing; hence, as for any list
    scheduling, the busiest has at most the mean and the dearest row."""
    found = loads(dealt(costs, batch_size, ranks), costs)
    sorted_costs = sorted(costs, reverse=True) + [0] * (-len(costs) % ranks)
    rounds = [sorted_costs[start : start + ranks] for start in range(0, len(sorted_costs), ranks)]
    bound = max(group[0] - group[-1] for group in rounds)
    assert max(found) * ranks <= sum(costs) + (ranks - 1) * bound
    assert max(found) * ranks <= sum(costs) + (ranks - 1) * max(costs)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=8), st.integers(1, 4))
def test_the_busiest_rank_has_at_most_a_third_more_than_the_best_deal(costs: list[int], ranks: int) -> None:
    """Of two rows a rank, the bound of Graham (4/3 - 1/(3 ranks)); by trying all deals of as many rows a rank."""
    costs = costs[: 2 * ranks]
    most = -(-len(costs) // ranks)

    def best(place: int, so_far: list[int], rows: list[int]) -> int:
        if place == len(costs):
            return max(so_far)
        found = []
        for rank in range(ranks):
            if rows[rank] < most:
                more = [load + costs[place] * (rank == at) for at, load in enumerate(so_far)]
                found.append(best(place + 1, more, [count + (rank == at) for at, count in enumerate(rows)]))
        return min(found)

    limit = (4 * ranks - 1) * best(0, [0] * ranks, [0] * ranks)
    assert max(loads(dealt(costs, 1, ranks), costs)) * 3 * ranks <= limit


def test_where_the_order_is_better_than_largest_first_it_stays() -> None:
    """Largest first ends with 7 and 5."""
    assert loads(dealt([2, 3, 2, 3, 2], 1, 2), [2, 3, 2, 3, 2]) == [6, 6]


@given(costs_of, st.integers(1, 4))
def test_one_rank_has_its_rows_in_order(costs: list[int], batch_size: int) -> None:
    window = dealt(costs, batch_size, 1)
    assert [row[0] for row in rows_of(window)] == list(range(len(costs)))


def test_the_dearest_meet_the_cheapest_and_a_ranks_rows_keep_their_order() -> None:
    assert dealt([9, 8, 1, 2], 1, 2) == [[[[0]], [[1]]], [[[2]], [[3]]]], "in order is as good"
    assert dealt([9, 1, 8, 2], 1, 2) == [[[[0]], [[2]]], [[[1]], [[3]]]]
    assert dealt([9, 1, 8, 2], 2, 2) == [[[[0], [1]], [[2], [3]]]]
    assert dealt([2, 9, 1, 8], 1, 2) == [[[[1]], [[0]]], [[[2]], [[3]]]]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_short_window_leaves_ranks_without_rows(ranks: int) -> None:
    assert [len(rows) for rows in dealt([5], 1, ranks)[0]] == [1] + [0] * (ranks - 1)
    window = dealt([1, 1, 9, 1], 1, 3)
    assert sorted(loads(window, [1, 1, 9, 1])) == [1, 2, 9]
    assert [len(rows) for rows in window[1]].count(0) == 2
