"""Writes a hidden-state store so that a kill at any moment leaves one that can be resumed."""

from __future__ import annotations

import fcntl
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch

from eagle3.data.argmax_check import refuse_mixed_up
from eagle3.data.store_fingerprint import OtherStates, make_fingerprint
from eagle3.data.store_folder import (
    begin_manifest,
    check_head,
    check_output,
    remove_temporary_files,
    resume_manifest,
)
from eagle3.data.store_format import LOCK_FILE, MANIFEST_FILE, ShardInfo, save_manifest, shard_files, shard_name
from eagle3.data.store_layout import LastRows, StoreLayout
from eagle3.data.store_sample import StoredSample, sample_problems, shard_content
from eagle3.data.target_argmax import make_target_head
from eagle3.data.tensor_file import write_tensor_file_atomic
from eagle3.errors import Problem, problem_error, raise_problems
from eagle3.files import explained_os_errors
from eagle3.wiring.contract import WiringContract


class StoreWriter:
    """Creates a store, or goes on with one that the same settings began. A context manager.

    A shard appears under its final name only when it is whole and on disk, and in the manifest only after that, so
    a kill loses at most the shard in work.

    Args:
        folder: of the store; made if absent.
        contract: what the states are.
        settings: what the samples depend on (JSON values); a store begun with others is refused.
        target_config: the target's text config.
        target_head: `embed_tokens.weight` [V, H], `norm.weight` [H], and `lm_head.weight` [V, H] unless tied.
        provenance: command line, versions and so on, recorded when the store is created; never compared.
        other_states: gives further layers' states for the fingerprint, see `make_fingerprint`.
        last_rows: for which tokens last hidden states are stored.

    Raises:
        ProblemsError: another writer is at work; the store has other settings or another contract (every
            difference is listed); it is not a store; the disk is full.
    """

    def __init__(
        self,
        folder: Path | str,
        contract: WiringContract,
        settings: Mapping[str, Any],
        target_config: Mapping[str, Any],
        target_head: Mapping[str, torch.Tensor],
        provenance: Mapping[str, Any] | None = None,
        other_states: OtherStates | None = None,
        last_rows: LastRows = "supervised",
    ) -> None:
        self.folder = Path(folder)
        self._other_states = other_states
        layout = StoreLayout(contract, last_rows)
        self.redone: list[Problem] = []
        """Shards of an earlier run that were found damaged and dropped, to be extracted again."""
        raise_problems(check_head(target_head, contract))
        self._head = make_target_head(target_head, target_config, contract.last_hidden_states)
        with explained_os_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.folder / LOCK_FILE, "w")  # noqa: SIM115 (held until close)
        try:
            self._take_lock()
            raise_problems(check_output(self.folder))
            remove_temporary_files(self.folder)
            if (self.folder / MANIFEST_FILE).exists():
                self._manifest, self.redone = resume_manifest(self.folder, layout, settings, target_head)
            else:
                self._manifest = begin_manifest(
                    self.folder, layout, settings, target_config, target_head, provenance or {}
                )
            self._save_manifest()
            self._remove_unlisted_shards()
        except BaseException:  # Ctrl-C too: there is no object yet that would give the lock back; raised again
            self._lock.close()
            raise
        self.completed = {sample.id for shard in self._manifest.shards for sample in shard.samples}
        """Ids of the samples that are safely in the store."""

    def write_shard(self, samples: Sequence[StoredSample]) -> None:
        """Writes these samples, at least one, as one shard and lists it in the manifest.

        Raises:
            ProblemsError: samples are mis-shaped, not finite or already there (all are named); greedy tokens are not
                those of the last hidden states; the disk is full. Nothing of the shard is left then.
        """
        assert samples
        raise_problems(self._check_samples(samples))
        fingerprint = self._manifest.fingerprint
        if fingerprint is None:
            fingerprint = make_fingerprint(samples, self._manifest.layout, self._other_states)
        path = self.folder / self._free_name()
        checksum = write_tensor_file_atomic(path, *shard_content(samples, self._manifest.layout))
        shard = ShardInfo(path.name, path.stat().st_size, checksum, tuple(sample.info for sample in samples))
        shards = sorted((*self._manifest.shards, shard), key=lambda item: item.file)
        before = self._manifest
        refuse_mixed_up(self.folder, [shard], before.layout, self._head)
        self._manifest = replace(before, shards=tuple(shards), fingerprint=fingerprint)
        try:
            self._save_manifest()
        except BaseException:  # Ctrl-C too: a shard that no manifest lists is no data; raised again
            self._manifest = before
            path.unlink()
            raise
        self.completed.update(sample.id for sample in samples)

    def close(self) -> None:
        """Gives the lock back."""
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fix = "wait for it to end, or write into another folder"
            raise problem_error(str(self.folder), "store.locked", "another writer is at work here", fix) from None

    def _check_samples(self, samples: Sequence[StoredSample]) -> list[Problem]:
        problems, ids = [], Counter(sample.id for sample in samples)
        for sample in samples:
            problems += sample_problems(self.folder, sample, self._manifest.layout)
            if sample.id in self.completed or ids[sample.id] > 1:
                message = "is already in the store, or given twice"
                where = f"{self.folder}: sample {sample.id!r}"
                problems.append(Problem(where, "store.duplicate_sample", message, "use unique ids"))
        return problems

    def _free_name(self) -> str:
        taken = {shard.file for shard in self._manifest.shards}
        return next(name for number in range(len(taken) + 1) if (name := shard_name(number)) not in taken)

    def _save_manifest(self) -> None:
        save_manifest(self.folder, self._manifest)

    def _remove_unlisted_shards(self) -> None:
        listed = {shard.file for shard in self._manifest.shards}
        for path in shard_files(self.folder):
            if path.name not in listed:
                path.unlink()
