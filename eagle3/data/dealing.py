"""Deals the rows of an optimiser step to ranks, so that none has much more to do than the others.

Ranks meet once a window, when gradients are exchanged after its last micro-batch; so it is the sum over a rank's
micro-batches that sets the pace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Row = list[int]
"""Sample indices that share one row."""
MicroBatch = list[list[Row]]
"""Rows of each rank; a rank's list may be empty."""
Window = list[MicroBatch]
"""Micro-batches of one optimiser step."""


def deal(rows: Sequence[Row], costs: Sequence[int], batch_size: int, world_size: int) -> Window:
    """Rows of one optimiser step, dealt to ranks and micro-batches by what they cost.

    Largest first onto the least loaded rank (Graham, SIAM J. Appl. Math. 17, 1969), in rounds of one row a rank, so
    that all ranks have as many rows, to one. The busiest rank then has at most as much more than the idlest as two rows
    of one round differ. Where dealing in order is as good, it stays; so one rank has its rows in their order. A
    rank's own rows keep their order.

    Args:
        costs: of each row.
        batch_size: most rows of a micro-batch on each rank.
    """
    in_order = deal_in_order(rows, batch_size, world_size)
    if world_size == 1:
        return in_order
    ranks, loads = _in_rounds(costs, world_size), [0] * world_size
    for place, cost in enumerate(costs):
        loads[place // batch_size % world_size] += cost
    if max(loads) <= max(sum(costs[place] for place in places) for places in ranks):
        return in_order
    shares = [[rows[place] for place in sorted(places)] for places in ranks]
    starts = range(0, max(map(len, shares)), batch_size)
    return [[share[start : start + batch_size] for share in shares] for start in starts]


def deal_in_order(rows: Sequence[Row], batch_size: int, world_size: int) -> Window:
    """Rows of one optimiser step, dealt as they come: `batch_size` to each rank in turn."""
    shares = [list(rows[i : i + batch_size]) for i in range(0, len(rows), batch_size)]
    shares += [[]] * (-len(shares) % world_size)
    return [shares[i : i + world_size] for i in range(0, len(shares), world_size)]


def rank_loads(window: Window, cost: Callable[[Row], int]) -> list[int]:
    """What each rank has to do in a window."""
    return [sum(cost(row) for micro_batch in window for row in micro_batch[rank]) for rank in range(len(window[0]))]


def rows_of(window: Window) -> list[Row]:
    """Rows of all ranks in a window; of one that was dealt in order, in their order."""
    return [row for micro_batch in window for rows in micro_batch for row in rows]


def places_of(window: Window) -> list[int]:
    """Sample places of all ranks in a window."""
    return [place for row in rows_of(window) for place in row]


def _in_rounds(costs: Sequence[int], world_size: int) -> list[list[int]]:
    """Places in `costs` of each rank's rows."""
    dearest = sorted(range(len(costs)), key=lambda place: (-costs[place], place))
    ranks: list[list[int]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for start in range(0, len(dearest), world_size):
        idlest = sorted(range(world_size), key=lambda rank: (loads[rank], rank))
        for rank, place in zip(idlest, dearest[start : start + world_size], strict=False):
            ranks[rank].append(place)
            loads[rank] += costs[place]
    return ranks
