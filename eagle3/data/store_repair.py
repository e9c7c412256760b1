"""Drops what is bad from a store, so that `eagle3 extract` with the same config redoes exactly that."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from eagle3.data.store_format import LOCK_FILE, Manifest, ShardInfo, load_manifest, save_manifest
from eagle3.data.store_verify import verify_manifest
from eagle3.data.verify_record import check_outside
from eagle3.errors import Problem
from eagle3.files import (
    TEMPORARY_SUFFIX,
    explained_os_errors,
    only_writer,
    sync_folder,
    write_text_atomic,
)
from eagle3.wiring.report import render_json, render_text

_IDS_SHOWN = 10


@dataclass(frozen=True)
class RepairReport:
    """What is wrong with a store, and what was or would be dropped.

    Attributes:
        folder: of the store.
        problems: all that verification found.
        dropped: the bad shards; their samples are to be redone.
        head: whether the target head was dropped as well; extraction writes it again.
        left: the problems that dropping these files does not mend.
        changed: whether it was done, or only found.
    """

    folder: Path
    problems: Sequence[Problem]
    dropped: Sequence[ShardInfo]
    head: bool
    left: Sequence[Problem]
    changed: bool

    @property
    def redo(self) -> list[dict[str, str]]:
        """The samples to be redone, each with the shard that it was in."""
        return [{"id": sample.id, "shard": shard.file} for shard in self.dropped for sample in shard.samples]

    @property
    def open_problems(self) -> Sequence[Problem]:
        """What is still wrong now, but for samples that are lacking."""
        return self.left if self.changed else self.problems

    def render(self, as_json: bool = False) -> str:
        files = [*(["the target head"] if self.head else []), *(shard.file for shard in self.dropped)]
        if as_json:
            return render_json(self.problems, dropped=files, redo=self.redo, changed=self.changed)
        lines = [render_text(self.problems)]
        if files:
            lines.append(f"{'dropped' if self.changed else 'to be dropped'}: {', '.join(files)}")
            ids = [item["id"] for item in self.redo]
            more = f" and {len(ids) - _IDS_SHOWN:,} more" if len(ids) > _IDS_SHOWN else ""
            lines.append(f"samples to redo: {len(ids):,}: {', '.join(ids[:_IDS_SHOWN])}{more}" if ids else "no samples")
            if self.changed:
                lines.append("now run `eagle3 extract` with the config that made the store: it redoes what was dropped")
        if self.changed and self.left:
            lines += ["not mended:", *map(str, self.left)]
        if not self.changed and self.problems:
            lines.append(
                "nothing was changed" + ("; --yes drops these files" if files else ": repair cannot mend this")
            )
        return "\n".join(lines)


def repair(
    folder: Path | str,
    yes: bool = False,
    workers: int | None = None,
    resume: Path | None = None,
    list_file: Path | None = None,
) -> RepairReport:
    """Verifies a store to the last byte and, with `yes`, drops the shards that are bad.

    A bad file first loses its name, then the manifest drops it, then it is deleted: a kill in between leaves a store
    that names what is missing, and at no moment one that could take the bad file for good.

    Args:
        folder: the store.
        yes: change it. Without, nothing is changed and no lock taken.
        workers, resume: as of `eagle3.data.store_verify.verify`.
        list_file: outside the store; gets a JSON line `{"id", "shard"}` for each sample to redo, before the store is
            changed.

    Raises:
        ProblemsError: the manifest cannot be read; with `yes`, a writer is at work, or the disk refuses.
    """
    folder = Path(folder)
    if list_file is not None:
        check_outside(list_file, folder)
    manifest = load_manifest(folder)
    with only_writer(folder, LOCK_FILE) if yes else nullcontext():
        manifest = load_manifest(folder)
        report, repaired = _plan(folder, manifest, verify_manifest(folder, manifest, True, None, workers, resume), yes)
        if list_file is not None:
            write_text_atomic(list_file, "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in report.redo))
        if yes and (report.dropped or report.head):
            bad = [shard.file for shard in report.dropped] + ([manifest.target_head.file] if report.head else [])
            with _set_aside([folder / name for name in bad]):
                save_manifest(folder, repaired)
    return report


def _plan(folder: Path, manifest: Manifest, problems: Sequence[Problem], yes: bool) -> tuple[RepairReport, Manifest]:
    """What to drop, and the manifest after that."""
    broken = {problem.where for problem in problems}
    bad = {shard.file for shard in manifest.shards if str(folder / shard.file) in broken}
    if any(problem.kind == "fingerprint.states" for problem in problems) and manifest.fingerprint is not None:
        bad |= {shard.file for shard in manifest.shards if _holds(shard, manifest.fingerprint.sample)}
    head = str(folder / manifest.target_head.file) in broken
    kept = tuple(shard for shard in manifest.shards if shard.file not in bad)
    dropped = [shard for shard in manifest.shards if shard.file in bad]
    repaired = replace(manifest, shards=kept)
    if manifest.fingerprint is not None and not any(_holds(shard, manifest.fingerprint.sample) for shard in kept):
        repaired = replace(repaired, fingerprint=None)  # the writer makes it anew, from the shard that it redoes
    mended = {str(folder / name) for name in bad} | ({str(folder / manifest.target_head.file)} if head else set())
    left = [
        problem
        for problem in problems
        if problem.where not in mended and not (problem.kind == "fingerprint.states" and repaired.fingerprint is None)
    ]
    return RepairReport(folder, problems, dropped, head, left, changed=yes and bool(dropped or head)), repaired


def _holds(shard: ShardInfo, sample_id: str) -> bool:
    return any(sample.id == sample_id for sample in shard.samples)


@contextmanager
def _set_aside(paths: Sequence[Path]) -> Iterator[None]:
    """Takes these files their names, which mark data, while the block runs; deletes them, or gives the names back."""
    aside = {path: path.with_name(path.name + TEMPORARY_SUFFIX) for path in paths if path.is_file()}
    with explained_os_errors(paths[0].parent):
        moved: list[Path] = []
        try:
            for path, temporary in aside.items():
                path.replace(temporary)
                moved.append(path)
            sync_folder(paths[0].parent)
            yield
        except BaseException:  # Ctrl-C too: the files must have their names back; raised again
            for path in moved:
                aside[path].replace(path)
            raise
        for temporary in aside.values():
            temporary.unlink()
