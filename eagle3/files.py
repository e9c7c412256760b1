"""Files that are either whole or absent: written under a temporary name, synced, renamed.

Standard library only. A name that ends in `.tmp` is never data: readers skip it and writers may remove it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eagle3.errors import problem_error

TEMPORARY_SUFFIX = ".tmp"
_CHUNK_BYTES = 1 << 20


@contextmanager
def explained_os_errors(path: Path) -> Iterator[None]:
    """Turns the disk errors that users meet (full, read-only, no permission) into a named problem."""
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
        }
        if error.errno not in kinds:
            raise
        kind, fix = kinds[error.errno]
        raise problem_error(str(path), kind, f"cannot write: {error.strerror}", fix) from error


def sync_folder(folder: Path) -> None:
    """Makes renames inside `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, write: Callable[[Path], None]) -> None:
    """Calls `write(temporary_path)`, syncs that file and renames it to `path`; on failure nothing is left.

    Raises:
        ProblemsError: the disk is full, read-only or not writable.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    with explained_os_errors(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(temporary)
            with open(temporary, "rb+") as handle:
                os.fsync(handle.fileno())
            temporary.replace(path)
            sync_folder(path.parent)
        except BaseException:
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

    An older `path` is replaced only after the new one is whole.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    with explained_os_errors(path):
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
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
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def read_json(path: Path, what: str) -> Any:
    """Reads a JSON file.

    Raises:
        ProblemsError: kind `file.missing` or `file.not_json`, naming `what` the file should have been.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise problem_error(str(path), "file.missing", f"no such file ({what})", "check the path") from None
    except IsADirectoryError:
        raise problem_error(str(path), "file.missing", f"is a folder, expected {what}", "check the path") from None
    except (ValueError, RecursionError) as error:
        message = f"is not valid JSON ({what}): {error}"
        raise problem_error(str(path), "file.not_json", message, "restore the file from its source") from None


def read_json_object(path: Path, what: str) -> dict[str, Any]:
    """Reads a JSON file whose top is an object; see `read_json`.

    Raises:
        ProblemsError: also kind `file.not_an_object`.
    """
    value = read_json(path, what)
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
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
