"""Where a walk's states go: into the shards of its chunk, written by threads, so that the walk need not wait.

A captured layer's states come in a burst, gigabytes in about a second; they wait in host memory, within a bound, for
the disk, which has until the next captured layer.

Legend: H target hidden, n rows of a piece, P positions and C channels of a fingerprint.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Self

import psutil
import torch

from eagle3.data.shard_file import ShardFile, StateKey
from eagle3.data.store_fingerprint import FingerprintPlace, as_rows, neighbours
from eagle3.data.store_layout import StoreLayout
from eagle3.draft.loss import TargetHead
from eagle3.draft.states import quantize, rounded
from eagle3.target.stream_argmax import ArgmaxRows
from eagle3.wiring.contract import WiringContract
from eagle3.wiring.fingerprint_file import Fingerprint

_WRITERS = 4
_BLOCK_BYTES = 64 << 20
_MOST_WAITING = 8 << 30
_SHARE_OF_HOST = 1 / 16


@dataclass(frozen=True)
class Part:
    """Rows `begin` to `end` of the chunk are this shard."""

    begin: int
    end: int
    file: ShardFile


class FingerprintRows:
    """Picks the numbers of a fingerprint, those of neighbouring layers too, out of what passes.

    Args:
        place: which numbers.
        begin: row of the chunk where its sample begins.
    """

    def __init__(self, place: FingerprintPlace, begin: int, contract: WiringContract) -> None:
        self.keys: frozenset[StateKey] = frozenset(neighbours(contract.wiring))
        self._place = place
        self._rows = [begin + position for position in place.positions]
        self._dtype: torch.dtype = getattr(torch, contract.dtype)
        self._numbers: dict[StateKey, torch.Tensor] = {}

    def take(self, key: StateKey, begin: int, states: torch.Tensor) -> None:
        """See `StateSink.put`."""
        inside = [at for at, row in enumerate(self._rows) if begin <= row < begin + len(states)]
        if inside:
            numbers = self._numbers.setdefault(key, torch.empty(len(self._rows), len(self._place.channels)))
            rows = rounded(states[[self._rows[at] - begin for at in inside]], self._dtype)
            numbers[inside] = rows[:, list(self._place.channels)].cpu()

    def fingerprint(self) -> Fingerprint:
        """The fingerprint, after the walk."""
        rows = {key: as_rows(numbers) for key, numbers in self._numbers.items()}
        last = rows.pop("last")
        return self._place.fingerprint({index: rows[index] for index in rows if index != "last"}, last)


@dataclass(frozen=True)
class Staged:
    """Rows on their way to the CPU.

    Attributes:
        arrived: waits for them; rows [n, H] in the store's type, and numbers [n] as `ShardFile.write` takes them.
        release: gives their memory back.
    """

    arrived: Callable[[], tuple[torch.Tensor, torch.Tensor | None]]
    release: Callable[[], None] = lambda: None


Stage = Callable[[torch.Tensor, torch.Tensor | None], Staged]
"""Rows [n, H] in the store's type and, in an fp8 store, their scales [n] -> those on the CPU, in time."""


class ShardSink:
    """A `StateSink`. A context manager: at its end every row is in its shard, or the first error is raised.

    Args:
        parts: the shards to fill; rows of the chunk between them are already in the store.
        layout: of the store.
        stage: how rows come to the CPU, see `stager`.
        head: puts the target's head on the walk's device, see `ArgmaxRows`.
        fingerprint: what picks the store's fingerprint, if this chunk makes it.
        most_waiting: blocks of 64 MiB that may wait for the disk.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        layout: StoreLayout,
        stage: Stage,
        head: Callable[[], TargetHead],
        fingerprint: FingerprintRows | None = None,
        most_waiting: int = 2,
    ) -> None:
        self.keys: frozenset[StateKey] = frozenset([*layout.contract.output_indices, "last"])
        self._stored = self.keys
        self._parts = parts
        self._layout = layout
        self._block_rows = max(_BLOCK_BYTES // (layout.contract.hidden_size * layout.dtype.itemsize), 1)
        self._stage = stage
        self._most_waiting = most_waiting
        self._fingerprint = fingerprint
        self._argmax = ArgmaxRows([(part.begin, part.file) for part in parts], head, layout.value_dtype)
        if fingerprint is not None:
            self.keys |= fingerprint.keys
        self._writers = ThreadPoolExecutor(_WRITERS, thread_name_prefix="states")
        self._syncer = ThreadPoolExecutor(1, thread_name_prefix="sync")
        self._writes: deque[tuple[Future[None], list[ShardFile]]] = deque()
        self._syncs: deque[Future[None]] = deque()

    def put(self, key: StateKey, begin: int, states: torch.Tensor) -> None:
        """See `StateSink.put`. Waits while the disk is behind.

        Raises:
            ProblemsError: rows are missing, repeated or not finite, or earlier ones could not be written.
        """
        if self._fingerprint is not None:
            self._fingerprint.take(key, begin, states)
        if key == "last":
            self._argmax.take(begin, states)
        if key in self._stored:
            for rows in states.split(self._block_rows):
                self._send(key, begin, rows)
                begin += len(rows)

    def check(self) -> None:
        """Raises what went wrong so far, if anything did."""
        while self._writes and self._writes[0][0].done():
            self._settle()
        while self._syncs and self._syncs[0].done():
            self._syncs.popleft().result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._writers.shutdown(cancel_futures=kind is not None)
        try:
            if kind is None:
                self.check()
        finally:
            self._syncer.shutdown(cancel_futures=kind is not None)
        if kind is None:
            self.check()

    def _send(self, key: StateKey, begin: int, rows: torch.Tensor) -> None:
        """Hands a block to the writers; a slot that it completes is synced when all of it is written."""
        pieces = []
        for part in self._parts:
            first, end = max(part.begin, begin), min(part.end, begin + len(rows))
            if first < end:
                pieces.append((part.file, first - part.begin, slice(first - begin, end - begin)))
        if not pieces:
            return
        complete = [file for file, at, place in pieces if file.claim(key, at, place.stop - place.start)]
        while len(self._writes) >= self._most_waiting:
            self._settle()
        # a copy of its own: `rows` are the engine's again when this returns
        rows = rows.to(self._layout.value_dtype, copy=True)
        staged = self._stage(*quantize(rows)) if self._layout.scaled else self._stage(rows, None)

        def write() -> None:
            arrived, numbers = staged.arrived()
            for file, at, place in pieces:
                file.write(key, at, arrived[place], None if numbers is None else numbers[place])
            staged.release()

        self._writes.append((self._writers.submit(write), complete))

    def _settle(self) -> None:
        """Waits for the oldest block."""
        write, complete = self._writes.popleft()
        write.result()
        self._syncs.extend(self._syncer.submit(file.sync) for file in complete)


def blocks_waiting() -> int:
    """How many blocks may wait for the disk on this machine, as its memory is now."""
    share = int(psutil.virtual_memory().available * _SHARE_OF_HOST)
    return max(min(_MOST_WAITING, share) // _BLOCK_BYTES, 2)


def stager(device: torch.device) -> Stage:
    """How rows of this device come to the CPU."""
    return _Pinned(device).stage if device.type == "cuda" else _already_there


def _already_there(rows: torch.Tensor, scales: torch.Tensor | None) -> Staged:
    return Staged(lambda: (rows.cpu(), None if scales is None else scales.cpu()))


class _Pinned:
    """Copies through pinned buffers, on a stream of its own, beside the walk's kernels."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._free: SimpleQueue[torch.Tensor] = SimpleQueue()

    def stage(self, rows: torch.Tensor, scales: torch.Tensor | None) -> Staged:
        buffer = self._buffer(max(rows.nbytes, _BLOCK_BYTES))
        states = buffer[: rows.nbytes].view(rows.dtype).view(rows.shape)
        numbers = torch.empty(len(rows), dtype=torch.float32, pin_memory=True)
        arrived = torch.cuda.Event(blocking=True)
        self._stream.wait_stream(torch.cuda.current_stream(rows.device))
        with torch.cuda.stream(self._stream):
            states.copy_(rows, non_blocking=True)
            found = rows.sum(dim=1, dtype=torch.float32) if scales is None else scales
            numbers.copy_(found, non_blocking=True)
            arrived.record()
        for used in (rows, found):
            used.record_stream(self._stream)

        def wait() -> tuple[torch.Tensor, torch.Tensor]:
            arrived.synchronize()
            return states, numbers

        return Staged(wait, lambda: self._free.put(buffer))

    def _buffer(self, size: int) -> torch.Tensor:
        try:
            buffer = self._free.get_nowait()
        except Empty:
            buffer = torch.empty(0, dtype=torch.uint8)
        return buffer if buffer.nbytes >= size else torch.empty(size, dtype=torch.uint8, pin_memory=True)
