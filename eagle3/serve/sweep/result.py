"""The result of a sweep: rows, their order, and the plan; as JSON, see docs/schemas/sweep.schema.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eagle3.config import SweepConfig
from eagle3.errors import EXIT_OK, EXIT_PROBLEMS, Problem
from eagle3.serve.bench.findings import notes_of, problems_of, ranked
from eagle3.serve.bench.prompts import Load
from eagle3.serve.bench.result import baseline_of, finite, points_of, row_dict
from eagle3.serve.bench.rows import Row, make_row
from eagle3.serve.bench.run import Measured
from eagle3.serve.sweep.compare import Comparison, compare
from eagle3.serve.sweep.settings import Setting

FORMAT, VERSION = "eagle3-sweep", 1


@dataclass(frozen=True)
class SweepRow:
    """What became of a setting.

    Attributes:
        measured: None where the server never took requests.
        failed: why; empty where it did.
        seconds_to_ready: from its start.
        warnings: of its start.
        log: its output.
    """

    setting: Setting
    measured: Measured | None
    failed: str
    problems: tuple[Problem, ...]
    seconds_to_ready: float | None
    warnings: tuple[str, ...]
    log: str


@dataclass(frozen=True)
class SweepResult:
    """Attributes:
    sweep_rows: in the order of starting.
    rows: of those that took requests, by place in `sweep_rows`, one for each concurrency.
    comparisons: of the plan with what was measured, by concurrency; empty without a plan.
    """

    target: str
    sweep_rows: tuple[SweepRow, ...]
    rows: dict[int, list[Row]]
    comparisons: tuple[Comparison, ...]
    settings: dict[str, Any]
    baseline_wanted: bool

    @property
    def flat(self) -> list[Row]:
        return [row for rows in self.rows.values() for row in rows]

    def ranking(self, concurrency: int) -> list[Row]:
        """The fastest first; what failed or is broken is not ranked."""
        return ranked([row for row in self.flat if row.concurrency == concurrency])

    @property
    def concurrencies(self) -> list[int]:
        return list(self.settings["concurrency"])

    @property
    def problems(self) -> list[Problem]:
        found = []
        for failed in self.sweep_rows:
            for item in failed.problems:
                where = f"{failed.setting.name}: {item.where}"
                found.append(Problem(where, "sweep.failed", f"[{item.kind}] {item.message}", item.fix))
        for place, rows in self.rows.items():
            name = self.sweep_rows[place].setting.name
            for row in rows:
                found += [
                    Problem(f"{name}: {item.where}", item.kind, item.message, item.fix) for item in problems_of(row)
                ]
        return found

    @property
    def notes(self) -> list[str]:
        found = []
        for place, rows in self.rows.items():
            item = self.sweep_rows[place]
            found += [f"{item.setting.name}: {warning}" for warning in item.warnings]
            found += [f"{row.name}, concurrency {row.concurrency}: {note}" for row in rows for note in notes_of(row)]
        return [*found, *(sentence for one in self.comparisons for sentence in one.sentences)]

    @property
    def exit_code(self) -> int:
        return EXIT_PROBLEMS if self.problems else EXIT_OK

    def to_dict(self) -> dict[str, Any]:
        """The whole result."""
        value = {
            "format": FORMAT,
            "format_version": VERSION,
            "target": self.target,
            "settings": self.settings,
            "rows": [self._row(place, row) for place, row in enumerate(self.sweep_rows)],
            "ranking": [
                {"concurrency": concurrency, "fastest_first": [row.name for row in self.ranking(concurrency)]}
                for concurrency in self.concurrencies
            ],
            "plans": [one.to_dict() for one in self.comparisons],
            "points": points_of(self.flat),
            "baseline": baseline_of(self.flat),
            "problems": [problem.to_dict() for problem in self.problems],
            "notes": self.notes,
        }
        return finite(value)

    def _row(self, place: int, row: SweepRow) -> dict[str, Any]:
        return {
            "name": row.setting.name,
            "steps": row.setting.steps,
            "topk": row.setting.topk,
            "draft_tokens": row.setting.draft_tokens,
            "failed": row.failed,
            "seconds_to_ready": row.seconds_to_ready,
            "command": list(row.setting.command.argv),
            "log": row.log,
            "measured": [row_dict(one) for one in self.rows.get(place, [])],
        }


def make_sweep_result(cfg: SweepConfig, load: Load, sweep_rows: Sequence[SweepRow]) -> SweepResult:
    """Figures of every row, and the plan.

    Raises:
        ProblemsError: the plan's acceptance file is not one.
    """
    baseline = next((row.measured for row in sweep_rows if not row.setting.steps and row.measured is not None), None)
    rows: dict[int, list[Row]] = {}
    for place, row in enumerate(sweep_rows):
        item = row.measured
        if item is None:
            continue
        rows[place] = []
        for concurrency in cfg.load.concurrency:
            others = None if baseline is None or item is baseline else baseline.passes.get(concurrency, [])
            passes = sorted(item.passes.get(concurrency, []), key=lambda one: one.number)
            lost = item.lost if len(passes) < cfg.load.passes else ""
            rows[place].append(
                make_row(item.facts, item.server.url, item is baseline, concurrency, passes, lost, others, load.cfg,
                         load.reference)
            )  # fmt: skip
    flat = [row for found in rows.values() for row in found]
    comparisons = tuple(
        one for concurrency in cfg.load.concurrency if (one := compare(cfg, concurrency, flat)) is not None
    )
    settings = {**load.cfg.model_dump(mode="json", exclude={"sets"}), "plan_from": list(cfg.plan_from)}
    return SweepResult(load.target.contract_name, tuple(sweep_rows), rows, comparisons, settings, cfg.baseline)
