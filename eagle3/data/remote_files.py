"""A store's files at a URL: the manifest, whether all are there, and their bytes, which must stay what they were."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

from eagle3.data.remote_folder import PUSH_MARK, RemoteFile, RemoteFolder, changed
from eagle3.data.store_check import REDO, check_size, unlisted
from eagle3.data.store_format import MANIFEST_FILE, FileInfo, Manifest, is_shard_name, parse_manifest
from eagle3.errors import Problem, ProblemsError, problem_error, raise_problems
from eagle3.files import parse_json
from eagle3.sealed import check_seal

PUSH_ELSEWHERE = "push the store to a new URL, from a copy that `eagle3 data verify` finds whole"
_CHUNK_BYTES = 16 << 20


def read_remote_manifest(remote: RemoteFolder) -> tuple[bytes, Manifest]:
    """The manifest as it is stored, and what it says.

    Raises:
        ProblemsError: kind `remote.push_unfinished`; those of `load_manifest` and `RemoteFolder`.
    """
    where = remote.where(MANIFEST_FILE)
    try:
        raw = remote.read_all(MANIFEST_FILE)
    except ProblemsError as error:
        if error.problems[0].kind == "remote.missing" and PUSH_MARK in remote.list():
            message = "the store is still being pushed, or its push was killed"
            fix = "run the same `eagle3 data push` again, to its end"
            raise problem_error(remote.url, "remote.push_unfinished", message, fix) from None
        raise
    try:
        value = parse_json(raw.decode())
    except (ValueError, RecursionError) as error:
        message = f"is not valid JSON (the manifest of a hidden-state store): {error}"
        raise problem_error(where, "file.not_json", message, PUSH_ELSEWHERE) from None
    manifest = parse_manifest(value, where)
    raise_problems([] if manifest.layout.version == 1 else check_seal(raw, where))
    return raw, manifest


def check_listing(remote: RemoteFolder, manifest: Manifest, files: dict[str, RemoteFile]) -> list[Problem]:
    """Sizes of all files, and shards that the manifest does not name."""
    problems = []
    listed: list[FileInfo] = [manifest.target_head, *manifest.shards]
    for file in listed:
        size = files[file.file].size if file.file in files else None
        if problem := check_size(remote.where(file.file), size, file):
            problems.append(problem)
    names = {file.file for file in listed}
    extra = [unlisted(remote.where(name)) for name in sorted(files) if is_shard_name(name) and name not in names]
    fix = f"if it is not of this store, remove it; if the manifest is not, {PUSH_ELSEWHERE}"
    return at_url(problems) + [dataclasses.replace(item, message="is not in the manifest", fix=fix) for item in extra]


def at_url(problems: Iterable[Problem]) -> list[Problem]:
    """Problems of a store's files, where no extraction can redo them."""
    return [dataclasses.replace(item, fix=PUSH_ELSEWHERE) if REDO in item.fix else item for item in problems]


def fetch_whole(remote: RemoteFolder, file: FileInfo, known: RemoteFile, path: Path) -> None:
    """Writes a whole file to `path` and compares its checksum with the manifest's.

    Raises:
        ProblemsError: kinds `remote.*`, `store.checksum`.
    """
    where, digest = remote.where(file.file), hashlib.sha256()
    with open(path, "wb") as target:
        copy_bytes(remote, file.file, 0, file.bytes, target, where, digest.update)
    check_unchanged(remote, file.file, known, where)
    if f"sha256:{digest.hexdigest()}" != file.sha256:
        raise problem_error(where, "store.checksum", "its checksum is not the manifest's", PUSH_ELSEWHERE)


def check_unchanged(remote: RemoteFolder, name: str, known: RemoteFile, where: str) -> None:
    """Refuses an object that is another one than when the store was opened.

    Raises:
        ProblemsError: kind `remote.changed`, or `remote.missing` if it is gone.
    """
    now = remote.look(name, where)
    if now != known:
        raise changed(where, f"is another object now: {now.size:,} bytes, version {now.version}; it was {known}")


def copy_bytes(
    remote: RemoteFolder,
    name: str,
    begin: int,
    end: int,
    target: BinaryIO,
    where: str,
    also: Callable[[bytes], object] = lambda data: None,
) -> None:
    """Appends bytes `begin` to `end` of a remote file to `target`, a chunk at a time; `also` gets each chunk."""
    for at in range(begin, end, _CHUNK_BYTES):
        data = remote.read(name, at, min(at + _CHUNK_BYTES, end), where)
        target.write(data)
        also(data)
