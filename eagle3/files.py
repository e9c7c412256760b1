"""Files that are either whole or absent: written under a temporary name, synced, renamed.

Standard library only. A name that ends in `.tmp` is never data: readers skip it and writers may remove it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from stat import S_ISREG
from typing import Any

from eagle3.errors import problem_error

TEMPORARY_SUFFIX = ".tmp"
_CHUNK_BYTES = 1 << 20
_URL = re.compile(r"[a-z][a-z0-9+.-]+:/+[^/]", re.IGNORECASE)


def is_url(place: str | PurePath) -> bool:
    """Whether it names a place in an object store; a path made of a URL has lost one slash, and counts."""
    return bool(_URL.match(str(place)))


def refuse_url(place: str | PurePath, what: str, fix: str) -> None:
    """Refuses a URL where only a local folder will do.

    Raises:
        ProblemsError: kind `remote.not_here`.
    """
    if is_url(place):
        url = re.sub("^([^:]+):/+", r"\1://", str(place))
        raise problem_error(url, "remote.not_here", f"{what} must be on a local disk", fix)


@contextmanager
def explained_os_errors(path: Path) -> Iterator[None]:
    """Turns errors of the file system into a named problem; those that users meet have a fix of their own."""
    try:
        yield
    except OSError as error:
        kinds = {
            errno.ENOSPC: ("disk.full", "free space there or choose another folder, then run the same command again"),
            errno.EDQUOT: ("disk.full", "your quota is used up: free space or choose another folder, then run again"),
            errno.EROFS: ("disk.read_only", "choose a folder on a writable file system"),
            errno.EACCES: ("disk.permission", "choose a folder that you may write to"),
            errno.EPERM: ("disk.permission", "choose a folder that you may write to"),
            errno.ENOTDIR: ("disk.not_a_folder", "a part of this path is a file: choose another folder"),
            errno.EEXIST: ("disk.not_a_folder", "a file is where a folder is needed: choose another folder"),
        }
        kind, fix = kinds.get(error.errno or 0, ("disk.error", "check the path and its file system"))
        raise problem_error(str(path), kind, f"cannot write: {error.strerror or error}", fix) from error


@contextmanager
def only_writer(folder: Path, lock_file: str) -> Iterator[None]:
    """Makes `folder` and holds a lock in it, which ends with the process.

    Raises:
        ProblemsError: kind `disk.locked`, another process holds it; or the folder cannot be written.
    """
    with explained_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle = open(folder / lock_file, "w")  # noqa: SIM115 (held until the block ends)
    with handle:
        _lock(handle.fileno(), folder)
        yield


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fix = "wait for it to end, or choose another output"
        raise problem_error(str(path), "disk.locked", "another process is writing it", fix) from None


def sync_folder(folder: Path) -> None:
    """Makes renames inside `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, write: Callable[[Path], None], shared: bool = False) -> None:
    """Calls `write(temporary_path)`, syncs that file and renames it to `path`; on failure nothing is left.

    Args:
        shared: several processes may write `path` at once, each under a temporary name of its own.

    Raises:
        ProblemsError: the disk is full, read-only or not writable.
    """
    own = f".{os.getpid()}" if shared else ""
    temporary = path.with_name(f"{path.name}{own}{TEMPORARY_SUFFIX}")
    with explained_os_errors(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(temporary)
            with open(temporary, "rb+") as handle:
                os.fsync(handle.fileno())
            temporary.replace(path)
            sync_folder(path.parent)
        except BaseException:  # Ctrl-C too: nothing half-written is left; raised again
            temporary.unlink(missing_ok=True)
            raise


def write_text_atomic(path: Path, text: str) -> None:
    """Replaces `path` by `text` (UTF-8), whole or not at all."""
    write_atomic(path, lambda temporary: _write_bytes(temporary, text.encode()))


def write_json_atomic(path: Path, value: Any) -> None:
    """Replaces `path` by `value` as indented JSON with sorted keys and a final newline."""
    write_text_atomic(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n")


def _write_bytes(path: Path, data: bytes) -> None:
    path.write_bytes(data)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yields a fresh temporary folder beside `path` and renames it to `path` if the block succeeds.

    An older `path` is replaced only after the new one is whole; where it is a link, the folder it leads to is.

    Raises:
        ProblemsError: kinds `disk.*`; another process is writing the same folder, or the disk is full, read-only or
            not writable.
    """
    with explained_os_errors(path):
        path = Path(os.path.realpath(path)) if path.is_symlink() else path
        temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
        lock = _claim(temporary)
        try:
            yield temporary
            for file in temporary.rglob("*"):
                if file.is_file():
                    with open(file, "rb+") as handle:
                        os.fsync(handle.fileno())
            if path.exists():
                old = path.with_name(path.name + ".old" + TEMPORARY_SUFFIX)
                shutil.rmtree(old, ignore_errors=True)
                path.replace(old)
                temporary.replace(path)
                shutil.rmtree(old)
            else:
                temporary.replace(path)
            sync_folder(path.parent)
        except BaseException:  # Ctrl-C too: nothing half-written is left; raised again
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        finally:
            os.close(lock)


def _claim(temporary: Path) -> int:
    """Makes the folder anew, without what a kill left in it, and locks it; returns the lock's descriptor."""
    if temporary.is_dir():
        leftover = os.open(temporary, os.O_RDONLY)
        try:
            _lock(leftover, temporary)
            shutil.rmtree(temporary)
        finally:
            os.close(leftover)
    temporary.mkdir(parents=True)
    descriptor = os.open(temporary, os.O_RDONLY)
    try:
        _lock(descriptor, temporary)
    except BaseException:  # Ctrl-C too: nobody else would close it; raised again
        os.close(descriptor)
        raise
    return descriptor


def existing_folder(path: Path) -> Path:
    """The path itself, or the nearest one above it that exists: whose disk it will be on."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())


def read_into(descriptor: int, target: memoryview, offset: int) -> int:
    """Fills `target` from byte `offset` of an open file; returns the bytes read, fewer if the file ends before."""
    done = 0
    while done < len(target) and (count := os.preadv(descriptor, [target[done:]], offset + done)):
        done += count
    return done


def size_text(count: int) -> str:
    """Bytes in MiB or GiB."""
    return f"{count / 2**30:,.2f} GiB" if count >= 2**27 else f"{count / 2**20:.2f} MiB"


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turns errors of the file system into a problem of kind `file.unreadable`, but for a file that is not there."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        message = f"cannot be read: {error.strerror or error}"
        fix = "check the path, its permissions and its file system"
        raise problem_error(str(path), "file.unreadable", message, fix) from None


def parse_json(text: str) -> Any:
    """The value of a JSON text that every reader understands alike and that can be written again.

    Raises:
        ValueError: it is no JSON; holds NaN or infinity, a name twice in one object, or half a surrogate pair.
        RecursionError: it is nested too deeply.
    """
    value = json.loads(text, object_pairs_hook=_unique, parse_constant=_finite, parse_float=_finite)
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        repeated = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"{repeated!r} is listed twice")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is no finite number")
    return value


def first_fault(error: ValueError) -> str:
    """What is wrong with a value that was checked, on one line: the first place, if there are several."""
    errors = getattr(error, "errors", None)
    if not callable(errors):
        return str(error)
    first = errors(include_url=False, include_context=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}, found {str(first['input'])[:60]!r}"


def read_file(path: Path, what: str) -> bytes:
    """Reads a small file.

    Raises:
        ProblemsError: kind `file.missing` or `file.unreadable`, naming `what` the file should have been.
    """
    try:
        with readable(path):
            if not S_ISREG(path.stat().st_mode):
                raise problem_error(str(path), "file.missing", f"is no file, expected {what}", "check the path")
            return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise problem_error(str(path), "file.missing", f"no such file ({what})", "check the path") from None


def read_json(path: Path, what: str) -> Any:
    """Reads a JSON file; see `parse_json`.

    Raises:
        ProblemsError: as `read_file`; kind `file.not_json`.
    """
    return parse_json_file(read_file(path, what), path, what)


def parse_json_file(raw: bytes, path: Path, what: str) -> Any:
    """The value of a JSON file's bytes; see `parse_json`.

    Raises:
        ProblemsError: kind `file.not_json`, naming `what` the file should have been.
    """
    try:
        return parse_json(raw.decode())
    except (ValueError, RecursionError) as error:
        message = f"is not valid JSON ({what}): {error}"
        raise problem_error(str(path), "file.not_json", message, "restore the file from its source") from None


def read_json_object(path: Path, what: str) -> dict[str, Any]:
    """Reads a JSON file whose top is an object; see `read_json`.

    Raises:
        ProblemsError: also kind `file.not_an_object`.
    """
    return as_object(read_json(path, what), path, what)


def as_object(value: Any, path: Path, what: str) -> dict[str, Any]:
    """A JSON file's value, which must be an object.

    Raises:
        ProblemsError: kind `file.not_an_object`.
    """
    if not isinstance(value, dict):
        message = f"holds a {type(value).__name__}, expected an object ({what})"
        raise problem_error(str(path), "file.not_an_object", message, "restore the file from its source")
    return value


def sha256_file(path: Path) -> str:
    """`sha256:<hex>` of a file's bytes."""
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while chunk := handle.read(_CHUNK_BYTES):
            digest.update(chunk)
    return f"sha256:{digest.hexdigest()}"


def digest_json(value: Any) -> str:
    """`sha256:<hex>` of `value` as canonical JSON (sorted keys, no spaces)."""
    return f"sha256:{hashlib.sha256(canonical_json(value).encode()).hexdigest()}"


def canonical_json(value: Any) -> str:
    """`value` with sorted keys and without spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
