"""Problems and layer numbering as text and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from eagle3.errors import EXIT_OK, EXIT_PROBLEMS, Problem, ProblemsError
from eagle3.wiring.conventions import ENGINE_NAMES, UNREADABLE
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
    """`{"format": ..., "ok": ..., "problems": [{where, kind, message, fix}], ...context}`.

    Its schema is docs/schemas/problems.schema.json.
    """
    report = {
        "format": "eagle3-problems",
        "format_version": 1,
        "ok": not problems,
        "problems": [problem.to_dict() for problem in problems],
        **context,
    }
    return json.dumps(report, indent=2, ensure_ascii=False)


@dataclass(frozen=True)
class ExplainRow:
    """What one engine calls the layers, over a range of its versions.

    Attributes:
        first, last: the range, both ends included.
        key: where it reads its ids from.
        ids: its numbers, or None where it cannot capture these layers.
        note: why not.
        source, read: file and symbol the convention was read in, and the day.
    """

    engine: str
    first: str
    last: str
    key: str
    ids: tuple[int, ...] | None
    note: str
    source: str
    read: str


def explain(target: str | Path, layers: str | Sequence[int]) -> list[ExplainRow]:
    """What every engine and version calls the outputs of these layers of a target.

    Neighbouring version ranges that say the same are joined; engines that do not know the family are left out, one
    that nobody could read is a row that says so.

    Args:
        target: known target name, or a folder with the target's config.json.
        layers: output indices, e.g. `(2, 30, 58)` or `"2,30,58"`.

    Raises:
        ProblemsError: the target or the layers are not known or not possible.
    """
    facts = target_facts(target)
    wiring = LayerWiring(parse_layers(layers) if isinstance(layers, str) else tuple(layers), facts.num_hidden_layers)
    return explain_wiring(wiring, facts.family)


def explain_wiring(wiring: LayerWiring, family: str) -> list[ExplainRow]:
    """As `explain`, of layers and a family that are known to fit."""
    rows: list[ExplainRow] = []
    for engine in ENGINE_NAMES:
        if engine in UNREADABLE:
            rows.append(ExplainRow(engine, "", "", "", None, f"unknown: {UNREADABLE[engine]}", "", ""))
            continue
        for convention in known_conventions(engine, family):
            ids, note = None, ""
            try:
                ids = ids_to_write(wiring, engine, convention.last, family).ids
            except ProblemsError as error:
                note = "; ".join(problem.message for problem in error.problems)
            row = ExplainRow(
                engine, convention.first, convention.last, convention.key, ids, note, convention.source, convention.read
            )
            if rows and replace(rows[-1], last=row.last) == replace(row, first=rows[-1].first):
                row = replace(row, first=rows.pop().first)
            rows.append(row)
    return rows


def render_explain(rows: Sequence[ExplainRow], as_json: bool = False, sources: bool = False) -> str:
    """The rows as a text table, or as a JSON list (schema: docs/schemas/explain.schema.json).

    Args:
        sources: also say where each row was read, and when; JSON always does.
    """
    if as_json:
        return json.dumps([asdict(row) for row in rows], indent=2)
    table = [("engine", "versions", "key", "ids")]
    for row in rows:
        ids = row.note if row.ids is None else str(list(row.ids))
        table.append((ENGINE_NAMES[row.engine], version_range(row.first, row.last), row.key, ids))
    lines = aligned(table)
    if sources:
        notes = ["", *(f"\n    read in {row.source} on {row.read}" if row.source else "" for row in rows)]
        lines = [line + note for line, note in zip(lines, notes, strict=True)]
    return "\n".join(lines)


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """A table's rows as lines, its columns padded to one width each."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
