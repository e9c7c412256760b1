"""Writes a safetensors file block by block: the bytes depend on nothing but the input, no tensor is joined in
memory, and a full disk is an `OSError` (the safetensors package raises its own error and may change its layout).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from stat import S_IMODE

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from eagle3.files import write_atomic

_CODES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint16: "U16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TORCH_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_SIZES = {code: dtype.itemsize for dtype, code in _CODES.items()}
_ALIGNMENT = 8


def write_tensor_file(path: Path, tensors: Mapping[str, Sequence[torch.Tensor]], metadata: Mapping[str, str]) -> str:
    """Writes `tensors`, in the order given, and returns the file's `sha256:<hex>`.

    Args:
        path: written in place; `write_tensor_file_atomic` writes it whole or not at all.
        tensors: name -> blocks that follow each other along dimension 0. Put larger element sizes first, so that
            every tensor begins at a multiple of its element size.
        metadata: the header's text entries. Give at most one where the bytes must not depend on a reader's order.

    Raises:
        OSError: the disk is full, or another failure of the file system.
    """
    digest = hashlib.sha256()
    with open(path, "wb") as handle:
        for block in _blocks(tensors, metadata):
            handle.write(block)
            digest.update(block)
    return f"sha256:{digest.hexdigest()}"


def write_tensor_file_atomic(
    path: Path, tensors: Mapping[str, Sequence[torch.Tensor]], metadata: Mapping[str, str]
) -> str:
    """As `write_tensor_file`, whole or not at all.

    Raises:
        ProblemsError: as `eagle3.files.write_atomic`.
    """
    checksum = ""

    def write(temporary: Path) -> None:
        nonlocal checksum
        checksum = write_tensor_file(temporary, tensors, metadata)

    write_atomic(path, write)
    return checksum


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """`safetensors.torch.save_file` with the mode that a new file has here, not one for the owner alone; see
    `plain_os_errors`."""
    with open(path, "wb") as handle:
        mode = S_IMODE(os.fstat(handle.fileno()).st_mode)
    with plain_os_errors(path):
        save_file(dict(tensors), path)
    path.chmod(mode)


@contextmanager
def plain_os_errors(path: Path) -> Iterator[None]:
    """The safetensors package hides what the file system says in an error of its own: raises that as `OSError`."""
    try:
        yield
    except SafetensorError as error:
        if found := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error
        raise


def file_header(layout: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str]) -> bytes:
    """The bytes before the tensors: `layout` is name -> (safetensors dtype, shape), in the order of their bytes."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, (code, shape) in layout.items():
        size = prod(shape) * _SIZES[code]
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _blocks(tensors: Mapping[str, Sequence[torch.Tensor]], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    yield file_header({name: _entry(parts) for name, parts in tensors.items()}, metadata)
    for parts in tensors.values():
        for part in parts:
            yield part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _entry(parts: Sequence[torch.Tensor]) -> tuple[str, list[int]]:
    return _CODES[parts[0].dtype], [sum(part.shape[0] for part in parts), *parts[0].shape[1:]]
