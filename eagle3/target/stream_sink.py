"""Where a walk's states go: into the shards of its chunk, written by a thread, so that the walk need not wait.

Legend: H target hidden, n rows of a piece, P positions and C channels of a fingerprint.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

import torch

from eagle3.data.shard_file import ShardFile, StateKey
from eagle3.data.store_fingerprint import FingerprintPlace, neighbours, stored_rows
from eagle3.wiring.contract import WiringContract
from eagle3.wiring.fingerprint_file import Fingerprint

_AHEAD = 2
"""Pieces on their way to the disk; on a GPU each has a pinned buffer."""


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
        self._contract = contract
        self._numbers: dict[StateKey, torch.Tensor] = {}

    def take(self, key: StateKey, begin: int, states: torch.Tensor) -> None:
        """See `StateSink.put`."""
        inside = [at for at, row in enumerate(self._rows) if begin <= row < begin + len(states)]
        if inside:
            numbers = self._numbers.setdefault(key, torch.empty(len(self._rows), len(self._place.channels)))
            rows = states[[self._rows[at] - begin for at in inside]]
            numbers[inside] = rows[:, list(self._place.channels)].float().cpu()

    def fingerprint(self) -> Fingerprint:
        """The fingerprint, after the walk."""
        rows = {key: stored_rows(numbers, self._contract) for key, numbers in self._numbers.items()}
        last = rows.pop("last")
        return self._place.fingerprint({index: rows[index] for index in rows if index != "last"}, last)


class ShardSink:
    """A `StateSink`. A context manager: at its end every row is in its shard, or the first error is raised.

    Args:
        parts: the shards to fill; rows of the chunk between them are already in the store.
        contract: of the store.
        copy: from the engine's device to the CPU, see `copier`.
        fingerprint: what picks the store's fingerprint, if this chunk makes it.
    """

    def __init__(
        self, parts: Sequence[Part], contract: WiringContract, copy: Copy, fingerprint: FingerprintRows | None = None
    ) -> None:
        self.keys: frozenset[StateKey] = frozenset([*contract.output_indices, "last"])
        self._stored = self.keys
        self._parts = parts
        self._dtype: torch.dtype = getattr(torch, contract.dtype)
        self._copy = copy
        self._fingerprint = fingerprint
        if fingerprint is not None:
            self.keys |= fingerprint.keys
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="states")
        self._pending: deque[Future[None]] = deque()

    def put(self, key: StateKey, begin: int, states: torch.Tensor) -> None:
        """See `StateSink.put`. Waits while the disk is behind.

        Raises:
            ProblemsError: an earlier piece could not be written.
        """
        if self._fingerprint is not None:
            self._fingerprint.take(key, begin, states)
        if key in self._stored:
            if len(self._pending) == _AHEAD:
                self._pending.popleft().result()
            # a copy of its own: `states` is the engine's again when this returns
            rows = self._copy(states.to(self._dtype, copy=True))
            self._pending.append(self._pool.submit(self._write, key, begin, rows))

    def check(self) -> None:
        """Raises what went wrong with a piece, if anything did so far."""
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._pool.shutdown(cancel_futures=kind is not None)
        if kind is None:
            self.check()

    def _write(self, key: StateKey, begin: int, arrived: Callable[[], torch.Tensor]) -> None:
        rows = arrived()
        for part in self._parts:
            first, end = max(part.begin, begin), min(part.end, begin + len(rows))
            if first < end:
                part.file.put(key, first - part.begin, rows[first - begin : end - begin])


Copy = Callable[[torch.Tensor], Callable[[], torch.Tensor]]
"""Begins to copy rows to the CPU; what comes back waits for them."""


def copier(device: torch.device) -> Copy:
    """How rows of this device come to the CPU; for one sink at a time."""
    return _PinnedCopies(device).begin if device.type == "cuda" else _already_there


def _already_there(rows: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: rows.cpu()


class _PinnedCopies:
    """Copies through pinned buffers, on a stream of their own, beside the walk's kernels."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._buffers = deque([torch.empty(0, dtype=torch.uint8)] * _AHEAD)

    def begin(self, rows: torch.Tensor) -> Callable[[], torch.Tensor]:
        buffer = self._buffers.popleft()
        if buffer.nbytes < rows.nbytes:
            buffer = torch.empty(rows.nbytes, dtype=torch.uint8, pin_memory=True)
        self._buffers.append(buffer)
        host = buffer[: rows.nbytes].view(rows.dtype).view(rows.shape)
        arrived = torch.cuda.Event(blocking=True)
        self._stream.wait_stream(torch.cuda.current_stream(rows.device))
        with torch.cuda.stream(self._stream):
            host.copy_(rows, non_blocking=True)
            arrived.record()
        rows.record_stream(self._stream)

        def wait() -> torch.Tensor:
            arrived.synchronize()
            return host

        return wait
