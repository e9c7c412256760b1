"""Several processes write one hidden-state store, each the shards that a rule gives it, without talking to each other.

Each holds `writer.lock` shared (a `StoreWriter` holds it alone) and a lock file of its own number; whatever reads and
then changes the folder or the manifest does so under `commit.lock`.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Self

import torch

from eagle3.data.argmax_check import refuse_mixed_up
from eagle3.data.store_folder import (
    begin_manifest,
    check_head,
    check_output,
    check_resume,
    remove_temporary_files,
    resume_manifest,
)
from eagle3.data.store_format import (
    COMMIT_LOCK_FILE,
    LOCK_FILE,
    MANIFEST_FILE,
    PROCESS_LOCK_FILES,
    Manifest,
    ShardInfo,
    load_manifest,
    process_lock_file,
    save_manifest,
)
from eagle3.data.store_layout import LastRows, StoreLayout
from eagle3.data.target_argmax import make_target_head
from eagle3.errors import Problem, problem_error, raise_problems
from eagle3.files import explained_os_errors
from eagle3.wiring.contract import WiringContract
from eagle3.wiring.fingerprint_file import Fingerprint

Settings = Callable[[Mapping[str, Any] | None], Mapping[str, Any]]
"""The store's settings, or None where this process begins it -> those of this run, which must then be the store's."""


class JointStore:
    """This process's part in a store that several write; the first one begins it. A context manager.

    Args:
        folder: of the store; made if absent.
        contract: what the states are.
        settings: what the samples depend on; see `Settings`.
        target_config, target_head, provenance, last_rows: as of `StoreWriter`.
        index, count: this process's number and how many there are.

    Raises:
        ProblemsError: a single writer, another process of the same number or one that counts otherwise is at work;
            the store has other settings or another contract (every difference is listed); it is not a store.
    """

    def __init__(
        self,
        folder: Path | str,
        contract: WiringContract,
        settings: Settings,
        target_config: Mapping[str, Any],
        target_head: Mapping[str, torch.Tensor],
        provenance: Mapping[str, Any],
        index: int = 0,
        count: int = 1,
        last_rows: LastRows = "supervised",
    ) -> None:
        self.folder = Path(folder)
        self.redone: list[Problem] = []
        """Shards of an earlier run that were found damaged and dropped."""
        self._number = self.folder / process_lock_file(index)
        self._held: list[IO[str]] = []
        self._layout = layout = StoreLayout(contract, last_rows)
        raise_problems(check_head(target_head, contract))
        self._head = make_target_head(target_head, target_config, contract.last_hidden_states)
        with explained_os_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        with explained_os_errors(self.folder), self._committing():
            try:
                raise_problems(check_output(self.folder))
                alone = self._join(index, count)
                manifest = self._resumed(layout, settings, target_head, alone)
                if manifest is None:
                    given = settings(None)
                    manifest = begin_manifest(self.folder, layout, given, target_config, target_head, provenance)
                self._save(manifest)
            except BaseException:  # Ctrl-C too: locks that nobody holds on to would bar the next try; raised again
                self._release()
                raise
        self.settings = manifest.settings

    def manifest(self) -> Manifest:
        """As it is now; others may add to it at any time."""
        return load_manifest(self.folder)

    def commit(self, shards: Sequence[ShardInfo], fingerprint: Fingerprint | None = None) -> None:
        """Lists these shards, which have their final names, and sets the fingerprint if one is given.

        Raises:
            ProblemsError: another process listed a shard of that name or a sample of them; greedy tokens are not those
                of the last hidden states; the disk is full.
        """
        refuse_mixed_up(self.folder, shards, self._layout, self._head)
        with self._committing():
            manifest = self.manifest()
            raise_problems(_repeats(manifest, shards, self.folder))
            listed = sorted((*manifest.shards, *shards), key=lambda shard: shard.file)
            self._save(replace(manifest, shards=tuple(listed), fingerprint=fingerprint or manifest.fingerprint))

    def close(self) -> None:
        """Leaves the store to the others."""
        with self._committing():
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _join(self, index: int, count: int) -> bool:
        """Takes this process's locks; whether it is alone."""
        lock = self._opened(LOCK_FILE)
        alone = _locked(lock, fcntl.LOCK_EX)
        if not _locked(lock, fcntl.LOCK_SH):
            fix = "wait for it to end, or write into another folder"
            raise problem_error(str(self.folder), "store.locked", "another writer is at work here", fix)
        for path in self.folder.glob(PROCESS_LOCK_FILES):
            with open(path, "a+") as other:
                if _locked(other, fcntl.LOCK_EX):
                    path.unlink()  # of a killed process
                    continue
                other.seek(0)
                raise_problems(_clashes(other.read(), index, count, self.folder))
        mine = self._opened(self._number.name)
        assert _locked(mine, fcntl.LOCK_EX)
        json.dump({"index": index, "count": count}, mine)
        mine.flush()
        return alone

    def _resumed(
        self, layout: StoreLayout, settings: Settings, head: Mapping[str, torch.Tensor], alone: bool
    ) -> Manifest | None:
        if alone:
            remove_temporary_files(self.folder)
        if not (self.folder / MANIFEST_FILE).exists():
            return None
        given = settings(load_manifest(self.folder).settings)
        if not alone:  # the first of the processes compared the head and looked for damage
            return check_resume(self.folder, layout, given)
        manifest, self.redone = resume_manifest(self.folder, layout, given, head)
        return manifest

    def _opened(self, name: str) -> IO[str]:
        handle = open(self.folder / name, "a+")  # noqa: SIM115 (held until close)
        self._held.append(handle)
        return handle

    def _release(self) -> None:
        if len(self._held) == 2:
            self._number.unlink()
        for handle in self._held:
            handle.close()
        self._held.clear()

    @contextmanager
    def _committing(self) -> Iterator[None]:
        with explained_os_errors(self.folder):
            handle = open(self.folder / COMMIT_LOCK_FILE, "a+")  # noqa: SIM115
        with handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    def _save(self, manifest: Manifest) -> None:
        save_manifest(self.folder, manifest)


def _locked(handle: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _clashes(text: str, index: int, count: int, folder: Path) -> Iterator[Problem]:
    """Why a process may not work beside another one that does, and whose lock file holds `text`."""
    try:
        other = {key: int(json.loads(text)[key]) for key in ("index", "count")}
    except (ValueError, TypeError, KeyError):
        message = f"another process is at work here, and its lock file holds {text!r:.80}"
        yield Problem(str(folder), "store.locked", message, "wait for it to end, or write into another folder")
        return
    if other["index"] == index:
        message = f"another process with index {index} is at work here"
        fix = "give each process its own stream.process_index, or let torchrun or SLURM number them"
        yield Problem(str(folder), "store.same_process", message, fix)
    if other["count"] != count:
        message = f"process {other['index']} at work here counts {other['count']} processes, this one {count}"
        fix = "give all processes the same stream.process_count, or wait for the others to end"
        yield Problem(str(folder), "store.other_count", message, fix)


def _repeats(manifest: Manifest, shards: Sequence[ShardInfo], folder: Path) -> Iterator[Problem]:
    names = {shard.file for shard in manifest.shards}
    ids = {sample.id for shard in manifest.shards for sample in shard.samples}
    for shard in shards:
        if shard.file in names or any(sample.id in ids for sample in shard.samples):
            message = "this shard, or a sample in it, is listed already"
            fix = "run each part of the work once: see stream.process_index and process_count"
            yield Problem(str(folder / shard.file), "store.duplicate_shard", message, fix)
