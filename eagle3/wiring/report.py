"""Problems and layer numbering as text and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from eagle3.errors import EXIT_OK, EXIT_PROBLEMS, Problem, ProblemsError
from eagle3.wiring.conventions import ENGINE_NAMES
from eagle3.wiring.engines import ids_to_write, known_conventions, version_range
from eagle3.wiring.layers import LayerWiring, parse_layers
from eagle3.wiring.targets import target_facts


def exit_code(problems: Sequence[Problem]) -> int:
    """0 if there is none, else 2."""
    return EXIT_PROBLEMS if problems else EXIT_OK


def render_text(problems: Sequence[Problem], fine: str = "no problem found") -> str:
    """Every problem with its fix, or the sentence `fine`."""
    if not problems:
        return fine
    head = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return "\n".join([head, *map(str, problems)])


def render_json(problems: Sequence[Problem], **context: Any) -> str:
    """`{"ok": ..., "problems": [{where, kind, message, fix}], ...context}`."""
    report = {"ok": not problems, "problems": [problem.to_dict() for problem in problems], **context}
    return json.dumps(report, indent=2, ensure_ascii=False)


@dataclass(frozen=True)
class ExplainRow:
    """What one engine calls the layers, over a range of its versions.

    Attributes:
        first, last: the range, both ends included.
        key: where it reads its ids from.
        ids: its numbers, or None where it cannot capture these layers.
        note: why not.
        source: where the convention was read.
    """

    engine: str
    first: str
    last: str
    key: str
    ids: tuple[int, ...] | None
    note: str
    source: str


def explain(target: str | Path, layers: str | Sequence[int]) -> list[ExplainRow]:
    """What every engine and version calls the outputs of these layers of a target.

    Neighbouring version ranges that say the same are joined; engines that do not know the family are left out.

    Args:
        target: known target name, or a folder with the target's config.json.
        layers: output indices, e.g. `(2, 30, 58)` or `"2,30,58"`.

    Raises:
        ProblemsError: the target or the layers are not known or not possible.
    """
    facts = target_facts(target)
    wiring = LayerWiring(parse_layers(layers) if isinstance(layers, str) else tuple(layers), facts.num_hidden_layers)
    rows: list[ExplainRow] = []
    for engine in ENGINE_NAMES:
        for convention in known_conventions(engine, facts.family):
            ids, note = None, ""
            try:
                ids = ids_to_write(wiring, engine, convention.last, facts.family).ids
            except ProblemsError as error:
                note = "; ".join(problem.message for problem in error.problems)
            row = ExplainRow(engine, convention.first, convention.last, convention.key, ids, note, convention.source)
            if rows and replace(rows[-1], last=row.last) == replace(row, first=rows[-1].first):
                row = replace(row, first=rows.pop().first)
            rows.append(row)
    return rows


def render_explain(rows: Sequence[ExplainRow], as_json: bool = False) -> str:
    """The rows as a text table, or as a JSON list."""
    if as_json:
        return json.dumps([asdict(row) for row in rows], indent=2)
    table = [("engine", "versions", "key", "ids")]
    for row in rows:
        ids = row.note if row.ids is None else str(list(row.ids))
        table.append((ENGINE_NAMES[row.engine], version_range(row.first, row.last), row.key, ids))
    return "\n".join(aligned(table))


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """A table's rows as lines, its columns padded to one width each."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
