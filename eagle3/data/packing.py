"""Puts several samples into one row, so that short ones do not leave rows mostly padding, and rows cost alike."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
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


_CHOICE = (64, 16, 4)
"""Lengths among which the next sample of a row is chosen by its cost; the wider, the more even rows are, and the more
room is left at their ends."""
_MORE_ROWS = 100
"""One row more for so many is accepted: what a step takes depends on what is in its rows, hardly on their number."""


def pack_evenly(lengths: Sequence[int], costs: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Fills rows one after the other, so that a full row costs about what every other does.

    A row begins with the longest sample that is left. Among the longest that still fit, the next is the one that
    brings the row's cost closest to what its tokens would cost in the mean: a dear sample is followed by a cheap one.
    Where this takes more than 1% more rows than `pack_rows`, the rows are those of `pack_rows`.

    The number of rows depends on the samples' lengths and costs alone, not on their order.

    Args:
        lengths: tokens of each sample, each at most `row_tokens`.
        costs: of each sample, in any unit.
        row_tokens: room of a row, in tokens.

    Returns:
        rows of sample indices; every index once.
    """
    shortest = pack_rows(lengths, row_tokens)
    for choice in _CHOICE:
        rows = _fill_evenly(lengths, costs, row_tokens, choice)
        if len(rows) <= len(shortest) + len(shortest) // _MORE_ROWS:
            return rows
    return shortest


def _fill_evenly(lengths: Sequence[int], costs: Sequence[int], row_tokens: int, choice: int) -> list[list[int]]:
    tokens, cost = sum(lengths), sum(costs)
    # what a sample costs above the mean of its tokens, by length, ascending; integers, so that every machine agrees
    left: dict[int, list[tuple[int, int]]] = {}
    for index, length in enumerate(lengths):
        left.setdefault(length, []).append((costs[index] * tokens - cost * length, index))
    for samples in left.values():
        samples.sort(key=_excess)
    known = sorted(left)
    rows: list[list[int]] = []
    while known:
        row: list[int] = []
        room, excess = row_tokens, 0
        while count := bisect_right(known, room):
            if row:
                length, place = _closest(left, known[max(0, count - choice) : count], -excess)
            else:
                length = known[-1]
                place = -1 if abs(left[length][-1][0]) >= abs(left[length][0][0]) else 0
            more, index = left[length].pop(place)
            row.append(index)
            room, excess = room - length, excess + more
            if not left[length]:
                known.pop(bisect_left(known, length))
        rows.append(row)
    return rows


def _closest(left: dict[int, list[tuple[int, int]]], lengths: Sequence[int], wanted: int) -> tuple[int, int]:
    """(length, place) of the sample of one of these lengths whose excess is closest to `wanted`; of equals the
    longest."""
    best, found = -1, (0, 0)
    for length in reversed(lengths):
        samples = left[length]
        place = bisect_left(samples, wanted, key=_excess)
        for near in (place - 1, place):
            if 0 <= near < len(samples):
                apart = abs(samples[near][0] - wanted)
                if best < 0 or apart < best:
                    best, found = apart, (length, near)
    return found


def _excess(sample: tuple[int, int]) -> int:
    return sample[0]
