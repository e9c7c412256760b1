"""Which samples each optimiser step sees, and which rank computes them.

The order is part of a run: `order_version` says which one it has, and a run goes on with no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random

from eagle3.data.dealing import Row, Window, deal, deal_in_order
from eagle3.data.packing import pack_evenly

ROWS_IN_ORDER, ROWS_BY_COST = 1, 2
"""Versions of the order: packed by length alone, until 2026-11; and so that rows cost alike."""


def order_version(pack: bool) -> int:
    """The order that `BatchPlan` gives: which samples meet in a step. How they are dealt to ranks is no part of it."""
    return ROWS_BY_COST if pack else ROWS_IN_ORDER


@dataclass(frozen=True)
class BatchPlan:
    """The order of samples: from seed and epoch alone, each sample once an epoch, short last windows kept.

    The rows of a window depend on `batch_size * accumulate * world_size` only, so equivalent settings take the
    same optimiser steps; what rows cost decides which rank computes them.

    Attributes:
        seed: of the order.
        lengths: tokens of each sample; index i of the plan is sample i of this list.
        max_length: longest sample, in tokens; longer ones count as cut.
        batch_size: rows in a micro-batch on each rank.
        accumulate: micro-batches in a window on each rank.
        world_size: ranks.
        pack: several samples in a row, so that rows are full and cost alike.
        row_tokens: room of such a row, in tokens, at least `max_length`; None: `max_length`.
        costs: of each sample, in any unit; None: its tokens.
    """

    seed: int
    lengths: Sequence[int]
    max_length: int
    batch_size: int = 1
    accumulate: int = 1
    world_size: int = 1
    pack: bool = False
    row_tokens: int | None = None
    costs: Sequence[int] | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Optimiser steps, the short last one included."""
        rows = len(self._packed if self.pack else self.lengths)
        return -(-rows // self._window_rows)

    def epoch(self, number: int) -> list[Window]:
        """All windows of an epoch (0-based), in order."""
        return [
            deal(rows, [self.cost(row) for row in rows], self.batch_size, self.world_size)
            for rows in self._epoch_rows(number)
        ]

    def epoch_in_order(self, number: int) -> list[Window]:
        """The same with each window's rows dealt to ranks as they come, whatever they cost; for comparison."""
        return [deal_in_order(rows, self.batch_size, self.world_size) for rows in self._epoch_rows(number)]

    def cost(self, row: Row) -> int:
        """Of its samples together."""
        return sum(self._kinds[index][1] for index in row)

    def _epoch_rows(self, number: int) -> list[list[Row]]:
        """The rows of each window of an epoch."""
        random = Random(f"{self.seed}:{number}")
        order = list(range(len(self.lengths)))
        random.shuffle(order)
        rows = self._rows(order)
        random.shuffle(rows)
        size = self._window_rows
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    @property
    def _window_rows(self) -> int:
        return self.batch_size * self.accumulate * self.world_size

    def _rows(self, order: Sequence[int]) -> list[Row]:
        """Samples of one kind take each other's places as `order` has them."""
        if not self.pack:
            return [[index] for index in order]
        by_kind = sorted(order, key=self._kinds.__getitem__)
        return [[by_kind[place] for place in row] for row in self._packed]

    @cached_property
    def _kinds(self) -> list[tuple[int, int]]:
        """(tokens, cost) of each sample, cut."""
        lengths = [min(length, self.max_length) for length in self.lengths]
        return list(zip(lengths, lengths if self.costs is None else self.costs, strict=True))

    @cached_property
    def _packed(self) -> list[Row]:
        """Rows of places in the list of samples sorted by kind."""
        kinds = sorted(self._kinds)
        return pack_evenly([kind[0] for kind in kinds], [kind[1] for kind in kinds], self.row_tokens or self.max_length)
