"""The batches that hold the samples of an optimiser step.

Shapes: B rows, T tokens, L supervised ones, A aux layers, H target hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch

from eagle3.data.dealing import Row, Window
from eagle3.data.row_reader import Part, Reading, RowReader, wait_for
from eagle3.data.store import StoredSample, StoreReader
from eagle3.draft.batch import DraftBatch
from eagle3.draft.config import TTTSettings
from eagle3.draft.planned import Planned, plan_batch

Begun = Callable[[], list[DraftBatch]]
"""Waits for a window that is being read: this rank's micro-batches."""


@dataclass(frozen=True)
class _Tokens:
    """What a batch needs of a sample beside its states, cut."""

    id: str
    input_ids: torch.Tensor
    loss_mask: torch.Tensor


@dataclass(frozen=True)
class _Place:
    """Where a sample is in a batch: its row and columns there, and its rows of the last hidden states."""

    row: int
    columns: slice
    last: slice


@dataclass(frozen=True)
class _BatchRead:
    """A batch whose states are being read; its greedy tokens are as they are stored.

    Attributes:
        jobs: the reads.
        samples: index in the store of each sample, and its rows of the last hidden states.
    """

    batch: DraftBatch
    jobs: list[Reading]
    samples: list[tuple[int, slice]]


def collate(rows: Sequence[Sequence[StoredSample]], max_length: int) -> DraftBatch:
    """Joins each row's samples, cut to `max_length` tokens each, and pads rows at the right to the longest.

    Padding has id 0, zero states, loss mask false, document -1, position 0.
    """
    assert rows and all(rows), "use empty_batch for a rank without rows"
    first = rows[0][0]
    tokens = [
        [_Tokens(sample.id, sample.input_ids[:max_length], sample.loss_mask[:max_length]) for sample in row]
        for row in rows
    ]
    widths = (first.aux_hidden_states.shape[1], first.last_hidden_states.shape[1])
    argmax_dtype = None if first.target_argmax is None else torch.int64
    batch, places = _frame(tokens, widths, first.aux_hidden_states.dtype, argmax_dtype=argmax_dtype)
    for sample, place in zip(chain.from_iterable(rows), places, strict=True):
        length, supervised = place.columns.stop - place.columns.start, place.last.stop - place.last.start
        batch.aux[place.row, place.columns] = sample.aux_hidden_states[:length]
        batch.last_hidden[place.last] = sample.supervised_last[:supervised]
        if batch.target_argmax is not None:
            assert sample.supervised_argmax is not None, "samples of one batch come from one store"
            batch.target_argmax[place.last] = sample.supervised_argmax[:supervised].long()
    return batch


def _frame(
    rows: Sequence[Sequence[_Tokens]],
    widths: tuple[int, int],
    dtype: torch.dtype,
    slots: int = 0,
    argmax_dtype: torch.dtype | None = None,
) -> tuple[DraftBatch, list[_Place]]:
    """A batch whose states are yet to be filled (those of padding are zero), and each sample's place.

    The memory of its states is pinned where there is a GPU, so that copies to it run beside other work.

    Args:
        widths: A * H and H.
        slots: A where rows have scales, else 0.
        argmax_dtype: that greedy tokens are filled in as; None where there are none.
    """
    shape = (len(rows), max(sum(len(sample.input_ids) for sample in row) for row in rows))
    supervised = sum(int(sample.loss_mask.sum()) for row in rows for sample in row)
    pin = torch.cuda.is_available()
    batch = DraftBatch(
        input_ids=torch.zeros(shape, dtype=torch.int64),
        loss_mask=torch.zeros(shape, dtype=torch.bool),
        aux=torch.empty((*shape, widths[0]), dtype=dtype, pin_memory=pin),
        last_hidden=torch.empty((supervised, widths[1]), dtype=dtype, pin_memory=pin),
        document_ids=torch.full(shape, -1),
        position_ids=torch.zeros(shape, dtype=torch.int64),
        sample_ids=[sample.id for row in rows for sample in row],
        aux_scales=torch.empty((*shape, slots), pin_memory=pin) if slots else None,
        last_scales=torch.empty(supervised, pin_memory=pin) if slots else None,
        target_argmax=None if argmax_dtype is None else torch.empty(supervised, dtype=argmax_dtype, pin_memory=pin),
    )
    places, last = [], 0
    for number, row in enumerate(rows):
        begin = 0
        for document, sample in enumerate(row):
            columns = slice(begin, begin + len(sample.input_ids))
            batch.input_ids[number, columns] = sample.input_ids.long()
            batch.loss_mask[number, columns] = sample.loss_mask
            batch.document_ids[number, columns] = document
            batch.position_ids[number, columns] = torch.arange(len(sample.input_ids))
            count = int(sample.loss_mask.sum())
            places.append(_Place(number, columns, slice(last, last + count)))
            begin, last = columns.stop, last + count
        for states in (batch.aux, batch.aux_scales):
            if states is not None:
                states[number, begin:].view(torch.uint8).zero_()
    return batch, places


def empty_batch(
    aux_width: int, hidden_size: int, dtype: torch.dtype, slots: int = 0, argmax: bool = False
) -> DraftBatch:
    """One unsupervised token: what a rank without rows computes so that it stays in step with the others.

    Args:
        slots, argmax: as the others' batches have scales and greedy tokens.
    """
    token = _Tokens("", torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.bool))
    batch, _ = _frame([[token]], (aux_width, hidden_size), dtype, slots, torch.int64 if argmax else None)
    batch.aux.view(torch.uint8).zero_()
    if batch.aux_scales is not None:
        batch.aux_scales.fill_(1)
    return replace(batch, document_ids=torch.zeros((1, 1), dtype=torch.int64), sample_ids=[])


def load_windows(
    reader: StoreReader,
    windows: Sequence[Window],
    indices: Sequence[int],
    max_length: int,
    rank: int = 0,
    threads: int | None = None,
) -> Generator[list[DraftBatch], None, None]:
    """This rank's micro-batches, a list for each window, in order; the next window is read in the background.

    Args:
        reader, windows, indices, max_length, rank, threads: see `begin_windows`.
    """
    with closing(begin_windows(reader, windows, indices, max_length, rank, threads)) as begun:
        current = None
        for _ in windows:
            ahead = next(begun)
            if current is not None:
                yield current()
            current = ahead
        if current is not None:
            yield current()


def begin_windows(
    reader: StoreReader,
    windows: Sequence[Window],
    indices: Sequence[int],
    max_length: int,
    rank: int = 0,
    threads: int | None = None,
    ttt: TTTSettings | None = None,
) -> Generator[Begun, None, None]:
    """Begins to read a window each time that it is asked for the next one, by several threads straight into the
    memory of this rank's micro-batches. Asked when there is none left, or closed, it stops reading.

    Args:
        reader: the store.
        windows: of `BatchPlan.epoch`; slice it to resume in the middle of an epoch.
        indices: the plan's sample i is sample `indices[i]` of the store.
        max_length: longest sample, in tokens; longer ones are cut.
        rank: of this process.
        threads: that read, see `RowReader`.
        ttt: plan the batches for it, in the background too.
    """
    groups = [[indices[i] for micro_batch in window for row in micro_batch[rank] for i in row] for window in windows]
    planner = ThreadPoolExecutor(1, thread_name_prefix="plan")
    with reader.ahead(groups) as done, RowReader(reader, threads) as states:
        try:
            for window in windows:
                samples = [[[indices[i] for i in row] for row in micro_batch[rank]] for micro_batch in window]
                reads = _begin(reader, states, samples, max_length)
                masks = [(read.batch.loss_mask, read.batch.document_ids) for read in reads]
                plans = [planner.submit(plan_batch, *mask, ttt) for mask in masks if ttt]
                yield partial(_finish, reader, reads, plans, done)
        finally:
            planner.shutdown(cancel_futures=True)


class Ahead:
    """Takes windows that were begun, in order.

    Args:
        begun: begins a window each time that it is asked for the next one.
    """

    def __init__(self, begun: Iterator[Begun]) -> None:
        self._begun = begun
        self._next: Begun | None = None

    def begin(self) -> None:
        """Begins the next window if there is one; for when there is time for that."""
        if self._next is None:
            self._next = next(self._begun, None)

    def take(self) -> list[DraftBatch]:
        """Waits for the next window, which must be there."""
        self.begin()
        finish, self._next = self._next, None
        assert finish is not None, "no window is left"
        return finish()


def _finish(
    reader: StoreReader, reads: list[_BatchRead], plans: list[Future[Planned]], done: Callable[[int], None]
) -> list[DraftBatch]:
    """The batches, when they are read and planned."""
    batches = _read(reader, reads)
    done(1)
    if not plans:
        return batches
    return [replace(batch, planned=plan.result()) for batch, plan in zip(batches, plans, strict=True)]


def read_batches(reader: StoreReader, micro_batches: Sequence[Sequence[Row]], max_length: int) -> list[DraftBatch]:
    """A batch of these rows of samples (by their indices in the store) for each micro-batch; rows may be none."""
    with RowReader(reader) as states:
        return _read(reader, _begin(reader, states, micro_batches, max_length))


def _read(reader: StoreReader, reads: Sequence[_BatchRead]) -> list[DraftBatch]:
    """Waits for what was begun; the batches, with their greedy tokens in the type that a batch has.

    Raises:
        ProblemsError: as `wait_for`; kind `store.ids_out_of_range`.
    """
    wait_for([job for read in reads for job in read.jobs])
    return [_widened(reader, read) for read in reads]


def _widened(reader: StoreReader, read: _BatchRead) -> DraftBatch:
    stored = read.batch.target_argmax
    if stored is None:
        return read.batch
    argmax = torch.empty(stored.shape, dtype=torch.int64, pin_memory=torch.cuda.is_available()).copy_(stored)
    for index, rows in read.samples:
        reader.check_argmax(index, argmax[rows])
    return replace(read.batch, target_argmax=argmax)


def _begin(
    reader: StoreReader, states: RowReader, micro_batches: Sequence[Sequence[Row]], max_length: int
) -> list[_BatchRead]:
    """Batches of these samples of the store, and the reads that fill them."""
    contract, layout = reader.contract, reader.layout
    widths = (len(contract.output_indices) * contract.hidden_size, contract.hidden_size)
    slots = len(contract.output_indices) if layout.scaled else 0
    argmax_dtype = layout.ids_dtype if layout.has_argmax else None
    reads: list[_BatchRead] = []
    for rows in micro_batches:
        if not rows:
            reads.append(_BatchRead(empty_batch(*widths, layout.dtype, slots, layout.has_argmax), [], []))
            continue
        tokens = [[_tokens(reader, index, max_length) for index in row] for row in rows]
        batch, places = _frame(tokens, widths, layout.dtype, slots, argmax_dtype)
        placed = list(zip(chain.from_iterable(rows), places, strict=True))
        jobs = [job for at in placed for job in states.read(at[0], list(_parts(reader, *at, batch)))]
        reads.append(_BatchRead(batch, jobs, [(index, place.last) for index, place in placed]))
    return reads


def _parts(reader: StoreReader, index: int, place: _Place, batch: DraftBatch) -> Iterator[Part]:
    """What is to be read of one sample's states, and where to."""
    stored, columns = reader.place(index), (place.row, place.columns)
    yield Part("aux_hidden_states", stored.rows.start, batch.aux[columns])
    if batch.aux_scales is not None:
        yield Part("aux_scales", stored.rows.start, batch.aux_scales[columns])
    runs = [(0, place.last)] if reader.layout.last_rows == "supervised" else _runs(batch.loss_mask[columns], place.last)
    for begin, rows in runs:
        yield Part("last_hidden_states", stored.last.start + begin, batch.last_hidden[rows])
        if batch.last_scales is not None:
            yield Part("last_scales", stored.last.start + begin, batch.last_scales[rows])
        if batch.target_argmax is not None:
            yield Part("target_argmax", stored.last.start + begin, batch.target_argmax[rows])


def _runs(loss_mask: torch.Tensor, rows: slice) -> list[tuple[int, slice]]:
    """Where each run of supervised tokens begins in a loss mask [T], and which of `rows`, theirs all, are its own."""
    edges = torch.nn.functional.pad(loss_mask.to(torch.int8), (1, 1)).diff()
    begins, ends = ((edges == edge).nonzero().flatten() for edge in (1, -1))
    stops = (ends - begins).cumsum(0) + rows.start
    starts = stops - (ends - begins)
    return [(begin, slice(start, stop)) for begin, start, stop in torch.stack([begins, starts, stops]).T.tolist()]


def _tokens(reader: StoreReader, index: int, max_length: int) -> _Tokens:
    input_ids, loss_mask = reader.read_tokens(index)
    return _Tokens(reader.samples[index].id, input_ids[:max_length], loss_mask[:max_length])
