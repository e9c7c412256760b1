"""A store's fingerprint: a few numbers of one sample, by which its states can be recognised without the store.

`docs/hidden-state-format.md` says what it holds. It stands in the store's manifest, and beside the contract of a run
and of an exported checkpoint. Standard library only.

Legend: P positions, C channels, T tokens, N decoder layers, H target hidden.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from eagle3.errors import Problem, ProblemsError, problem_error, raise_problems
from eagle3.files import digest_json, read_json, write_json_atomic
from eagle3.sealed import read_sealed_object
from eagle3.wiring.contract import WiringContract
from eagle3.wiring.layers import is_int

FORMAT = "eagle3-fingerprint"
FORMAT_VERSION = 1
FINGERPRINT_FILE = "eagle3_fingerprint.json"
LAST = "last"
_LARGEST = 2.0**128 - 2.0**104  # of float32
_MANIFEST_FILE = "manifest.json"
_FIX = "extract again, or restore the file from its source"

Rows = tuple[tuple[float, ...], ...]
"""[P, C] numbers."""


@dataclass(frozen=True)
class Fingerprint:
    """Numbers of one sample, as stored.

    Attributes:
        sample: its id.
        token_ids: its first T tokens; the states of a token depend on no later one.
        positions: P tokens, ascending from 0.
        channels: C of the H channels, ascending.
        states: by output index, the states of those tokens in those channels; the contract's layers at least.
        last: the same of the last hidden states, before or after the final norm as the contract says.
    """

    sample: str
    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    channels: tuple[int, ...]
    states: Mapping[int, Rows]
    last: Rows

    def slots(self, contract: WiringContract) -> list[Rows]:
        """The rows of each aux slot and of the last hidden states."""
        return [*(self.states[index] for index in contract.output_indices), self.last]

    @property
    def digest(self) -> str:
        """`sha256:<hex>` of everything in it."""
        return digest_json(self._content())

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` reads them back."""
        return {**self._content(), "digest": self.digest}

    def _content(self) -> dict[str, Any]:
        states: dict[str, Rows] = {str(index): self.states[index] for index in sorted(self.states)}
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "sample": self.sample,
            "token_ids": list(self.token_ids),
            "positions": list(self.positions),
            "channels": list(self.channels),
            "states": {name: [list(row) for row in rows] for name, rows in [*states.items(), (LAST, self.last)]},
        }

    @classmethod
    def from_dict(cls, value: object, contract: WiringContract, where: str) -> Self:
        """Strict reverse of `to_dict`.

        Raises:
            ProblemsError: kinds `fingerprint.format`, `fingerprint.value` (each field that cannot be, or does not fit
                the contract), `fingerprint.digest`.
        """
        raise_problems(_form_problems(value, where))
        assert isinstance(value, dict)
        raise_problems(_value_problems(value, contract, where))
        rows = {name: tuple(map(tuple, item)) for name, item in value["states"].items()}
        last = rows.pop(LAST)
        lists = {key: tuple(value[key]) for key in ("token_ids", "positions", "channels")}
        read = cls(sample=value["sample"], states={int(name): rows[name] for name in rows}, last=last, **lists)
        if read.digest != value["digest"]:
            message = f"its digest is {value['digest']}, its content has {read.digest}: it was changed"
            raise problem_error(where, "fingerprint.digest", message, _FIX)
        return read

    def save(self, folder: Path) -> None:
        """Writes it into a folder under its usual name."""
        write_json_atomic(folder / FINGERPRINT_FILE, self.to_dict())


def load_fingerprint(folder: Path) -> tuple[Fingerprint, WiringContract]:
    """The fingerprint and the contract of a hidden-state store (its manifest is enough), a run or a checkpoint.

    Raises:
        ProblemsError: kinds `file.missing`, `fingerprint.missing`; or either is damaged.
    """
    if not folder.is_dir():
        fix = "give a hidden-state store, a run or an exported checkpoint"
        raise problem_error(str(folder), "file.missing", "there is no such folder", fix)
    if (folder / _MANIFEST_FILE).is_file():
        path = folder / _MANIFEST_FILE
        manifest = read_sealed_object(path, "the manifest of a hidden-state store")
        contract = WiringContract.from_dict(manifest.get("contract"), f"{path}: contract")
        value, where = manifest.get("fingerprint"), f"{path}: fingerprint"
    else:
        path = folder / FINGERPRINT_FILE
        value = read_json(path, "a fingerprint") if os.path.lexists(path) else None
        where = str(path)
        contract = WiringContract.load(folder)
    if value is None:
        message = "has no fingerprint: there is nothing to compare with"
        fix = "give a store that `eagle3 extract` wrote, or a checkpoint that was trained on one and exported"
        raise problem_error(str(folder), "fingerprint.missing", message, fix)
    return Fingerprint.from_dict(value, contract, where), contract


def check_fingerprint(folder: Path, contract: WiringContract) -> list[Problem]:
    """What is wrong with the fingerprint beside a checkpoint's contract, if there is one."""
    path = folder / FINGERPRINT_FILE
    try:
        if os.path.lexists(path):
            Fingerprint.from_dict(read_json(path, "a fingerprint"), contract, str(path))
    except ProblemsError as error:
        return list(error.problems)
    return []


def _form_problems(value: object, where: str) -> list[Problem]:
    if not isinstance(value, dict) or value.get("format") != FORMAT or value.get("format_version") != FORMAT_VERSION:
        found = {key: value.get(key) for key in ("format", "format_version")} if isinstance(value, dict) else value
        message = f"is no fingerprint that this version reads: {found!r:.80}, expected {FORMAT} {FORMAT_VERSION}"
        return [Problem(where, "fingerprint.format", message, _FIX)]
    keys = {"format", "format_version", "sample", "token_ids", "positions", "channels", "states", "digest"}
    return [
        Problem(where, "fingerprint.format", f"{key} is {'missing' if key in keys else 'not part of it'}", _FIX)
        for key in sorted(keys ^ value.keys())
    ]


def _value_problems(value: Mapping[str, Any], contract: WiringContract, where: str) -> list[Problem]:
    lists = {
        "token_ids": contract.vocab_size,
        "positions": len(value["token_ids"]) if isinstance(value["token_ids"], list) else 0,
        "channels": contract.hidden_size,
    }
    problems = [
        Problem(where, "fingerprint.value", f"{key} is not a list of whole numbers from 0 below {end}", _FIX)
        for key, end in lists.items()
        if not _are_ints(value[key], end)
    ]
    problems += [
        Problem(where, "fingerprint.value", f"{key} does not ascend", _FIX)
        for key in ("positions", "channels")
        if not problems and any(second <= first for first, second in zip(value[key], value[key][1:], strict=False))
    ]
    if not isinstance(value["sample"], str) or not value["sample"]:
        problems.append(Problem(where, "fingerprint.value", "sample is not a name", _FIX))
    if problems or not isinstance(value["states"], dict):
        return problems or [Problem(where, "fingerprint.value", "states is not an object", _FIX)]
    needed = {str(index) for index in contract.output_indices} | {LAST}
    for name in sorted(needed | value["states"].keys()):
        if name not in value["states"] or not (name == LAST or _is_layer(name, contract.num_hidden_layers)):
            message = f"states has no {name!r}" if name in needed else f"states has {name!r}, no layer of the target"
            problems.append(Problem(where, "fingerprint.value", message, _FIX))
        elif not _are_rows(value["states"][name], len(value["positions"]), len(value["channels"])):
            message = f"states {name!r} are not {len(value['positions'])} rows of {len(value['channels'])} numbers"
            problems.append(Problem(where, "fingerprint.value", message, _FIX))
    return problems


def _is_layer(name: str, num_hidden_layers: int) -> bool:
    return re.fullmatch("-1|0|[1-9][0-9]{0,9}", name) is not None and int(name) < num_hidden_layers


def _are_ints(value: object, end: int) -> bool:
    return isinstance(value, list) and bool(value) and all(is_int(item) and 0 <= item < end for item in value)


def _are_rows(value: object, rows: int, columns: int) -> bool:
    def is_number(item: object) -> bool:
        return isinstance(item, float | int) and not isinstance(item, bool) and abs(item) <= _LARGEST

    def is_row(row: object) -> bool:
        return isinstance(row, list) and len(row) == columns and all(map(is_number, row))

    return isinstance(value, list) and len(value) == rows and all(map(is_row, value))
