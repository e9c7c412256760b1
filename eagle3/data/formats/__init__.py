"""How others write conversations down: each file turns records of one format into messages of role and content.

`detect.py` says which format a record is in. A fault is a kind (the part after `conversations.`) and a message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Faults = list[tuple[str, str]]
"""Everything that is wrong with a record: (kind, message)."""
Messages = list[dict[str, Any]]


def without_nulls(value: Mapping[str, Any]) -> dict[str, Any]:
    """A column of a table holds null where another row has a key."""
    return {key: item for key, item in value.items() if item is not None}


def from_json_text(value: Any) -> Any:
    """A value that a table holds as JSON text; whatever is no JSON text stays as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def not_of_json(value: Any) -> str | None:
    """Name of a type in it that JSON has not, such as a date of a Parquet file; None if there is none."""
    if value is None or isinstance(value, str | int | float):
        return None
    if isinstance(value, Mapping):
        items = [*value, *value.values()]
    elif isinstance(value, list):
        items = value
    else:
        return type(value).__name__
    return next((found for item in items if (found := not_of_json(item))), None)
