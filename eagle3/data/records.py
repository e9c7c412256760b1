"""Records of a file, here or at a URL, one after the other: JSONL, JSON, Parquet, CSV, a prompt a line.

Files are read as they are, nothing is kept, and no server is asked: `datasets` would report every local file that it
loads to its maker's. Data sets are in `dataset_records.py`.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any

from eagle3.config import ConversationsConfig
from eagle3.data.dataset_records import dataset_rows
from eagle3.data.remote_folder import client_errors
from eagle3.errors import Eagle3Error, Problem, problem_error
from eagle3.files import is_url

FIX = "correct the record, or pass data.skip_bad=true to leave such records out"
_LINES = (".jsonl", ".ndjson")
_ENDINGS = (*_LINES, ".json", ".parquet", ".csv", ".txt")
_BATCH = 256

Numbered = Iterator[tuple[str, Any]]
"""Place of a record, and the record or what is wrong with it."""


def read_records(cfg: ConversationsConfig) -> Numbered:
    """The first `cfg.limit` records with their places: parsed, or what is wrong with them.

    Raises:
        ProblemsError: the file or data set is not there, or cannot be read.
    """
    if cfg.split is not None:
        return islice(_split(cfg), cfg.limit)
    ending = Path(cfg.path).suffix
    if ending not in _ENDINGS:
        message = f"has the ending {ending!r}, expected one of {', '.join(_ENDINGS)}"
        fix = "convert the file; for a data set (of the Hub, or a folder), say which split with data.split"
        raise problem_error(cfg.path, "conversations.file_type", message, fix)
    if not is_url(cfg.path):
        _check_file(Path(cfg.path))
    read: dict[str, Callable[[str], Numbered]] = {".parquet": _parquet, ".csv": _csv, ".json": _json, ".txt": _prompts}
    return islice(read.get(ending, _json_lines)(cfg.path), cfg.limit)


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise problem_error(str(path), "file.missing", "no such file (conversations)", "check data.path")
    if not path.stat().st_size:
        raise problem_error(str(path), "conversations.empty", "is an empty file", "check data.path")


def _split(cfg: ConversationsConfig) -> Numbered:
    for number, row in enumerate(dataset_rows(cfg), start=1):
        yield f"{cfg.path} {cfg.split}:row {number}", row


def _lines(path: str) -> Iterator[tuple[str, str | Problem]]:
    """Lines that are not empty, with their places; a file whose first line is not UTF-8 is not read."""
    with _opened(path, mode="rb", encoding=None) as handle:
        for number, data in enumerate(handle, start=1):
            where = f"{path}:{number}"
            try:
                line = data.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                if number == 1:
                    raise
                yield where, Problem(where, "conversations.not_utf8", f"is not UTF-8: {error}", FIX)
                continue
            if line:
                yield where, line


def _json_lines(path: str) -> Numbered:
    for where, line in _lines(path):
        try:
            yield where, line if isinstance(line, Problem) else json.loads(line)
        except (ValueError, RecursionError) as error:  # a number of 5,000 digits, a list 100,000 deep
            yield where, Problem(where, "conversations.not_json", f"is not valid JSON: {error}", FIX)


def _prompts(path: str) -> Numbered:
    return ((where, line) for where, line in _lines(path) if isinstance(line, Problem) or line.strip())


def _json(path: str) -> Numbered:
    """A list of records, or JSON Lines under this name."""
    with _opened(path) as handle:
        text = handle.read()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        if text.lstrip().startswith("["):
            message = f"is not valid JSON: {error}"
            raise problem_error(path, "conversations.unreadable", message, "restore the file") from error
        yield from _json_lines(path)
        return
    for number, record in enumerate(value if isinstance(value, list) else [value]):
        yield f"{path}[{number}]", record


def _csv(path: str) -> Numbered:
    """A row's cells are text; an empty one is as if the column were not there."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    with _opened(path, newline="") as handle:
        rows = csv.DictReader(handle, strict=True)
        try:
            for number, row in enumerate(rows, start=1):
                where = f"{path}:row {number}"
                if None in row:
                    message = f"has more than the {len(rows.fieldnames or ())} cells of the first row"
                    yield where, Problem(where, "conversations.record", message, FIX)
                else:
                    yield where, {key: value for key, value in row.items() if value not in (None, "")}
        except csv.Error as error:
            message = f"is not CSV after line {rows.line_num}: {error}"
            raise problem_error(path, "conversations.unreadable", message, "restore the file") from error


def _parquet(path: str) -> Numbered:
    import pyarrow
    import pyarrow.parquet

    number = 0
    with _opened(path, mode="rb", encoding=None) as handle:
        try:
            for batch in pyarrow.parquet.ParquetFile(handle).iter_batches(_BATCH):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}:row {number}", row
        except pyarrow.ArrowException as error:
            message = f"cannot be read: {error}"
            raise problem_error(path, "conversations.unreadable", message, "restore the file") from error


@contextmanager
def _opened(path: str, mode: str = "rt", encoding: str | None = "utf-8-sig", **how: Any) -> Iterator[IO[Any]]:
    import fsspec

    try:
        opened = fsspec.open if is_url(path) else open
        with opened(path, mode=mode, encoding=encoding, **how) as handle:
            yield handle
    except Eagle3Error:
        raise
    except client_errors() as error:
        message = f"cannot be read: {error}"
        fix = "check the URL" if is_url(path) else "restore the file"
        raise problem_error(path, "conversations.unreadable", message, fix) from error
