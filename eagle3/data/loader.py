"""Which samples an optimiser step sees, and the batches that hold them.

Shapes: B rows, T tokens, A aux layers, H target hidden.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain
from random import Random

import torch

from eagle3.data.packing import pack_rows
from eagle3.data.row_reader import RowReader, wait_for
from eagle3.data.store import StoredSample, StoreReader
from eagle3.draft.batch import DraftBatch

Row = list[int]
"""Sample indices that share one row."""
MicroBatch = list[list[Row]]
"""Rows of each rank; a rank's list may be empty."""
Window = list[MicroBatch]
"""Micro-batches of one optimiser step."""


@dataclass(frozen=True)
class BatchPlan:
    """The order of samples: from seed and epoch alone, each sample once an epoch, short last windows kept.

    The rows of a window depend on `batch_size * accumulate * world_size` only, so equivalent settings take the
    same optimiser steps.

    Attributes:
        seed: of the order.
        lengths: tokens of each sample; index i of the plan is sample i of this list.
        max_length: longest row, in tokens; longer samples count as cut.
        batch_size: rows in a micro-batch on each rank.
        accumulate: micro-batches in a window on each rank.
        world_size: ranks.
        pack: several samples in a row, as many as fit.
    """

    seed: int
    lengths: Sequence[int]
    max_length: int
    batch_size: int = 1
    accumulate: int = 1
    world_size: int = 1
    pack: bool = False

    @property
    def steps_per_epoch(self) -> int:
        """Optimiser steps, the short last one included."""
        return -(-len(self._rows(range(len(self.lengths)))) // self._window_rows)

    def epoch(self, number: int) -> list[Window]:
        """All windows of an epoch (0-based), in order."""
        random = Random(f"{self.seed}:{number}")
        order = list(range(len(self.lengths)))
        random.shuffle(order)
        rows = self._rows(order)
        random.shuffle(rows)
        return [self._window(rows[i : i + self._window_rows]) for i in range(0, len(rows), self._window_rows)]

    @property
    def _window_rows(self) -> int:
        return self.batch_size * self.accumulate * self.world_size

    def _rows(self, order: Sequence[int]) -> list[Row]:
        if not self.pack:
            return [[index] for index in order]
        packed = pack_rows([min(self.lengths[index], self.max_length) for index in order], self.max_length)
        return [[order[place] for place in row] for row in packed]

    def _window(self, rows: list[Row]) -> Window:
        size, world = self.batch_size, self.world_size
        shares = [rows[i : i + size] for i in range(0, len(rows), size)]
        shares += [[]] * (-len(shares) % world)
        return [shares[i : i + world] for i in range(0, len(shares), world)]


@dataclass(frozen=True)
class _Tokens:
    """What a batch needs of a sample beside its states."""

    id: str
    input_ids: torch.Tensor
    loss_mask: torch.Tensor


def collate(rows: Sequence[Sequence[StoredSample]], max_length: int) -> DraftBatch:
    """Joins each row's samples, cut to `max_length` tokens each, and pads rows at the right to the longest.

    Padding has id 0, zero states, loss mask false, document -1, position 0.
    """
    assert rows and all(rows), "use empty_batch for a rank without rows"
    first = rows[0][0]
    tokens = [[_Tokens(sample.id, sample.input_ids, sample.loss_mask) for sample in row] for row in rows]
    widths = (first.aux_hidden_states.shape[1], first.last_hidden_states.shape[1])
    batch, places = _frame(tokens, max_length, widths, first.aux_hidden_states.dtype)
    for sample, (number, columns) in zip(chain.from_iterable(rows), places, strict=True):
        length = columns.stop - columns.start
        batch.aux[number, columns] = sample.aux_hidden_states[:length]
        batch.last_hidden[number, columns] = sample.last_hidden_states[:length]
    return batch


def _frame(
    rows: Sequence[Sequence[_Tokens]], max_length: int, widths: tuple[int, int], dtype: torch.dtype
) -> tuple[DraftBatch, list[tuple[int, slice]]]:
    """A batch whose states are yet to be filled (those of padding are zero), and each sample's row and columns.

    The memory of its states is pinned where there is a GPU, so that copies to it run beside other work.
    """
    lengths = [[min(sample.input_ids.numel(), max_length) for sample in row] for row in rows]
    shape = (len(rows), max(sum(row) for row in lengths))
    pin = torch.cuda.is_available()
    batch = DraftBatch(
        input_ids=torch.zeros(shape, dtype=torch.int64),
        loss_mask=torch.zeros(shape, dtype=torch.bool),
        aux=torch.empty((*shape, widths[0]), dtype=dtype, pin_memory=pin),
        last_hidden=torch.empty((*shape, widths[1]), dtype=dtype, pin_memory=pin),
        document_ids=torch.full(shape, -1),
        position_ids=torch.zeros(shape, dtype=torch.int64),
        sample_ids=[sample.id for row in rows for sample in row],
    )
    places = []
    for number, row in enumerate(rows):
        begin = 0
        for document, (sample, length) in enumerate(zip(row, lengths[number], strict=True)):
            columns = slice(begin, begin + length)
            batch.input_ids[number, columns] = sample.input_ids[:length].long()
            batch.loss_mask[number, columns] = sample.loss_mask[:length]
            batch.document_ids[number, columns] = document
            batch.position_ids[number, columns] = torch.arange(length)
            places.append((number, columns))
            begin += length
        batch.aux[number, begin:] = 0
        batch.last_hidden[number, begin:] = 0
    return batch, places


def _tokens(reader: StoreReader, index: int) -> _Tokens:
    return _Tokens(reader.samples[index].id, *reader.read_tokens(index))


def empty_batch(aux_width: int, hidden_size: int, dtype: torch.dtype) -> DraftBatch:
    """One unsupervised token: what a rank without rows computes so that it stays in step with the others."""
    return DraftBatch(
        input_ids=torch.zeros((1, 1), dtype=torch.int64),
        loss_mask=torch.zeros((1, 1), dtype=torch.bool),
        aux=torch.zeros((1, 1, aux_width), dtype=dtype),
        last_hidden=torch.zeros((1, 1, hidden_size), dtype=dtype),
        document_ids=torch.zeros((1, 1), dtype=torch.int64),
        position_ids=torch.zeros((1, 1), dtype=torch.int64),
        sample_ids=[],
    )


def load_windows(
    reader: StoreReader, windows: Sequence[Window], indices: Sequence[int], max_length: int, rank: int = 0
) -> Generator[list[DraftBatch], None, None]:
    """This rank's micro-batches, a list for each window, in order; the next window is read in the background, by
    several threads straight into the batches' memory.

    Args:
        reader: the store.
        windows: of `BatchPlan.epoch`; slice it to resume in the middle of an epoch.
        indices: the plan's sample i is sample `indices[i]` of the store.
        max_length: longest row, in tokens.
        rank: of this process.
    """
    contract = reader.contract
    widths = (len(contract.output_indices) * contract.hidden_size, contract.hidden_size)
    dtype: torch.dtype = getattr(torch, contract.dtype)

    def begin(window: Window) -> tuple[list[DraftBatch], list[Future[None]]]:
        """The window's batches, and the reads that fill them."""
        batches, jobs = [], []
        for micro_batch in window:
            samples = [[indices[i] for i in row] for row in micro_batch[rank]]
            if not samples:
                batches.append(empty_batch(*widths, dtype))
                continue
            tokens = [
                [_Tokens(reader.samples[index].id, *reader.read_tokens(index)) for index in row] for row in samples
            ]
            batch, places = _frame(tokens, max_length, widths, dtype)
            batches.append(batch)
            for index, (number, columns) in zip(chain.from_iterable(samples), places, strict=True):
                jobs += states.read(index, batch.aux[number, columns], batch.last_hidden[number, columns])
        return batches, jobs

    with RowReader(reader) as states:
        ahead = None
        for window in windows:
            ahead, current = begin(window), ahead
            if current is not None:
                wait_for(current[1])
                yield current[0]
        if ahead is not None:
            wait_for(ahead[1])
            yield ahead[0]
