"""JSON files that carry their own checksum, so that a flipped bit in one is found. Standard library only.

The key `seal` holds `sha256:<hex>` of the file's bytes with these 64 digits as zeros.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3.errors import Problem, raise_problems
from eagle3.files import as_object, parse_json_file, read_file, write_text_atomic

SEAL = "seal"
_ZEROS = "0" * 64
_PLACE = re.compile(rb'"seal": "sha256:([0-9a-f]{64})"')


def sealed_text(value: Mapping[str, Any]) -> str:
    """The object as indented JSON with sorted keys and its seal."""
    text = json.dumps(
        {**value, SEAL: f"sha256:{_ZEROS}"}, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False
    )
    text += "\n"
    return text.replace(f'"{SEAL}": "sha256:{_ZEROS}"', f'"{SEAL}": "sha256:{_digest(text.encode())}"')


def write_sealed(path: Path, value: Mapping[str, Any]) -> None:
    """Replaces `path` by the object and its seal, whole or not at all."""
    write_text_atomic(path, sealed_text(value))


def read_sealed_object(path: Path, what: str) -> dict[str, Any]:
    """Reads a JSON object; of one that has a seal, only as it was written.

    Raises:
        ProblemsError: as `read_json_object`; kind `file.seal`.
    """
    raw = read_file(path, what)
    value = as_object(parse_json_file(raw, path, what), path, what)
    raise_problems(check_seal(raw, str(path)) if SEAL in value else [])
    return value


def check_seal(raw: bytes, where: str) -> list[Problem]:
    """Whether a file's bytes are those that were sealed; kind `file.seal`."""
    found = [match.span(1) for match in _PLACE.finditer(raw)]
    if len(found) == 1:
        begin, end = found[0]
        if _digest(raw[:begin] + _ZEROS.encode() + raw[end:]) == raw[begin:end].decode():
            return []
    message = f"its bytes are not those that were written: its {SEAL} is {'another' if found else 'missing'}"
    return [Problem(where, "file.seal", message, "restore the file from a copy; it is not to be edited by hand")]


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()
