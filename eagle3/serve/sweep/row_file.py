"""What is kept of a finished row, so that its server need not be started again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from eagle3.errors import Problem, problem_error
from eagle3.files import digest_json, first_fault, read_json_object, write_json_atomic
from eagle3.serve.bench.facts import Facts
from eagle3.serve.bench.prompts import Load
from eagle3.serve.sweep.settings import Setting

ROW = "row.json"
FORMAT, VERSION = "eagle3-sweep-row", 1
_PLACE = ("--port", "--nccl-port", "--host")


@dataclass(frozen=True)
class RowFile:
    """Attributes:
    key: the server's command, but for where it listens, and what was sent.
    facts: what the server said of itself.
    seconds_to_ready: from its start.
    warnings: of its start.
    """

    key: str
    facts: Facts
    seconds_to_ready: float
    warnings: tuple[str, ...]


_ROW = TypeAdapter(RowFile)


def row_key(setting: Setting, load: Load) -> str:
    """Changes with whatever the figures depend on; not with the port, nor with more passes or concurrencies."""
    argv, kept = list(setting.command.argv), []
    while argv:
        item = argv.pop(0)
        if item in _PLACE:
            argv = argv[1:]
        elif item.split("=")[0] not in _PLACE:
            kept.append(item)
    return digest_json([kept, dict(setting.command.env), load.digest])


def write_row(path: Path, row: RowFile) -> None:
    """Writes it whole or not at all."""
    write_json_atomic(path, {"format": FORMAT, "format_version": VERSION, **asdict(row)})


def read_row(path: Path) -> RowFile | None:
    """A row of an earlier run; None where there is none.

    Raises:
        ProblemsError: kind `sweep.output`: it is something else, or damaged.
    """
    if not path.exists():
        return None
    value: dict[str, Any] = read_json_object(path, "a row of a sweep")
    try:
        if value.pop("format") != FORMAT or value.pop("format_version") != VERSION:
            raise ValueError("another format")
        return _ROW.validate_json(json.dumps(value), strict=True)
    except KeyError as error:
        message = f"is no row of a sweep: it has no {error}"
    except ValueError as error:
        message = f"is no row of a sweep: {first_fault(error)}"
    raise problem_error(str(path), "sweep.output", message, "remove it; the row is measured again")


def changed_problem(path: Path) -> Problem:
    """Of a row that an earlier run measured otherwise."""
    message = "was measured with another command of the server, other prompts, or asked otherwise"
    return Problem(str(path), "sweep.output", message, "give another output folder, or remove this row's")
