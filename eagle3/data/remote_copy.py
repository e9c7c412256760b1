"""Copies a whole store to an object store, or from it: both go on after a kill, and the manifest comes last."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from eagle3.data.remote_files import check_listing, fetch_whole, read_remote_manifest
from eagle3.data.remote_folder import PUSH_MARK, RemoteFile, RemoteFolder
from eagle3.data.store import StoreReader
from eagle3.data.store_check import check_whole
from eagle3.data.store_format import LOCK_FILE, MANIFEST_FILE, FileInfo, Manifest, load_manifest
from eagle3.errors import Problem, ProblemsError, problem_error, raise_problems
from eagle3.files import (
    TEMPORARY_SUFFIX,
    existing_folder,
    only_writer,
    parse_json,
    read_json_object,
    refuse_url,
    sha256_file,
    write_atomic,
    write_json_atomic,
)
from eagle3.progress import progress

PULL_MARK = "pull.json"
"""File of a folder that a store is being pulled into: from where, and which."""

_MEBIBYTE = 1 << 20
_OTHER_PLACE = "give a URL of its own, or remove what is there"
_OTHER_FOLDER = "give a new folder, or remove what is there"
_READ_ONLY = ("hf", "http", "https")


@dataclass(frozen=True)
class CopyReport:
    """What became of a store's files: how many were copied, and how many were there already."""

    where: str
    copied: int
    there: int
    bytes: int

    def render(self) -> str:
        return f"{self.where}: {self.copied:,} files copied ({self.bytes:,} bytes), {self.there:,} there already"


def push(folder: Path | str, url: str, workers: int) -> CopyReport:
    """Uploads a whole store; the manifest, which makes it one, comes last. The same command goes on after a kill.

    Each file's checksum is compared with the manifest's before it is uploaded.

    Args:
        workers: files at a time.

    Raises:
        ProblemsError: the store is not whole; the URL holds anything else; kinds `remote.*`.
    """
    folder = Path(folder)
    _check_writable(url)
    StoreReader(folder)
    manifest, raw = load_manifest(folder), (folder / MANIFEST_FILE).read_bytes()
    remote, mark = RemoteFolder(url), _mark(folder / MANIFEST_FILE)
    there = remote.list()
    if MANIFEST_FILE in there:
        if remote.read_all(MANIFEST_FILE) != raw:
            raise problem_error(remote.url, "remote.other_store", "holds another store", _OTHER_PLACE)
        raise_problems(
            check_listing(remote, manifest, there), f"{remote.url} has this store's manifest, but is not whole"
        )
        if PUSH_MARK in there:
            remote.delete(PUSH_MARK)
        return CopyReport(remote.url, 0, len(_files(manifest)), 0)
    _claim(remote, mark, there)
    left = [file for file in _files(manifest) if file.file not in there or there[file.file].size != file.bytes]
    done = _each(left, workers, "push", lambda file: _upload(folder, remote, file))
    raise_problems(check_listing(remote, manifest, remote.list()), f"{remote.url} is not whole after the push")
    remote.put_bytes(MANIFEST_FILE, raw)
    remote.delete(PUSH_MARK)
    return CopyReport(remote.url, len(left), len(_files(manifest)) - len(left), done)


def pull(url: str, folder: Path | str, workers: int) -> CopyReport:
    """Downloads a whole store; each checksum is compared on the way, the manifest comes last. The same command goes on
    after a kill: files under their final names are whole.

    Args:
        workers: files at a time.

    Raises:
        ProblemsError: the store is not whole; the folder holds anything else; kinds `remote.*`, `disk.*`.
    """
    refuse_url(folder, "what a store is pulled into", "give a folder; `eagle3 data push` goes the other way")
    folder, remote = Path(folder), RemoteFolder(url)
    raw, manifest = read_remote_manifest(remote)
    there = remote.list()
    raise_problems(
        [*check_listing(remote, manifest, there), *check_whole(remote.url, manifest)], f"cannot pull {remote.url}"
    )
    files = _files(manifest)
    if (folder / MANIFEST_FILE).exists() and (folder / MANIFEST_FILE).read_bytes() == raw:
        StoreReader(folder)
        return CopyReport(str(folder), 0, len(files), 0)
    mark = {"url": remote.url, "manifest": _digest(raw)}
    _check_folder(folder, mark, files)
    left = [file for file in files if not _is_there(folder, file)]
    _check_room(folder, left)
    with only_writer(folder, LOCK_FILE):
        for path in folder.glob(f"*{TEMPORARY_SUFFIX}"):
            path.unlink()
        write_json_atomic(folder / PULL_MARK, mark)
        done = _each(left, workers, "pull", lambda file: _download(folder, remote, file, there[file.file]))
        write_atomic(folder / MANIFEST_FILE, lambda path: _write(path, raw))
        (folder / PULL_MARK).unlink()
    StoreReader(folder)
    return CopyReport(str(folder), len(left), len(files) - len(left), done)


def _files(manifest: Manifest) -> list[FileInfo]:
    return [manifest.target_head, *manifest.shards]


def _check_writable(url: str) -> None:
    if url.split(":")[0].lower() in _READ_ONLY:
        fix = "for the Hugging Face hub use `hf upload-large-folder`; stores there are read as hf://..."
        raise problem_error(url, "remote.read_only", "stores are not pushed there", fix)


def _mark(manifest: Path) -> dict[str, Any]:
    return {"manifest": sha256_file(manifest)}


def _claim(remote: RemoteFolder, mark: dict[str, Any], there: dict[str, RemoteFile]) -> None:
    """Marks the URL as being filled with this store; refuses one that holds anything else."""
    if PUSH_MARK in there:
        if _parsed(remote.read_all(PUSH_MARK)) != mark:
            message = "another store is being pushed there"
            raise problem_error(remote.url, "remote.other_store", message, _OTHER_PLACE)
        return
    if there:
        message = f"holds {', '.join(sorted(there)[:5])}{' ...' if len(there) > 5 else ''}, which no push began"
        raise problem_error(remote.url, "remote.other_store", message, _OTHER_PLACE)
    remote.put_bytes(PUSH_MARK, json.dumps(mark).encode(), new=True)


def _parsed(raw: bytes) -> Any:
    try:
        return parse_json(raw.decode())
    except (ValueError, RecursionError):  # no push wrote it
        return None


def _upload(folder: Path, remote: RemoteFolder, file: FileInfo) -> None:
    path = folder / file.file
    if sha256_file(path) != file.sha256:
        message = "its checksum is not the manifest's"
        raise problem_error(str(path), "store.checksum", message, "see `eagle3 data repair`")
    remote.put(path, file.file)
    if (size := remote.look(file.file).size) != file.bytes:
        message = f"has {size:,} bytes after the upload, the file has {file.bytes:,}"
        raise problem_error(remote.where(file.file), "remote.changed", message, "run the same command again")


def _download(folder: Path, remote: RemoteFolder, file: FileInfo, known: RemoteFile) -> None:
    write_atomic(folder / file.file, partial(fetch_whole, remote, file, known))


def _check_folder(folder: Path, mark: dict[str, Any], files: Sequence[FileInfo]) -> None:
    """Refuses a folder that holds anything but what a killed pull of this very store leaves."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise problem_error(str(folder), "store.not_a_store", "is a file, expected a folder", _OTHER_FOLDER)
    names = {path.name for path in folder.iterdir() if not path.name.endswith(TEMPORARY_SUFFIX)} - {LOCK_FILE}
    if PULL_MARK in names and (begun := read_json_object(folder / PULL_MARK, "the mark of a pull")) != mark:
        message = f"was begun with {begun.get('url')}, manifest {begun.get('manifest')}"
        raise problem_error(str(folder), "remote.other_store", message, _OTHER_FOLDER)
    ours = {PULL_MARK, *(file.file for file in files)} if PULL_MARK in names else set()
    if foreign := sorted(names - ours):
        message = (
            f"holds {', '.join(foreign[:5])}{' ...' if len(foreign) > 5 else ''}, which no pull of this store left"
        )
        raise problem_error(str(folder), "remote.other_store", message, _OTHER_FOLDER)


def _is_there(folder: Path, file: FileInfo) -> bool:
    path = folder / file.file
    return path.is_file() and path.stat().st_size == file.bytes


def _check_room(folder: Path, files: Sequence[FileInfo]) -> None:
    needed, free = sum(file.bytes for file in files), shutil.disk_usage(existing_folder(folder)).free
    if needed > free:
        message = f"needs {needed:,} bytes more, {free:,} are free"
        raise problem_error(str(folder), "store.no_room", message, "free space or choose another folder")


def _each(files: Sequence[FileInfo], workers: int, label: str, work: Callable[[FileInfo], None]) -> int:
    """Does the work for each file, several at a time; the bytes of all.

    Raises:
        ProblemsError: of the files that failed, all of them; what was begun is ended, the rest is left.
    """
    total = sum(file.bytes for file in files)
    pool = ThreadPoolExecutor(workers, thread_name_prefix=label)
    with progress(label, -(-total // _MEBIBYTE), "MiB") as advance:
        try:
            futures = {pool.submit(work, file): file for file in files}
            done = 0
            for future in as_completed(futures):
                if future.exception() is not None:
                    break
                before, done = done, done + futures[future].bytes
                advance(-(-done // _MEBIBYTE) - -(-before // _MEBIBYTE))
        finally:
            pool.shutdown(cancel_futures=True)
    problems: list[Problem] = []
    for future in futures:
        error = None if future.cancelled() else future.exception()
        if isinstance(error, ProblemsError):
            problems += error.problems
        elif error is not None:
            raise error
    raise_problems(problems)
    return total


def _digest(raw: bytes) -> str:
    return f"sha256:{hashlib.sha256(raw).hexdigest()}"


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
