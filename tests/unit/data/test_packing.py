from hypothesis import given
from hypothesis import strategies as st

from eagle3.data.packing import pack_rows


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
