"""The windows of a run that trains from a ring: a function of the ring's plan and the config alone, never of timing.

A place is a sample's number among the samples of all shards of all epochs, in order. Windows take rows in the order of
the shards, so each needs a few consecutive ones.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from random import Random

from eagle3.data.dealing import Row, Window, deal_in_order, places_of
from eagle3.data.packing import pack_rows
from eagle3.data.ring_format import RingPlan
from eagle3.data.store_format import SampleInfo


@dataclass(frozen=True)
class RingWindows:
    """All optimiser steps of a run; each sample once an epoch, short last windows of an epoch kept. Rows are dealt to
    ranks in order; `RingFeed` deals them by cost.

    Attributes:
        ring: the ring's plan.
        max_length: longest sample, in tokens; none is longer.
        batch_size: rows in a micro-batch on each rank.
        accumulate: micro-batches in a window on each rank.
        world_size: ranks.
        pack: several samples of a shard in a row, as many as fit.
        seed: of the order of packed rows within their shard.
        row_tokens: room of a row that several samples share, in tokens, at least `max_length`; None: `max_length`.
    """

    ring: RingPlan
    max_length: int
    batch_size: int = 1
    accumulate: int = 1
    world_size: int = 1
    pack: bool = False
    seed: int = 0
    row_tokens: int | None = None

    @cached_property
    def epochs(self) -> list[list[Window]]:
        """The windows of each epoch."""
        return [self._epoch(epoch) for epoch in range(self.ring.epochs)]

    @cached_property
    def windows(self) -> list[Window]:
        """The windows of all epochs, one after the other."""
        return list(chain.from_iterable(self.epochs))

    @cached_property
    def starts(self) -> list[int]:
        """The first place of each shard, and the number of all places."""
        return list(accumulate((len(shard.samples) for shard in self.ring.shards), initial=0))

    def shard_of(self, place: int) -> tuple[int, int]:
        """(shard, sample in the shard) of a place."""
        number = bisect_right(self.starts, place) - 1
        return number, place - self.starts[number]

    def sample(self, place: int) -> SampleInfo:
        """The sample of a place."""
        number, at = self.shard_of(place)
        return self.ring.samples[self.ring.shards[number].samples[at]]

    def shards(self, window: Window) -> range:
        """The shards that a window reads."""
        places = places_of(window)
        return range(self.shard_of(min(places))[0], self.shard_of(max(places))[0] + 1)

    def first_needed(self, step: int) -> int:
        """The first shard that is needed after `step` steps; the number of all shards after the last one."""
        return self.shards(self.windows[step]).start if step < len(self.windows) else len(self.ring.shards)

    def bytes_held(self, saved: int, step: int) -> int:
        """Bytes of shards that the ring must hold at once for the window after `step` steps, if a checkpoint of `saved`
        steps is the newest one: nothing that a window after it reads may go.
        """
        last = self.shards(self.windows[step])[-1]
        return self.ring.bytes_between(self.first_needed(saved), self.ring.unit_ends[last])

    def must_save(self, saved: int, step: int) -> bool:
        """Whether a checkpoint is needed after `step` steps, if the newest one is of `saved`.

        It is where the next window would need more than half of the ring beside what is not covered: little room would
        be left for what follows.
        """
        return step < len(self.windows) and self.bytes_held(saved, step) > self.ring.max_bytes // 2

    @property
    def checkpoints(self) -> int:
        """How many checkpoints the ring asks for in all, where there are no others."""
        saved = count = 0
        for step in range(1, len(self.windows)):
            if self.must_save(saved, step):
                saved, count = step, count + 1
        return count

    @cached_property
    def most_bytes(self) -> int:
        """Bytes that the ring must hold at once where there is a checkpoint after each step."""
        return max(self.bytes_held(step, step) for step in range(len(self.windows)))

    def _epoch(self, epoch: int) -> list[Window]:
        rows: list[Row] = []
        for number, shard in enumerate(self.ring.shards):
            if shard.epoch == epoch:
                rows += self._rows(number)
        size = self.batch_size * self.accumulate * self.world_size
        return [deal_in_order(rows[i : i + size], self.batch_size, self.world_size) for i in range(0, len(rows), size)]

    def _rows(self, number: int) -> list[Row]:
        start = self.starts[number]
        lengths = [sample.tokens for sample in self.ring.infos(number)]
        if not self.pack:
            return [[start + place] for place in range(len(lengths))]
        rows = [[start + place for place in row] for row in pack_rows(lengths, self.row_tokens or self.max_length)]
        Random(f"{self.seed}:{number}").shuffle(rows)
        return rows
