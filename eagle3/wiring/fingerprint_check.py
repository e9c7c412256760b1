"""A store's fingerprint against the store's own shard: the same numbers, read from the file without torch.

Legend: P positions, C channels, A aux layers, H target hidden.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from eagle3.errors import Problem, ProblemsError
from eagle3.wiring.contract import WiringContract
from eagle3.wiring.fingerprint_file import Fingerprint
from eagle3.wiring.layers import is_size
from eagle3.wiring.safetensors_header import Header, read_header

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
    width = len(contract.output_indices) * hidden
    places = {index: ("aux_hidden_states", width, slot * hidden) for slot, index in enumerate(contract.output_indices)}
    compared = {f"output index {index}": (fingerprint.states[index], *place) for index, place in places.items()}
    compared["the last hidden states"] = (fingerprint.last, "last_hidden_states", hidden, 0)
    for name, (rows, tensor, columns, offset) in compared.items():
        for position, row in zip(fingerprint.positions, rows, strict=True):
            there = _values(path, header, tensor, begin + position, fingerprint.channels, columns, offset)
            if there != [_as_float32(value) for value in row]:
                differing.append(name)
                break
    return differing


def _values(
    path: Path, header: Header, tensor: str, row: int, places: Sequence[int], columns: int, offset: int
) -> list[float]:
    """Values of one row of a tensor [rows, columns] at `offset` + `places`, as float32 numbers (or integers)."""
    info = header.tensors[tensor]
    code, size = {"F32": ("<f", 4), "F16": ("<e", 2), "BF16": ("", 2), "I32": ("<i", 4)}[info.dtype]
    with open(path, "rb") as handle:
        handle.seek(header.data_start + info.begin + (row * columns + offset) * size)
        raw = handle.read((max(places) + 1) * size)
    parts = [raw[place * size : (place + 1) * size] for place in places]
    if code:
        return [struct.unpack(code, part)[0] for part in parts]
    return [struct.unpack("<f", b"\0\0" + part)[0] for part in parts]


def _as_float32(value: float) -> float:
    result: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return result
