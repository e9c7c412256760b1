"""Which format a record is in, told by its columns and by the keys of its turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eagle3.data.formats import from_json_text

TURN_COLUMNS = ("messages", "conversations")
"""Columns that hold a list of turns, in either of two formats."""
FAMILIES = {"prompts": "messages", "turns": "messages"}
"""A prompt is a conversation of one turn, and so on: a file may mix them."""


@dataclass(frozen=True)
class Claim:
    """A format that a record fits, and the column which says so."""

    format: str
    column: str

    def __str__(self) -> str:
        return f"{self.format} (its `{self.column}`)"


def family(name: str) -> str:
    """What a file's records have in common."""
    return FAMILIES.get(name, name)


def claims(record: Mapping[str, Any]) -> list[Claim]:
    """Every format that the record fits. A `prompt`, or a `turns`, beside a list of messages is no format of
    its own."""
    found = [Claim(_turns_format(record[name]), name) for name in TURN_COLUMNS if record.get(name) is not None]
    turns = bool(found)
    if record.get("instruction") is not None:
        found.append(Claim("alpaca", "instruction"))
    if record.get("prompt") is not None and not turns:
        found.append(Claim("prompts", "prompt"))
    if isinstance(from_json_text(record.get("turns")), list) and not turns:
        found.append(Claim("turns", "turns"))
    return found


def choose(record: Mapping[str, Any], wanted: str | None) -> Claim | tuple[str, str]:
    """The format to read the record in: `wanted` if it is given, else the only one; or a fault: (kind, message)."""
    if wanted == "prompts" and record.get("prompt") is not None:
        return Claim("prompts", "prompt")
    found = claims(record)
    if wanted is not None:
        fitting = [claim for claim in found if family(claim.format) == family(wanted)]
        if not fitting:
            others = " and ".join(map(str, found)) or f"none of them: it has {_names(record)}"
            return "format", f"data.format is {wanted}, this record fits {others}"
        found = fitting
    if len(found) > 1:
        return "ambiguous", f"fits {found[0]} and {found[1]}"
    return found[0] if found else ("messages", f"fits no format: it has {_names(record)}")


def _turns_format(value: Any) -> str:
    turns = from_json_text(value)
    first = next((turn for turn in turns if isinstance(turn, dict)), {}) if isinstance(turns, list) else {}
    return "sharegpt" if "from" in first and "role" not in first else "messages"


def _names(record: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, record)) or "no column"
