"""Writes a hidden-state store so that a kill at any moment leaves one that can be resumed."""

from __future__ import annotations

import fcntl
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file

from eagle3.data.store_check import check_shard, check_target_head, target_head_shapes
from eagle3.data.store_fingerprint import OtherStates, make_fingerprint
from eagle3.data.store_format import (
    LOCK_FILE,
    MANIFEST_FILE,
    TARGET_HEAD_FILE,
    FileInfo,
    Manifest,
    ShardInfo,
    load_manifest,
    shard_files,
    shard_name,
)
from eagle3.data.store_sample import StoredSample, sample_faults, shard_content
from eagle3.data.tensor_file import write_tensor_file
from eagle3.errors import Problem, problem_error, raise_problems
from eagle3.files import TEMPORARY_SUFFIX, explained_os_errors, write_atomic, write_json_atomic
from eagle3.wiring.contract import WiringContract

_OTHER_SETTINGS_FIX = "use its settings, or another output"


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
    ) -> None:
        self.folder = Path(folder)
        self._other_states = other_states
        self.redone: list[Problem] = []
        """Shards of an earlier run that were found damaged and dropped, to be extracted again."""
        raise_problems(_check_head(target_head, contract))
        with explained_os_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.folder / LOCK_FILE, "w")  # noqa: SIM115 (held until close)
        try:
            self._take_lock()
            raise_problems(check_output(self.folder))
            _remove_temporary_files(self.folder)
            if (self.folder / MANIFEST_FILE).exists():
                self._manifest = self._resumed(contract, _json(settings), target_head)
            else:
                head = _write_target_head(self.folder, target_head)
                self._manifest = Manifest(
                    contract, _json(settings), _json(target_config), head, provenance=_json(provenance or {})
                )
            self._save_manifest()
            self._remove_unlisted_shards()
        except BaseException:
            self._lock.close()
            raise
        self.completed = {sample.id for shard in self._manifest.shards for sample in shard.samples}
        """Ids of the samples that are safely in the store."""

    def write_shard(self, samples: Sequence[StoredSample]) -> None:
        """Writes these samples, at least one, as one shard and lists it in the manifest.

        Raises:
            ProblemsError: samples are mis-shaped, not finite or already there (all are named); the disk is full.
                Nothing of the shard is left then.
        """
        assert samples
        raise_problems(self._check_samples(samples))
        fingerprint = self._manifest.fingerprint
        if fingerprint is None:
            fingerprint = make_fingerprint(samples, self._manifest.contract, self._other_states)
        path = self.folder / self._free_name()
        checksum = ""

        def write(temporary: Path) -> None:
            nonlocal checksum
            checksum = write_tensor_file(temporary, *shard_content(samples, self._manifest.contract))

        write_atomic(path, write)
        shard = ShardInfo(path.name, path.stat().st_size, checksum, tuple(sample.info for sample in samples))
        shards = sorted((*self._manifest.shards, shard), key=lambda item: item.file)
        before = self._manifest
        self._manifest = replace(before, shards=tuple(shards), fingerprint=fingerprint)
        try:
            self._save_manifest()
        except BaseException:
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

    def _resumed(
        self, contract: WiringContract, settings: dict[str, Any], target_head: Mapping[str, torch.Tensor]
    ) -> Manifest:
        manifest, where = load_manifest(self.folder), str(self.folder)
        problems = manifest.contract.compare(contract, where, "this run")
        problems += setting_differences(manifest.settings, settings, where)
        damaged_head = check_target_head(self.folder, manifest)
        if not damaged_head and not _same_head(self.folder, target_head):
            message = "the store was begun with other weights of the target's embedding, norm or head"
            problems.append(Problem(where, "store.other_target", message, _OTHER_SETTINGS_FIX))
        raise_problems(problems, f"cannot resume {where}")
        if damaged_head:
            manifest = replace(manifest, target_head=_write_target_head(self.folder, target_head))
        damaged = {shard.file: check_shard(self.folder, shard, manifest.contract) for shard in manifest.shards}
        self.redone = damaged_head + [problem for problems in damaged.values() for problem in problems]
        shards = tuple(shard for shard in manifest.shards if not damaged[shard.file])
        kept = {sample.id for shard in shards for sample in shard.samples}
        if manifest.fingerprint is not None and manifest.fingerprint.sample not in kept:
            manifest = replace(manifest, fingerprint=None)
        return replace(manifest, shards=shards)

    def _check_samples(self, samples: Sequence[StoredSample]) -> list[Problem]:
        problems, ids = [], Counter(sample.id for sample in samples)
        for sample in samples:
            where = f"{self.folder}: sample {sample.id!r}"
            for kind, message in sample_faults(sample, self._manifest.contract):
                problems.append(Problem(where, f"store.{kind}", message, "correct what made this sample"))
            if sample.id in self.completed or ids[sample.id] > 1:
                message = "is already in the store, or given twice"
                problems.append(Problem(where, "store.duplicate_sample", message, "use unique ids"))
        return problems

    def _free_name(self) -> str:
        taken = {shard.file for shard in self._manifest.shards}
        return next(name for number in range(len(taken) + 1) if (name := shard_name(number)) not in taken)

    def _save_manifest(self) -> None:
        write_json_atomic(self.folder / MANIFEST_FILE, self._manifest.to_dict())

    def _remove_unlisted_shards(self) -> None:
        listed = {shard.file for shard in self._manifest.shards}
        for path in shard_files(self.folder):
            if path.name not in listed:
                path.unlink()


def _check_head(head: Mapping[str, torch.Tensor], contract: WiringContract) -> list[Problem]:
    expected = target_head_shapes(contract)
    missing = expected.keys() - head.keys() - {"lm_head.weight"}
    problems = []
    for name in sorted(head.keys() | missing):
        tensor, shape = head.get(name), expected.get(name)
        found = None if tensor is None else tuple(tensor.shape)
        if found != shape or tensor is None or not tensor.dtype.is_floating_point:
            message = f"{name} is {found or 'absent'}, expected {shape or 'absent'}"
            problems.append(Problem("target_head", "store.target_head", message, "give the target's own tensors"))
        elif not torch.isfinite(tensor).all():
            problems.append(
                Problem("target_head", "store.non_finite", f"{name} has NaN or infinity", "check the target")
            )
    return problems


def check_output(folder: Path) -> list[Problem]:
    """Finds a folder that is neither new nor a store: what is in it is somebody's, so nothing is written there."""
    if not folder.exists() or (folder / MANIFEST_FILE).exists():
        return []
    if not folder.is_dir():
        return [Problem(str(folder), "store.not_a_store", "is a file, expected a folder", "use another output")]
    if shards := shard_files(folder):  # a killed writer never leaves that
        message = f"has {len(shards)} shards, but no {MANIFEST_FILE}"
        return [Problem(str(folder), "store.manifest_missing", message, "restore the manifest, or use an empty folder")]
    ours = {LOCK_FILE, TARGET_HEAD_FILE, *(path.name for path in _temporary_files(folder))}
    if foreign := sorted(path.name for path in folder.iterdir() if path.name not in ours):
        message = f"is no hidden-state store, and holds {', '.join(foreign[:5])}{' ...' if len(foreign) > 5 else ''}"
        return [Problem(str(folder), "store.not_a_store", message, "use an empty or a new folder as output")]
    return []


def _write_target_head(folder: Path, head: Mapping[str, torch.Tensor]) -> FileInfo:
    path, checksum = folder / TARGET_HEAD_FILE, ""

    def write(temporary: Path) -> None:
        nonlocal checksum
        checksum = write_tensor_file(temporary, {name: [head[name]] for name in sorted(head)}, {})

    write_atomic(path, write)
    return FileInfo(path.name, path.stat().st_size, checksum)


def _same_head(folder: Path, head: Mapping[str, torch.Tensor]) -> bool:
    stored = load_file(folder / TARGET_HEAD_FILE)
    return stored.keys() == head.keys() and all(torch.equal(stored[name], head[name].cpu()) for name in stored)


def _remove_temporary_files(folder: Path) -> None:
    for path in _temporary_files(folder):
        path.unlink()


def _temporary_files(folder: Path) -> list[Path]:
    """What a killed writer may have left half-written."""
    names = (MANIFEST_FILE, TARGET_HEAD_FILE, "shard-*.safetensors")
    return [path for name in names for path in folder.glob(f"{name}{TEMPORARY_SUFFIX}") if path.is_file()]


def setting_differences(stored: dict[str, Any], given: dict[str, Any], where: str) -> list[Problem]:
    """One problem for each setting (JSON values, nested keys dotted) in which a run differs from what it resumes."""
    mine, theirs = dict(_flat(stored)), dict(_flat(given))
    problems = []
    for key in sorted(mine.keys() | theirs.keys()):
        begun, now = (repr(side[key]) if key in side else "nothing" for side in (mine, theirs))
        if begun != now:
            message = f"settings.{key}: it was begun with {begun}, this run has {now}"
            problems.append(Problem(where, "store.other_settings", message, _OTHER_SETTINGS_FIX))
    return problems


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, dict):
            yield from _flat(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item


def _json(value: Mapping[str, Any]) -> dict[str, Any]:
    """The value as JSON gives it back (tuples become lists), so that it can be compared with a stored one."""
    result: dict[str, Any] = json.loads(json.dumps(value, allow_nan=False))
    return result
