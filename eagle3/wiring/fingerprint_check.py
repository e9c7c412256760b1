"""A store's fingerprint against the store's own shard: the same numbers, read from the file without torch.

Legend: P positions, C channels, A aux layers, H target hidden.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.errors import Problem, ProblemsError
from eagle3.wiring.contract import WiringContract
from eagle3.wiring.fingerprint_file import Fingerprint
from eagle3.wiring.layers import is_size
from eagle3.wiring.safetensors_header import DTYPE_BYTES, Header, read_header

_FIX = "extract again into an empty folder; a fingerprint that is not the store's own can prove nothing"
_UNFINISHED = "run `eagle3 extract` with the same settings to its end: the fingerprint comes with the first shard"


def check_stored_fingerprint(folder: Path, manifest: Mapping[str, Any], contract: WiringContract) -> list[Problem]:
    """Whether the fingerprint in a store's manifest (parsed JSON) is sound and is what its shard holds.

    Reads the fingerprint's rows only. A store without a shard has none yet, a manifest without the key is no store's.

    Returns:
        Problems of kinds `fingerprint.*`; a shard that cannot be read is left to other checks.
    """
    where = f"{folder / 'manifest.json'}: fingerprint"
    shards = manifest.get("shards")
    if manifest.get("fingerprint") is None:
        if not shards or "fingerprint" not in manifest:
            return []
        return [Problem(where, "fingerprint.missing", "there are shards, but no fingerprint", _UNFINISHED)]
    try:
        fingerprint = Fingerprint.from_dict(manifest["fingerprint"], contract, where)
    except ProblemsError as error:
        return list(error.problems)
    place = None
    with suppress(KeyError, TypeError):  # other checks name what is wrong with the list of shards
        place = _place(shards, fingerprint.sample)
    if place is None:
        message = f"is of sample {fingerprint.sample!r}, which the store does not hold"
        return [Problem(where, "fingerprint.sample", message, _FIX)]
    path, begin, tokens = folder / place[0], place[1], place[2]
    try:
        differing = _differences(path, read_header(path), begin, tokens, fingerprint, contract)
    except (ProblemsError, KeyError, struct.error, OverflowError):
        return []
    if not differing:
        return []
    message = f"differs from sample {fingerprint.sample!r} in {place[0]}: {', '.join(differing)}"
    return [Problem(where, "fingerprint.states", message, _FIX)]


def _place(shards: Any, sample: str) -> tuple[str, int, int] | None:
    """The shard's file name, the sample's first row in it, and its tokens."""
    for shard in shards:
        row = 0
        for item in shard["samples"]:
            if not is_size(item["tokens"]):
                raise TypeError
            if item["id"] == sample:
                return shard["file"], row, item["tokens"]
            row += item["tokens"]
    return None


def _differences(
    path: Path, header: Header, begin: int, tokens: int, fingerprint: Fingerprint, contract: WiringContract
) -> list[str]:
    """What in the shard is not what the fingerprint says."""
    length, hidden = len(fingerprint.token_ids), contract.hidden_size
    ids = _values(path, header, "input_ids", begin, range(min(length, tokens)), 1, 0)
    differing = [] if tuple(int(value) for value in ids) == fingerprint.token_ids else ["its token ids"]
    width, places = len(contract.output_indices) * hidden, [(begin + at, at) for at in fingerprint.positions]
    for slot, index in enumerate(contract.output_indices):
        states = _Slot("aux_hidden_states", width, slot * hidden, "aux_scales", len(contract.output_indices), slot)
        rows = [(row, fingerprint.states[index][number]) for number, (row, _) in enumerate(places)]
        if not _equal(path, header, states, rows, fingerprint.channels):
            differing.append(f"output index {index}")
    stored = _last_rows(path, header, begin, fingerprint.positions)
    rows = [(row, fingerprint.last[number]) for number, row in stored.items()]
    if not _equal(
        path, header, _Slot("last_hidden_states", hidden, 0, "last_scales", 1, 0), rows, fingerprint.channels
    ):
        differing.append("the last hidden states")
    return differing


@dataclass(frozen=True)
class _Slot:
    """Columns from `offset` of a tensor [rows, columns]; in an fp8 store their scales are a column of `scales`."""

    tensor: str
    columns: int
    offset: int
    scales: str
    scale_columns: int
    scale_offset: int


def _equal(
    path: Path, header: Header, slot: _Slot, rows: Sequence[tuple[int, Sequence[float]]], channels: Sequence[int]
) -> bool:
    """Whether the stored numbers of these rows are those that are given."""
    for row, expected in rows:
        found = _values(path, header, slot.tensor, row, channels, slot.columns, slot.offset)
        if slot.scales in header.tensors:
            scale = _values(path, header, slot.scales, row, [0], slot.scale_columns, slot.scale_offset)[0]
            found = [value * scale for value in found]
        if found != [_as_float32(value) for value in expected]:
            return False
    return True


def _last_rows(path: Path, header: Header, begin: int, positions: Sequence[int]) -> dict[int, int]:
    """For each position (by its number) whose last hidden states are stored, their row."""
    mask = header.tensors["loss_mask"]
    if header.tensors["last_hidden_states"].shape[0] == mask.shape[0]:
        return {number: begin + at for number, at in enumerate(positions)}
    with open(path, "rb") as handle:
        handle.seek(header.data_start + mask.begin)
        marks = handle.read(begin + positions[-1] + 1)
    return {number: sum(marks[: begin + at]) for number, at in enumerate(positions) if marks[begin + at]}


def _values(
    path: Path, header: Header, tensor: str, row: int, places: Sequence[int], columns: int, offset: int
) -> list[float]:
    """Values of one row of a tensor [rows, columns] at `offset` + `places`, as float32 numbers (or integers)."""
    info = header.tensors[tensor]
    size = DTYPE_BYTES[info.dtype]
    with open(path, "rb") as handle:
        handle.seek(header.data_start + info.begin + (row * columns + offset) * size)
        raw = handle.read((max(places) + 1) * size)
    decode = _DECODERS[info.dtype]
    return [decode(raw[place * size : (place + 1) * size]) for place in places]


def _unpacked(code: str) -> Callable[[bytes], float]:
    return lambda part: float(struct.unpack(code, part)[0])


def _bfloat16(part: bytes) -> float:
    return float(struct.unpack("<f", b"\0\0" + part)[0])


def _float8(part: bytes) -> float:
    """e4m3 without infinities: bias 7, 0x7F and 0xFF are NaN (arXiv 2209.05433)."""
    (bits,) = struct.unpack("B", part)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    if bits & 0x7F == 0x7F:
        return math.nan
    magnitude = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    return -magnitude if bits & 0x80 else magnitude


_DECODERS: dict[str, Callable[[bytes], float]] = {
    "F32": _unpacked("<f"),
    "F16": _unpacked("<e"),
    "I32": _unpacked("<i"),
    "U16": _unpacked("<H"),
    "BF16": _bfloat16,
    "F8_E4M3": _float8,
}


def _as_float32(value: float) -> float:
    result: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return result
