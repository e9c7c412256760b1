"""The reading side of a ring: waits for shards, checks them, and says which are no longer needed.

Legend: H target hidden, V target vocab.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from threading import Event

import torch
from safetensors.torch import load_file

from eagle3.data.ring_folder import (
    ReaderState,
    check_ring_fingerprint,
    free_shards,
    is_listed,
    read_counts,
    read_entry,
)
from eagle3.data.ring_format import (
    READER_FILE,
    READER_LOCK_FILE,
    RING_FILE,
    WRITER_FILE,
    Ring,
    entry_name,
    load_ring,
)
from eagle3.data.ring_pulse import QUIET_SECONDS, Pulse, Reminder, Watch, only_one
from eagle3.data.store import StoreReader
from eagle3.data.store_check import check_shard, check_target_head
from eagle3.data.store_format import MANIFEST_FILE, ShardInfo, shard_name
from eagle3.errors import Problem, ProblemsError, problem_error, raise_problems
from eagle3.files import read_json_object, sha256_file
from eagle3.wiring.fingerprint_check import check_stored_fingerprint
from eagle3.wiring.fingerprint_file import FINGERPRINT_FILE, Fingerprint

_POLL_SECONDS = 0.05
_RESTART = "start `eagle3 extract --stream` with the ring's config, then the same command again: both go on"


class RingReader:
    """A ring as one rank reads it. Opening waits until a writer has begun it and made its first shard.

    Args:
        folder: of the ring.
        wait_seconds: most seconds to wait for anything while the writer shows no sign of life.

    Raises:
        ProblemsError: it is no ring, or damaged; there was no sign of a writer for `wait_seconds`.
    """

    def __init__(self, folder: Path, wait_seconds: float) -> None:
        self.folder, self.name = folder, str(folder)
        self._wait_seconds = wait_seconds
        self._writer = Watch(folder / WRITER_FILE)
        self._pulse: Pulse | None = None
        self._state = ReaderState()
        self._wait(lambda: (folder / RING_FILE).exists() or (folder / MANIFEST_FILE).exists(), "a ring", Event())
        self.ring: Ring = load_ring(folder)
        raise_problems(self._check_head(), f"cannot use the ring in {folder}")
        check_ring_fingerprint(folder, self.ring)
        self._wait((folder / FINGERPRINT_FILE).exists, "its first shard", Event())
        self.fingerprint = self._read_fingerprint()
        self.layout, self.contract = self.ring.layout, self.ring.contract
        self.settings, self.target_config = self.ring.settings, self.ring.target_config

    def target_head(self) -> dict[str, torch.Tensor]:
        """`embed_tokens.weight` [V, H], `norm.weight` [H], and `lm_head.weight` [V, H] (the embedding, if tied)."""
        tensors = load_file(self.folder / self.ring.target_head.file)
        return {"lm_head.weight": tensors["embed_tokens.weight"], **tensors}

    def supervised_counts(self) -> torch.Tensor:
        """int64 [V]: how often each token is supervised in an epoch.

        Raises:
            ProblemsError: kind `ring.counts`, the file is missing or damaged.
        """
        file = self.ring.supervised_counts
        path = self.folder / file.file
        if not path.is_file() or sha256_file(path) != file.sha256:
            message = "is missing, or has another checksum than the ring says"
            raise problem_error(str(path), "ring.counts", message, "restart the writer: it writes the file anew")
        return read_counts(self.folder)

    def is_there(self, number: int) -> bool:
        """Whether a shard is there now."""
        return is_listed(self.folder, number)

    def wait_for(self, number: int, stopped: Event) -> ShardInfo:
        """Waits for a shard; its size, header and list of samples are checked.

        Args:
            stopped: ends the waiting.

        Raises:
            ProblemsError: kind `ring.no_writer`, it did not come; it is damaged; `stopped` was set.
        """
        self._wait(lambda: self.is_there(number), shard_name(number), stopped)
        entry = self._entry(number)
        problems = check_shard(self.folder, entry, self.ring.layout)
        if number == 0 and not problems:
            manifest = self.ring.manifest([entry], self.fingerprint)
            problems = check_stored_fingerprint(self.folder, manifest.to_dict(), self.contract)
        raise_problems(_with_fix(problem, self.folder, number) for problem in problems)
        return entry

    def store(self, entries: Sequence[ShardInfo]) -> StoreReader:
        """Shards that `wait_for` gave, as a store of their samples, in order."""
        return StoreReader.of_manifest(self.folder, self.ring.manifest(entries))

    def verify(self, number: int) -> bool:
        """Reads all of a shard; whether it was there (a writer may make room for one that is needed before it).

        Raises:
            ProblemsError: kind `store.checksum`.
        """
        path = self.folder / shard_name(number)
        try:
            found = sha256_file(path)
        except FileNotFoundError:
            return False
        if found != self._entry(number).sha256:
            problem = Problem(str(path), "store.checksum", "its checksum is not the one of its entry", "")
            raise_problems([_with_fix(problem, self.folder, number)])
        return True

    @contextmanager
    def consuming(self, first: int, run: str) -> Iterator[None]:
        """What the one process encloses that releases shards: it alone trains from the ring then.

        Args:
            first: shard that is needed first; what was released after it is extracted once more.
            run: what tells the run from others.

        Raises:
            ProblemsError: kind `ring.locked`, another trainer is at work.
        """
        state = ReaderState(first, False, run)
        with (
            only_one(self.folder, READER_LOCK_FILE, "trainer"),
            Pulse(self.folder / READER_FILE, asdict(state)) as pulse,
        ):
            self._pulse, self._state = pulse, state
            free_shards(self.folder, first)
            yield

    def release(self, number: int, finished: bool = False) -> None:
        """Says that shards before `number` are needed no more, and removes them.

        Args:
            finished: none will be needed any more; the writer ends.
        """
        assert self._pulse is not None, "only the process that consumes releases"
        self._state = replace(self._state, released=number, finished=finished)
        self._pulse.say(asdict(self._state))
        free_shards(self.folder, number)

    def writer_waited(self) -> tuple[float, float] | None:
        """Seconds that the writer has worked since its last start, and of these waited for room; None where unknown."""
        try:
            state = read_json_object(self.folder / WRITER_FILE, "what the writer says")
        except ProblemsError:  # only a note needs it, and the training is done
            return None
        spent, waited = state.get("seconds"), state.get("waited")
        return (spent, waited) if type(spent) is float and type(waited) is float else None

    def _check_head(self) -> list[Problem]:
        problems = check_target_head(self.folder, self.ring.manifest())
        path, listed = self.folder / self.ring.target_head.file, self.ring.target_head.sha256
        if problems or sha256_file(path) == listed:
            return problems
        message, fix = "its checksum is not the ring's", "delete it and restart the writer: it writes the file anew"
        return [Problem(str(path), "store.checksum", message, fix)]

    def _read_fingerprint(self) -> Fingerprint:
        path = self.folder / FINGERPRINT_FILE
        value = read_json_object(path, "the ring's fingerprint")
        return Fingerprint.from_dict(value, self.ring.contract, str(path))

    def _entry(self, number: int) -> ShardInfo:
        return self.ring.entry(number, read_entry(self.folder, number, self.ring.shards[number].bytes))

    def _wait(self, found: Callable[[], bool], what: str, stopped: Event) -> None:
        began, said = time.monotonic(), Reminder()
        while not found():
            silent = min(self._writer.silent(), time.monotonic() - began)
            if silent > self._wait_seconds:
                raise self._gone(what)
            if said.is_due() and os.environ.get("RANK", "0") == "0":
                alive = f"; the writer has shown no sign of life for {silent:.0f} s" if silent > QUIET_SECONDS else ""
                print(f"waiting for {what} in {self.folder}{alive}", file=sys.stderr)
            if stopped.wait(_POLL_SECONDS):
                raise problem_error(str(self.folder), "ring.stopped", f"stopped waiting for {what}", _RESTART)

    def _gone(self, what: str) -> Exception:
        silent = f"the writer has shown no sign of life for {self._wait_seconds:.0f} s"
        if not (self.folder / RING_FILE).exists():
            message = f"no ring has been begun here, and {silent}"
            fix = "start `eagle3 extract --stream` with this folder as output (both sides may start first)"
            return problem_error(str(self.folder), "ring.no_writer", message, fix)
        path = self.folder / what
        listed = path.suffix == ".safetensors" and path.with_name(f"{path.stem}.json").exists()
        gone = ": it was made, and has vanished" if listed else ""
        message = f"{what} is not there{gone}; {silent}"
        return problem_error(str(self.folder), "ring.no_writer", message, _RESTART)


def _with_fix(problem: Problem, folder: Path, number: int) -> Problem:
    fix = f"delete {folder / shard_name(number)} and {entry_name(number)}: the writer makes them anew"
    return Problem(problem.where, problem.kind, problem.message, fix)
