"""Puts several samples into one row, so that short ones do not leave rows mostly padding."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def pack_rows(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Best fit, longest first: each sample goes into the fullest row that still has room for it.

    The number of rows depends on the lengths alone, not on their order.

    Args:
        lengths: tokens of each sample, each at most `row_tokens`.
        row_tokens: room of a row, in tokens.

    Returns:
        rows of sample indices; every index once.
    """
    assert all(0 < length <= row_tokens for length in lengths), "cut samples to the row before packing"
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), ascending
    for index in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        place = bisect_left(room, (lengths[index], 0))
        if place == len(room):
            left, row = row_tokens, len(rows)
            rows.append([])
        else:
            left, row = room.pop(place)
        rows[row].append(index)
        insort(room, (left - lengths[index], row))
    return rows
