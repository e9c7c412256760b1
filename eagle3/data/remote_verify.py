"""Whether a store at a URL is whole, each file fetched, read and dropped; and its wiring, as a small folder."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from eagle3.config import CacheSection
from eagle3.data.argmax_check import stored_head
from eagle3.data.open_reader import open_cache, open_reader
from eagle3.data.piece_cache import Piece, PieceCache
from eagle3.data.remote_files import at_url, check_listing, check_unchanged, copy_bytes, read_remote_manifest
from eagle3.data.remote_folder import RemoteFile, RemoteFolder
from eagle3.data.remote_store import RemoteStoreReader, cache_name
from eagle3.data.store_check import check_shard, check_target_head, check_whole
from eagle3.data.store_format import MANIFEST_FILE, FileInfo, Manifest, ShardInfo, load_manifest
from eagle3.data.store_verify import check_file
from eagle3.draft.loss import TargetHead
from eagle3.errors import Problem, ProblemsError, problem_error
from eagle3.progress import progress
from eagle3.sealed import SEAL, write_sealed

_MOST_WORKERS = 8


def verify_remote(
    url: str, deep: bool, cache: CacheSection | None, workers: int | None = None, resume: Path | None = None
) -> list[Problem]:
    """Everything that is wrong with a store at a URL.

    Args:
        deep: also fetch every file, a few at a time, and read every byte as `store_verify.verify` does.
        cache: where files lie while they are read; it must hold one shard at least.
        workers: files at a time; default: one a core, 8 at most.

    Raises:
        ProblemsError: kinds `cache.*`; `remote.no_resume`, `resume` was given.
    """
    if resume is not None:
        fix = "leave --resume out, or pull the store and verify that"
        raise problem_error(str(resume), "remote.no_resume", "only a local verification can go on", fix)
    try:
        if not deep:
            open_reader(url, cache)
            return []
        remote = RemoteFolder(url)
        manifest = read_remote_manifest(remote)[1]
        files = remote.list()
    except ProblemsError as error:
        return list(error.problems)
    if cache is None:
        fix = "give --cache, a folder on a local disk"
        raise problem_error(url, "cache.missing", "a store at a URL is read through a local cache", fix)
    problems = check_listing(remote, manifest, files) + check_whole(remote.url, manifest)
    broken = {problem.where for problem in problems}
    left = [file for file in (manifest.target_head, *manifest.shards) if remote.where(file.file) not in broken]
    opening: tuple[Problem, ...] = ()
    head = None
    if not problems:  # the fingerprint
        try:
            head = stored_head(open_reader(url, cache).folder, manifest)
        except ProblemsError as error:
            opening = error.problems
    found = _check_all(remote, manifest, files, left, open_cache(cache, remote.url), workers, head)
    named = tuple(problem.where for problem in found)  # a file that cannot be opened is named once
    return problems + [problem for problem in opening if not problem.where.startswith(named)] + found


def _check_all(
    remote: RemoteFolder,
    manifest: Manifest,
    files: dict[str, RemoteFile],
    left: list[FileInfo],
    cache: PieceCache,
    workers: int | None,
    head: TargetHead | None,
) -> list[Problem]:
    for file in left:
        cache.check_fits(file.bytes, "this file, which is read as a whole,", remote.where(file.file))
    found: dict[str, list[Problem]] = {}
    pool = ThreadPoolExecutor(workers or min(os.cpu_count() or 1, _MOST_WORKERS))
    with progress("verify", len(left), "files") as advance:
        try:
            futures = {
                pool.submit(_check, remote, manifest, files[file.file], file, cache, head): file for file in left
            }
            for future in as_completed(futures):
                found[futures[future].file] = future.result()
                advance(1)
        finally:
            pool.shutdown(cancel_futures=True)
    return [problem for file in left for problem in found[file.file]]


def _check(
    remote: RemoteFolder,
    manifest: Manifest,
    known: RemoteFile,
    file: FileInfo,
    cache: PieceCache,
    head: TargetHead | None,
) -> list[Problem]:
    """What is wrong with one file, which is in the cache meanwhile."""
    name = f"{cache_name(remote.url)}/verify/{file.file}"
    piece = Piece(name, remote.where(file.file), lambda: file.bytes, partial(_fetch, remote, file, known))
    cache.drop(name)  # what a verification that was killed left is not what lies at the URL now
    try:
        with cache.held(piece) as path:
            folder = path.parent
            if isinstance(file, ShardInfo):
                problems = check_shard(folder, file, manifest.layout)
            else:
                problems = check_target_head(folder, manifest)
            problems = problems or check_file(folder, file, manifest.layout, head)
    except ProblemsError as error:
        return list(error.problems)
    cache.drop(name)
    return at_url(replace(item, where=item.where.replace(str(folder), remote.url)) for item in problems)


def _fetch(remote: RemoteFolder, file: FileInfo, known: RemoteFile, path: Path) -> None:
    where = remote.where(file.file)
    with open(path, "wb") as target:
        copy_bytes(remote, file.file, 0, file.bytes, target, where)
    check_unchanged(remote, file.file, known, where)


@contextmanager
def wiring_view(url: str, cache: CacheSection | None) -> Iterator[Path]:
    """A folder, removed at the end, with the manifest of a store at a URL and the fingerprint's sample as its only
    shard: what `eagle3.wiring` reads of a store.

    Raises:
        ProblemsError: the store cannot be opened.
    """
    reader = open_reader(url, cache)
    assert isinstance(reader, RemoteStoreReader)
    known = reader.fingerprint  # a store of version 1 has none
    index = next((at for at, info in enumerate(reader.samples) if known is None or info.id == known.sample), 0)
    shown = reader.place(index).file
    listed = {"file": shown, "samples": [asdict(reader.samples[index])]}
    manifest = {**load_manifest(reader.folder).to_dict(), "shards": [listed]}
    with reader.held(index), tempfile.TemporaryDirectory() as view:
        (Path(view) / shown).symlink_to(reader.folder / shown)
        write_sealed(Path(view) / MANIFEST_FILE, {key: value for key, value in manifest.items() if key != SEAL})
        yield Path(view)
