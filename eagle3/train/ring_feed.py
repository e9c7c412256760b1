"""Training from a ring: what is checked before it starts, its windows, and when which shards are released.

A shard is released when a checkpoint covers every window that reads it; a window that is not covered is taken again
after a kill. So the trainer makes a checkpoint wherever the next window would need more than half of the ring beside
what is not covered yet: the writer then always has room to go on.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Event

import torch

from eagle3.config import TrainConfig
from eagle3.data.dealing import Row, Window, deal, places_of, rank_loads, rows_of
from eagle3.data.loader import Begun, read_batches
from eagle3.data.ring_folder import read_reader
from eagle3.data.ring_reader import RingReader
from eagle3.data.ring_windows import RingWindows
from eagle3.data.store import StoreReader
from eagle3.data.store_format import SampleInfo, ShardInfo
from eagle3.draft.batch import DraftBatch
from eagle3.draft.config import TTTSettings
from eagle3.draft.cost import Cost, Work
from eagle3.draft.planned import plan_batch
from eagle3.errors import Problem, problem_error
from eagle3.files import size_text
from eagle3.train.feed import work_of


@dataclass(frozen=True)
class RingSamples:
    """The training samples of a ring: all of them, each once an epoch, in these windows."""

    reader: RingReader
    steps: RingWindows

    def count_supervised(self) -> torch.Tensor:
        """int64 [V]: occurrences of each target id at supervised positions."""
        return self.reader.supervised_counts()

    def feed(self, config: TrainConfig, world_size: int, cost: Cost) -> RingFeed:
        """See `TrainSamples`."""
        assert config.ring is not None and self.steps.world_size == world_size
        return RingFeed(self.reader, self.steps, config.ring.rewind, cost)

    def windows(self, config: TrainConfig, world_size: int, cost: Cost) -> list[Window]:
        """See `TrainSamples`."""
        assert config.ring is not None
        feed = RingFeed(self.reader, ring_windows(config, self.reader, world_size), config.ring.rewind, cost)
        return [window for number in range(len(feed.epoch_steps)) for window in feed.epoch(number)]

    def info(self, place: int) -> SampleInfo:
        """See `TrainSamples`."""
        return self.steps.sample(place)

    def loss_mask(self, place: int) -> torch.Tensor | None:
        """See `TrainSamples`."""
        return None


def check_ring(config: TrainConfig, reader: RingReader, windows: RingWindows) -> list[Problem]:
    """Why this run cannot train from this ring, the contract aside."""
    ring, where, problems = reader.ring, str(reader.folder), []
    if config.epochs != ring.epochs:
        message = f"holds {ring.epochs} epoch(s), the training config has epochs={config.epochs}"
        fix = f"set epochs={ring.epochs}, or begin another ring with ring.epochs={config.epochs}"
        problems.append(Problem(where, "ring.epochs", message, fix))
    if config.max_length < ring.longest:
        message = f"its longest sample has {ring.longest} tokens, max_length is {config.max_length}"
        fix = f"set max_length={ring.longest} or more: a ring's samples are not cut"
        problems.append(Problem(where, "ring.max_length", message, fix))
    if problems:
        return problems
    needed = windows.most_bytes
    if needed > ring.max_bytes:
        message = (
            f"holds {size_text(ring.max_bytes)} of shards, but one optimiser step needs {size_text(needed)} at once "
            "(the shards that it reads, and those that are made with them)"
        )
        fix = (
            f"begin another ring with ring.max_bytes={needed} or, better, several times that; or lower "
            "shard_max_bytes or shard_max_samples there, or batch_size (batch_tokens) * accumulate here"
        )
        problems.append(Problem(where, "ring.too_small", message, fix))
    return problems


def ring_notes(config: TrainConfig, windows: RingWindows) -> list[str]:
    """What a user should know, a line each."""
    ring = windows.ring
    notes = [
        f"ring: {len(ring.samples)} training samples, {ring.epochs} epoch(s), {len(ring.shards)} shards, at most "
        f"{size_text(ring.max_bytes)} at a time",
        f"its size asks for {windows.checkpoints} checkpoints in {len(windows.windows)} steps, beside the config's own",
    ]
    if config.eval_dataset is None:
        notes.append("a ring holds no samples out (eval_fraction is not used): give eval_dataset to evaluate")
    return notes


def ring_windows(config: TrainConfig, reader: RingReader, world_size: int) -> RingWindows:
    """The windows of a run; they are made when they are first asked for."""
    return RingWindows(
        ring=reader.ring,
        max_length=config.max_length,
        batch_size=config.batch_size,
        accumulate=config.accumulate,
        world_size=world_size,
        pack=config.packs,
        seed=config.seed,
        row_tokens=config.batch_tokens,
    )


class RingFeed:
    """Windows of a ring; see `Feed`.

    Args:
        reader: the ring.
        windows: order and division of its samples.
        rewind: the ring may go back to shards that were released.
        cost: of samples, whose supervised tokens the ring's plan says.
    """

    releases = True

    def __init__(self, reader: RingReader, windows: RingWindows, rewind: bool, cost: Cost) -> None:
        self._reader, self._windows, self._rewind, self._cost = reader, windows, rewind, cost
        self._saved = 0

    @property
    def epoch_steps(self) -> list[int]:
        return [len(epoch) for epoch in self._windows.epochs]

    def epoch(self, number: int) -> list[Window]:
        """See `Feed.epoch`. Only the dealing goes by cost: a window's rows are those of its shards, in order."""
        return [self._dealt(rows_of(window)) for window in self._windows.epochs[number]]

    def epoch_in_order(self, number: int) -> list[Window]:
        return self._windows.epochs[number]

    def loads(self, window: Window) -> list[int]:
        return rank_loads(window, self._row_cost)

    def _dealt(self, rows: list[Row]) -> Window:
        costs = [self._row_cost(row) for row in rows]
        return deal(rows, costs, self._windows.batch_size, self._windows.world_size)

    def _row_cost(self, row: Row) -> int:
        samples = [self._windows.sample(place) for place in row]
        return sum(self._cost.sample(sample.tokens, sample.supervised) for sample in samples)

    def load(self, windows: Sequence[Window], rank: int, ttt: TTTSettings) -> Generator[Begun, None, None]:
        """See `Feed.load`. A rank waits for all shards of a window, not only for those of its own rows, so that none
        waits in the middle of a step."""
        stopped = Event()
        shards = _OpenShards(self._reader, rank, self._windows.world_size, stopped)
        with ThreadPoolExecutor(1, thread_name_prefix="read_ring") as pool, shards:
            try:
                for window in windows:
                    yield pool.submit(self._batches, window, rank, shards, ttt).result
            finally:
                stopped.set()

    def tokens(self, window: Window) -> int:
        return sum(self._windows.sample(place).tokens for place in places_of(window))

    def work(self, window: Window) -> Work:
        samples = [self._windows.sample(place) for place in places_of(window)]
        return work_of((sample.tokens, sample.supervised) for sample in samples)

    def ids(self, window: Window) -> list[str]:
        return [self._windows.sample(place).id for place in places_of(window)]

    @contextmanager
    def opened(self, step: int, last: int, run_id: str, is_main: bool) -> Iterator[None]:
        """See `Feed.opened`. A run that was killed after its last checkpoint says now that it is done.

        Raises:
            ProblemsError: kind `ring.released`, shards that are needed are gone; `ring.locked`, another trainer is at
                work.
        """
        self._saved = step
        first, state = self._windows.first_needed(step), read_reader(self._reader.folder, len(self._reader.ring.shards))
        ended = step >= last
        if not ended:
            self._check_released(first, state.released, step)
        if not is_main or (ended and state.run != run_id):
            yield
            return
        with self._reader.consuming(first, run_id):
            if ended:
                self._reader.release(first, finished=True)
            yield

    def must_save(self, step: int) -> bool:
        return self._windows.must_save(self._saved, step)

    def saved(self, step: int, last: bool, is_main: bool) -> None:
        self._saved = step
        if is_main:
            self._reader.release(self._windows.first_needed(step), finished=last)

    def note(self, share: float, seconds: float) -> str:
        note = f"note: training waited for the ring {share:.0%} of its time ({seconds:.0f} s)"
        if (writer := self._reader.writer_waited()) is None:
            return note
        spent, waited = writer
        return (
            f"{note}; the writer, since its last start, waited for room {waited / spent if spent else 0:.0%} of its "
            f"time ({waited:.0f} s)"
        )

    @property
    def faster(self) -> str:
        return (
            "the ring's writer gives less than training takes, unless its own log says that it waits for room: extract "
            "with more GPUs or a faster engine, make the ring larger (ring.max_bytes there), or extract a store first"
        )

    def _check_released(self, first: int, released: int, step: int) -> None:
        if released <= first or self._rewind:
            return
        message = (
            f"after step {step} this run needs shards {first} to {released - 1}, which were released: a later "
            "checkpoint, or another run, was done with them"
        )
        fix = (
            "go on with that checkpoint or run; or pass ring.rewind=true, and the writer extracts them once more "
            "(start it again if it has ended)"
        )
        raise problem_error(str(self._reader.folder), "ring.released", message, fix)

    def _batches(self, window: Window, rank: int, shards: _OpenShards, ttt: TTTSettings) -> list[DraftBatch]:
        numbers = self._windows.shards(window)
        store, first = shards.hold(numbers), self._windows.starts[numbers.start]
        rows = [[[place - first for place in row] for row in micro_batch[rank]] for micro_batch in window]
        batches = read_batches(store, rows, self._windows.max_length)
        return [replace(batch, planned=plan_batch(batch.loss_mask, batch.document_ids, ttt)) for batch in batches]


class _OpenShards:
    """The shards that a rank reads. A context manager.

    Each shard's checksum is read by one of the ranks, before any rank's step can end that uses it.
    """

    def __init__(self, reader: RingReader, rank: int, world_size: int, stopped: Event) -> None:
        self._reader, self._rank, self._world_size, self._stopped = reader, rank, world_size, stopped
        self._entries: dict[int, ShardInfo] = {}
        self._checks: dict[int, Future[bool]] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checksum")

    def hold(self, numbers: range) -> StoreReader:
        """These shards as a store, when they are there and checked."""
        self._entries = {number: entry for number, entry in self._entries.items() if number >= numbers.start}
        for number in numbers:
            if number not in self._entries:
                self._entries[number] = self._reader.wait_for(number, self._stopped)
                self._begin_check(number)
        for number in numbers:
            while number in self._checks and not self._checks.pop(number).result():
                self._entries[number] = self._reader.wait_for(number, self._stopped)
                self._begin_check(number)
        following = numbers.stop
        if following < len(self._reader.ring.shards) and self._reader.is_there(following):
            self._begin_check(following)
        return self._reader.store([self._entries[number] for number in numbers])

    def __enter__(self) -> _OpenShards:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _begin_check(self, number: int) -> None:
        if number % self._world_size == self._rank and number not in self._checks:
            self._checks[number] = self._pool.submit(self._reader.verify, number)
