"""The order of samples: windows, whatever their rows cost and however they are split."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.data.batch_plan import BatchPlan
from eagle3.data.dealing import Window, places_of, rank_loads, rows_of
from eagle3.data.packing import pack_rows
from eagle3.draft.cost import Cost

COST = Cost(token=10, chain=700, attended=1)
ROOM, LONGEST = 60, 40
MANY = [(1 + i * 7 % 40, 1 + i * 5 % (1 + i * 7 % 40)) for i in range(300)]

samples_of = st.lists(
    st.integers(1, LONGEST).flatmap(lambda tokens: st.tuples(st.just(tokens), st.integers(1, tokens))),
    min_size=1,
    max_size=60,
)


def plan(samples: list[tuple[int, int]], accumulate: int = 1, ranks: int = 1, **options: object) -> BatchPlan:
    lengths, costs = [tokens for tokens, _ in samples], [COST.sample(*sample) for sample in samples]
    values = {"seed": 3, "pack": True, "row_tokens": ROOM} | options
    return BatchPlan(
        lengths=lengths, max_length=LONGEST, accumulate=accumulate, world_size=ranks, costs=costs, **values
    )  # type: ignore[arg-type]


def excess(found: BatchPlan, windows: list[Window]) -> float:
    loads = [rank_loads(window, found.cost) for window in windows]
    return sum(map(max, loads)) * len(loads[0]) / sum(map(sum, loads)) - 1


@settings(deadline=None)
@given(samples_of, st.integers(1, 4), st.integers(1, 8), st.booleans())
def test_each_sample_once_within_the_budget_and_never_less_even_than_in_order(
    samples: list[tuple[int, int]], accumulate: int, ranks: int, pack: bool
) -> None:
    found = plan(samples, accumulate, ranks, pack=pack)
    for number in range(2):
        windows = found.epoch(number)
        assert len(windows) == found.steps_per_epoch
        assert sorted(place for window in windows for place in places_of(window)) == list(range(len(samples)))
        for window in windows:
            assert 1 <= len(window) <= accumulate and all(len(micro_batch) == ranks for micro_batch in window)
            assert all(sum(samples[place][0] for place in row) <= ROOM for row in rows_of(window))
            assert all(len(rows) <= 1 for micro_batch in window for rows in micro_batch)
        for window, in_order in zip(windows, found.epoch_in_order(number), strict=True):
            assert sorted(rows_of(window)) == sorted(rows_of(in_order))
            assert max(rank_loads(window, found.cost)) <= max(rank_loads(in_order, found.cost))


@settings(deadline=None)
@given(samples_of, st.sampled_from([1, 2, 4, 6, 8, 12]), st.booleans())
def test_windows_have_the_same_rows_however_their_number_is_split(
    samples: list[tuple[int, int]], product: int, pack: bool
) -> None:
    def steps(batch_size: int, accumulate: int, ranks: int) -> list[list[list[int]]]:
        found = plan(samples, accumulate, ranks, batch_size=batch_size, pack=pack)
        return [sorted(rows_of(window)) for epoch in range(2) for window in found.epoch(epoch)]

    splits = [
        (batch_size, accumulate, product // batch_size // accumulate)
        for batch_size in range(1, 5)
        for accumulate in range(1, 5)
        if product % (batch_size * accumulate) == 0 and product // batch_size // accumulate <= 8
    ]
    first, *others = [steps(*split) for split in splits]
    assert all(other == first for other in others)


def test_a_full_row_costs_what_others_do() -> None:
    found = plan(MANY, row_tokens=200)
    costs = sorted(found.cost(row) for window in found.epoch(0) for row in rows_of(window))
    by_length = [found.cost(row) for row in pack_rows([tokens for tokens, _ in MANY], 200)]
    mean = sum(costs) / len(costs)
    assert costs[-1] < 1.1 * mean < 1.2 * mean < max(by_length)


def test_samples_of_one_kind_take_each_others_places_from_epoch_to_epoch() -> None:
    found = plan([(20, 5)] * 30)
    rows = [{frozenset(row) for window in found.epoch(number) for row in rows_of(window)} for number in range(2)]
    assert rows[0] != rows[1] and all(len(row) == 3 for row in rows[0])


def test_ranks_are_even_where_dealing_in_order_is_not() -> None:
    unpacked = plan(MANY, accumulate=4, ranks=4, pack=False)
    assert excess(unpacked, unpacked.epoch(0)) < 0.1 < 0.3 < excess(unpacked, unpacked.epoch_in_order(0))


def test_the_order_of_a_seed_does_not_change_between_versions() -> None:
    """If this fails on purpose, packed runs of before cannot go on: `order_version` must say so."""
    samples = [(40, 4), (30, 30), (25, 5), (25, 20), (20, 20), (12, 1), (10, 10), (8, 2), (5, 5), (3, 1), (3, 1)]
    samples += [(38, 20), (22, 22), (22, 2)]
    assert plan(samples, accumulate=2, ranks=2).epoch(1) == [
        [[[[0, 4]], [[11, 9, 8, 10, 7]]], [[[1, 13]], [[3, 6]]]],
        [[[[2, 12, 5]], []]],
    ]
    assert plan(samples, accumulate=2, ranks=2, pack=False).epoch(1) == [
        [[[[3]], [[13]]], [[[7]], [[6]]]],
        [[[[8]], [[2]]], [[[1]], [[4]]]],
        [[[[9]], [[10]]], [[[11]], [[0]]]],
        [[[[12]], [[5]]]],
    ]
