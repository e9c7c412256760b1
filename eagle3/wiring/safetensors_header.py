"""Reads the header of a safetensors file with the standard library alone.

Stricter than a reader needs to be: whatever the header does not account for is refused, since a mapped reader hands
back zeros or garbage for bytes that are not there.
"""

from __future__ import annotations

import array
import os
import stat
import sys
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from eagle3.errors import Problem, ProblemsError, problem_error, raise_problems
from eagle3.files import parse_json, readable
from eagle3.wiring.layers import is_int

_DTYPES_BY_BYTES = {
    1: ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"),
    2: ("I16", "U16", "F16", "BF16"),
    4: ("I32", "U32", "F32"),
    8: ("I64", "U64", "F64"),
}
DTYPE_BYTES = {dtype: size for size, dtypes in _DTYPES_BY_BYTES.items() for dtype in dtypes}
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
_MOST_SIZES = 64
_RESTORE = "copy or export the file again"
_ARRAY_CODES = {"I64": "q", "I32": "i", "U8": "B", "BOOL": "B"}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: safetensors dtype name (`BF16`), shape, and its bytes counted from the header's end."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """A whole header; `data_start` and `file_bytes` are positions in the file, in bytes."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    data_start: int
    file_bytes: int


def read_header(path: Path) -> Header:
    """Reads and checks the header of a safetensors file.

    Raises:
        ProblemsError: kinds `file.missing`, `file.unreadable`, `safetensors.pickle` (a torch.save or pickle file),
            `safetensors.lfs_pointer` (a clone without its large files), `safetensors.format` (anything else),
            `safetensors.entry`, `safetensors.overlap`, `safetensors.gap`, `safetensors.truncated`,
            `safetensors.too_long`.
    """
    status = _status(path)
    if status is None or not stat.S_ISREG(status.st_mode):
        raise problem_error(str(path), "file.missing", "no such file (a safetensors file)", "check the path")
    file_bytes = status.st_size
    with readable(path), open(path, "rb") as handle:
        start = handle.read(_LENGTH_BYTES)
        length = int.from_bytes(start, "little")
        if length > _MAX_HEADER_BYTES or len(start) < _LENGTH_BYTES:
            raise _not_safetensors(path, start, file_bytes)
        if _LENGTH_BYTES + length > file_bytes:
            message = f"ends inside its header: {file_bytes} bytes, expected at least {_LENGTH_BYTES + length}"
            raise problem_error(str(path), "safetensors.truncated", message, _RESTORE)
        return parse_header(handle.read(length), file_bytes, path)


def parse_header(raw: bytes, file_bytes: int, path: Path | str) -> Header:
    """The header of a file of that size.

    Args:
        raw: what follows the first eight bytes, which give its length.
        path: what problems name.

    Raises:
        ProblemsError: as `read_header`.
    """
    length, entries = len(raw), _parse(path, raw)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise problem_error(str(path), "safetensors.format", "__metadata__ is not an object of strings", _RESTORE)
    tensors = _tensors(path, entries)
    header = Header(tensors, metadata, _LENGTH_BYTES + length, file_bytes)
    raise_problems(_layout_problems(path, header))
    return header


def _status(path: Path) -> os.stat_result | None:
    """None if there is nothing of that name."""
    with readable(path):
        try:
            return path.stat()
        except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a name that no file can have
            return None


def read_int_tensor(path: Path, name: str) -> list[int]:
    """The values of one integer or bool tensor, flattened (bools as 0 and 1).

    Raises:
        ProblemsError: as `read_header`; kinds `safetensors.no_tensor`, `safetensors.not_integer`.
    """
    header = read_header(path)
    info = header.tensors.get(name)
    if info is None:
        raise problem_error(str(path), "safetensors.no_tensor", f"no tensor {name}", _RESTORE)
    if info.dtype not in _ARRAY_CODES:
        message = f"{name} is {info.dtype}, expected one of {', '.join(_ARRAY_CODES)}"
        raise problem_error(str(path), "safetensors.not_integer", message, _RESTORE)
    values = array.array(_ARRAY_CODES[info.dtype])
    with readable(path), open(path, "rb") as handle:
        handle.seek(header.data_start + info.begin)
        values.frombytes(handle.read(info.end - info.begin))
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def _not_safetensors(path: Path, start: bytes, file_bytes: int) -> ProblemsError:
    if start[:4] == b"PK\x03\x04" or (start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")):
        fix = "never load it from a source you do not trust; save the weights as safetensors"
        return problem_error(str(path), "safetensors.pickle", "is a pickle (torch.save), not safetensors", fix)
    if start == b"version ":
        fix = "fetch the file itself: git lfs pull"
        return problem_error(str(path), "safetensors.lfs_pointer", "is a Git LFS pointer, not the file itself", fix)
    message = f"is not a safetensors file: {file_bytes} bytes that start with {start!r}"
    return problem_error(str(path), "safetensors.format", message, _RESTORE)


def _parse(path: Path | str, raw: bytes) -> dict[str, Any]:
    try:
        entries = parse_json(raw.decode())
    except (ValueError, RecursionError) as error:
        message = f"its header is not valid JSON: {error}"
        raise problem_error(str(path), "safetensors.format", message, _RESTORE) from None
    if not isinstance(entries, dict):
        raise problem_error(str(path), "safetensors.format", "its header is not a JSON object", _RESTORE)
    return entries


def _tensors(path: Path | str, entries: dict[str, Any]) -> dict[str, TensorInfo]:
    tensors, problems = {}, []
    for name, entry in entries.items():
        info = _tensor(entry)
        if info is None:
            message = f"{name} has no usable dtype, shape and data_offsets: {entry!r:.200}"
            problems.append(Problem(str(path), "safetensors.entry", message, _RESTORE))
        else:
            tensors[name] = info
    raise_problems(problems)
    return tensors


def _tensor(entry: Any) -> TensorInfo | None:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        return None
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES or not _is_sizes(shape) or not _is_sizes(offsets):
        return None
    if len(offsets) != 2 or offsets[1] - offsets[0] != prod(shape) * DTYPE_BYTES[dtype]:
        return None
    return TensorInfo(dtype, tuple(shape), offsets[0], offsets[1])


def _is_sizes(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= _MOST_SIZES
        and all(is_int(item) and 0 <= item < 2**63 for item in value)
    )


def _layout_problems(path: Path | str, header: Header) -> list[Problem]:
    problems, end = [], 0
    for name, info in sorted(header.tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if info.begin != end:
            kind = "safetensors.overlap" if info.begin < end else "safetensors.gap"
            message = f"{name} begins at byte {info.begin}, the tensor before it ends at {end}"
            problems.append(Problem(str(path), kind, message, _RESTORE))
        end = max(end, info.end)
    if (expected := header.data_start + end) != header.file_bytes:
        kind = "safetensors.truncated" if header.file_bytes < expected else "safetensors.too_long"
        message = f"has {header.file_bytes} bytes, its header accounts for {expected}"
        problems.append(Problem(str(path), kind, message, _RESTORE))
    return problems
