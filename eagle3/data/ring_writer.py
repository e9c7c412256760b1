"""The writing side of a ring: makes shards in the order of the plan, and waits where there is no room.

Legend: V target vocab.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any, Self

import torch

from eagle3.data.argmax_check import refuse_mixed_up
from eagle3.data.ring_folder import (
    check_ring_output,
    check_ring_resume,
    is_listed,
    list_shard,
    listed_bytes,
    read_reader,
    remove_shard,
    remove_temporary_files,
    write_counts,
)
from eagle3.data.ring_format import (
    READER_FILE,
    RING_FILE,
    WRITER_FILE,
    WRITER_LOCK_FILE,
    Ring,
    RingPlan,
    entry_numbers,
)
from eagle3.data.ring_pulse import QUIET_SECONDS, Pulse, Reminder, Watch, only_one
from eagle3.data.store_check import check_shard
from eagle3.data.store_fingerprint import OtherStates, make_fingerprint
from eagle3.data.store_folder import check_head, write_target_head
from eagle3.data.store_format import shard_files, shard_name
from eagle3.data.store_sample import StoredSample, sample_problems, shard_content
from eagle3.data.target_argmax import make_target_head
from eagle3.data.tensor_file import write_tensor_file_atomic
from eagle3.errors import Problem, ProblemsError, problem_error, raise_problems
from eagle3.sealed import write_sealed
from eagle3.wiring.fingerprint_file import Fingerprint

_POLL_SECONDS = 0.1


class RingWriter:
    """Begins a ring, or goes on with one that the same plan began. A context manager.

    A shard is part of the ring when its entry is there, which is written after the shard is whole and on disk; so a
    kill loses at most the unit in work.

    Args:
        folder: of the ring; made if absent.
        plan: what it holds; a ring with another contract or other settings is refused.
        target_head: `embed_tokens.weight` [V, H], `norm.weight` [H], and `lm_head.weight` [V, H] unless tied.
        counts: int64 [V], how often each token is supervised in an epoch.
        provenance: recorded when the ring is begun; never compared.
        wait_seconds: most seconds to wait for room while no trainer shows a sign of life.

    Raises:
        ProblemsError: another writer is at work; the ring was begun with something else (every difference is listed);
            the folder is somebody else's; the disk is full.
    """

    def __init__(
        self,
        folder: Path,
        plan: RingPlan,
        target_head: Mapping[str, torch.Tensor],
        counts: torch.Tensor,
        provenance: dict[str, Any],
        wait_seconds: float,
    ) -> None:
        raise_problems(check_head(target_head, plan.contract))
        self._head = make_target_head(target_head, plan.target_config, plan.contract.last_hidden_states)
        self.folder, self.written, self.waited = folder, 0, 0.0
        self._wait_seconds = wait_seconds
        self._began = time.monotonic()
        with ExitStack() as stack:
            raise_problems(check_ring_output(folder))
            stack.enter_context(only_one(folder, WRITER_LOCK_FILE, "writer"))
            raise_problems(check_ring_output(folder))
            remove_temporary_files(folder)
            if (folder / RING_FILE).exists():
                self.ring = check_ring_resume(folder, plan, target_head, counts)
            else:
                head, counted = write_target_head(folder, target_head), write_counts(folder, counts)
                self.ring = Ring.of(plan, head, counted, provenance)
                write_sealed(folder / RING_FILE, self.ring.to_dict())
            self.redone = self._drop_unsound()
            self._pulse = stack.enter_context(Pulse(folder / WRITER_FILE, self._state("begun")))
            self._held = stack.pop_all()
        self.finished = False
        """Whether the trainer said that it needs no more."""

    def next_unit(self) -> list[int]:
        """Numbers of the shards to make next, for which there is room now; empty when all are made or none is needed.

        Waits for room. Where the reader went back, or a shard vanished, the shards furthest ahead make room for it.

        Raises:
            ProblemsError: kind `ring.no_trainer`, there was no room and no trainer for `wait_seconds`.
        """
        trainer, began, said = Watch(self.folder / READER_FILE), time.monotonic(), Reminder()
        while True:
            state = read_reader(self.folder, len(self.ring.shards))
            released, self.finished = state.released, state.finished
            numbers = self._lacking(released)
            if read_reader(self.folder, len(self.ring.shards)) != state:
                continue  # what seemed to be lacking may have been released and removed meanwhile
            if self.finished or not numbers or self._has_room(numbers):
                self._waited_since(began)
                return [] if self.finished else numbers
            if said.is_due():
                self._say_waiting(released, trainer.silent())
            if trainer.silent() > self._wait_seconds:
                message = f"has been full, and no trainer has shown a sign of life, for {self._wait_seconds:.0f} s"
                fix = "start `eagle3 train --stream`, then the same command again: it goes on from here"
                raise problem_error(str(self.folder), "ring.no_trainer", message, fix)
            time.sleep(_POLL_SECONDS)

    def write_shard(
        self, number: int, samples: Sequence[StoredSample], other_states: OtherStates | None = None
    ) -> None:
        """Writes a shard of the last unit given, and lists it.

        Args:
            samples: those of the plan, in its order.
            other_states: further layers' states for the fingerprint, see `make_fingerprint`.

        Raises:
            ProblemsError: samples are mis-shaped or not finite (all are named); as `list_shards`; the disk is full.
                Nothing of the shard is left then.
        """
        assert [sample.id for sample in samples] == [info.id for info in self.ring.infos(number)]
        layout = self.ring.layout
        raise_problems(problem for sample in samples for problem in sample_problems(self.folder, sample, layout))
        checksum = write_tensor_file_atomic(self.folder / shard_name(number), *shard_content(samples, layout))
        fingerprint = make_fingerprint(samples, self.ring.layout, other_states) if number == 0 else None
        self.list_shards({number: checksum}, fingerprint)

    def list_shards(self, checksums: Mapping[int, str], fingerprint: Fingerprint | None = None) -> None:
        """Makes shards that have their final names part of the ring.

        Args:
            checksums: `sha256:<hex>` by number.
            fingerprint: of shard 0, where that is among them.

        Raises:
            ProblemsError: kind `store.argmax`, greedy tokens are not those of the last hidden states.
        """
        entries = [self.ring.entry(number, checksum) for number, checksum in checksums.items()]
        refuse_mixed_up(self.folder, entries, self.ring.layout, self._head)
        if fingerprint is not None:
            fingerprint.save(self.folder)
        for number, checksum in checksums.items():
            list_shard(self.folder, number, self.ring.shards[number].bytes, checksum)
            self.written += 1
        self._pulse.say(self._state("writing"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # What stopped the writer is what is told, whether or not the disk still takes its last word.
        with self._held, suppress(ProblemsError) if kind is not None else nullcontext():
            self._pulse.say(self._state("ended" if kind is None else "stopped"))

    @property
    def seconds(self) -> float:
        """Of this writer's work so far, waiting included."""
        return time.monotonic() - self._began

    def tokens_left(self) -> int:
        """Tokens of the shards that are yet to be made, as it is now."""
        numbers = [
            n
            for n in range(read_reader(self.folder, len(self.ring.shards)).released, len(self.ring.shards))
            if not is_listed(self.folder, n)
        ]
        return sum(sample.tokens for number in numbers for sample in self.ring.infos(number))

    def _state(self, state: str) -> dict[str, Any]:
        return {"state": state, "seconds": round(self.seconds, 3), "waited": round(self.waited, 3)}

    def _lacking(self, released: int) -> list[int]:
        """Shards of the first unit that lacks any that is still needed."""
        ring = self.ring
        first = next((n for n in range(released, len(ring.shards)) if not is_listed(self.folder, n)), None)
        if first is None:
            return []
        unit = range(first, ring.unit_ends[first] + 1)
        return [number for number in unit if not is_listed(self.folder, number)]

    def _has_room(self, numbers: Sequence[int]) -> bool:
        needed = sum(self.ring.shards[number].bytes for number in numbers)
        while listed_bytes(self.folder) + needed > self.ring.max_bytes:
            ahead = [number for number in entry_numbers(self.folder) if number > numbers[-1]]
            if not ahead:
                return False
            remove_shard(self.folder, ahead[-1])
        return True

    def _waited_since(self, began: float) -> None:
        waited = time.monotonic() - began
        if waited >= _POLL_SECONDS:
            self.waited += waited

    def _say_waiting(self, released: int, silent: float) -> None:
        self._pulse.say(self._state("waiting"))
        alive = f"; no trainer has shown a sign of life for {silent:.0f} s" if silent > QUIET_SECONDS else ""
        print(f"the ring is full: waiting until the trainer is done with shard {released}{alive}", file=sys.stderr)

    def _drop_unsound(self) -> list[Problem]:
        """Removes shards that are not listed, and listed ones that are not what they should be; says which."""
        redone = []
        for number in entry_numbers(self.folder):
            problems = self._shard_problems(number)
            if problems:
                remove_shard(self.folder, number)
            redone += problems
        listed = {shard_name(number) for number in entry_numbers(self.folder)}
        for path in shard_files(self.folder):
            if path.name not in listed:
                path.unlink(missing_ok=True)
        return redone

    def _shard_problems(self, number: int) -> list[Problem]:
        if number >= len(self.ring.shards):
            message = "is no shard of this ring"
            return [Problem(str(self.folder / shard_name(number)), "ring.foreign_shard", message, "it is removed")]
        try:
            problems = check_shard(self.folder, self.ring.entry(number, ""), self.ring.layout)
        except FileNotFoundError:  # the trainer has just released it
            return []
        return problems if number >= read_reader(self.folder, len(self.ring.shards)).released else []
