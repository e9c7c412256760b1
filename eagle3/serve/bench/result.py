"""The result of a bench: rows, what is wrong, and what `eagle3 serve plan` is made of; as JSON, see
docs/schemas/bench.schema.json."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from eagle3.errors import EXIT_OK, EXIT_PROBLEMS, Problem
from eagle3.serve.bench.findings import broken, left_out_notes, notes_of, problems_of
from eagle3.serve.bench.rows import Row

FORMAT, VERSION = "eagle3-bench", 1


@dataclass(frozen=True)
class BenchResult:
    """Attributes:
    rows: by concurrency, the baseline's last.
    left_out: prompts that were not sent: how many of each set, by reason.
    settings: how the prompts were sent.
    sets: conversations of each set.
    """

    target: str
    rows: tuple[Row, ...]
    left_out: Mapping[str, Mapping[str, int]]
    settings: Mapping[str, Any]
    sets: Mapping[str, int]

    @property
    def problems(self) -> list[Problem]:
        return [problem for row in self.rows for problem in problems_of(row)]

    @property
    def notes(self) -> list[str]:
        """Each with the row that it is of."""
        of_rows = [f"{row.name}, concurrency {row.concurrency}: {note}" for row in self.rows for note in notes_of(row)]
        return [*left_out_notes({name: dict(reasons) for name, reasons in self.left_out.items()}), *of_rows]

    @property
    def exit_code(self) -> int:
        return EXIT_PROBLEMS if self.problems else EXIT_OK

    @property
    def points(self) -> list[dict[str, Any]]:
        """What `eagle3 serve plan` takes as `points`."""
        return points_of(self.rows)

    @property
    def baseline(self) -> list[dict[str, Any]]:
        """What `eagle3 serve plan` takes as `baseline`."""
        return baseline_of(self.rows)

    def to_dict(self) -> dict[str, Any]:
        """The whole result."""
        value = {
            "format": FORMAT,
            "format_version": VERSION,
            "target": self.target,
            "settings": dict(self.settings),
            "sets": dict(self.sets),
            "left_out": {name: dict(reasons) for name, reasons in self.left_out.items()},
            "rows": [row_dict(row) for row in self.rows],
            "points": self.points,
            "baseline": self.baseline,
            "problems": [problem.to_dict() for problem in self.problems],
            "notes": self.notes,
        }
        return finite(value)


def points_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Measured points of the rows that speculate and work."""
    found = []
    for row in rows:
        if not usable(row) or row.acceptance is None or row.facts.steps is None or row.speed is None:
            continue
        point: dict[str, Any] = {"steps": row.facts.steps}
        if row.facts.draft_tokens is not None:
            point["draft_tokens"] = row.facts.draft_tokens
        point |= {
            "batch": row.concurrency,
            "tok_s": row.speed.decode_tok_s.value,
            "acceptance_length": max(row.acceptance.length.value, 1.0),
        }
        found.append(point)
    return found


def baseline_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The speed without a drafter, by batch: the first row of each that has none."""
    found: dict[int, float] = {}
    for row in rows:
        if usable(row) and row.speed is not None and (row.baseline or row.facts.speculates is False):
            found.setdefault(row.concurrency, row.speed.decode_tok_s.value)
    return [{"batch": batch, "tok_s": speed} for batch, speed in found.items()]


def usable(row: Row) -> bool:
    """Its figures are of a server that worked and was ours alone."""
    return not row.lost and not broken(row) and not row.foreign and math.isfinite(_speed(row))


def _speed(row: Row) -> float:
    return math.nan if row.speed is None else row.speed.decode_tok_s.value


def row_dict(row: Row) -> dict[str, Any]:
    """A row, with `state` in a word."""
    state = "lost" if row.lost else "broken" if broken(row) else "disturbed" if problems_of(row) else "ok"
    return {"state": state, **asdict(row)}


def finite(value: Any) -> Any:
    """JSON has no NaN: what has no data is null."""
    if isinstance(value, Mapping):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
