"""Where metrics go: `log.jsonl` always, and the trackers that are asked for (`eagle3.train.curves`).

A line is one JSON object with `kind`: `train` (a step), `skip` (a step without a loss term), `eval` (held-out
samples; step 0 is before training), `early_stop` (why the run ended before its last step) or `stop` (a signal). On
resume the lines after the checkpoint's step are dropped, and that of the stop, so that the log of a resumed run reads
like an uninterrupted one's. `samples.jsonl` has the sample table of each evaluation in the same way, `samples.md` the
newest one for people.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eagle3.config import TrackingSection
from eagle3.errors import problem_error
from eagle3.files import explained_os_errors, write_text_atomic
from eagle3.train.curves import KINDS, Curves, Facts, Record, open_curves
from eagle3.train.sample_table import Row, render

LOG_FILE = "log.jsonl"
SAMPLES_FILE = "samples.jsonl"
SHOWN_FILE = "samples.md"

_SPEED = ("tokens_per_second", "supervised_tokens_per_second", "seconds", "mfu", "memory_gib")
TIMED = frozenset(("time", *_SPEED, "data_wait", "data_wait_rank", "save_seconds", "save_wait"))
"""Fields that differ each time a step is taken; all others are functions of the step."""


class Tracker:
    """Writes the records of one run; only the main process has one.

    Attributes:
        records: every record so far, those of before a resume included.
        lost: what failed on the way, in words.
    """

    def __init__(
        self,
        run: Path,
        tracking: TrackingSection,
        run_id: str,
        resumed_step: int | None,
        facts: Facts | None = None,
    ) -> None:
        self._run, self.path = run, run / LOG_FILE
        self.records = [record for record in _kept(self.path, resumed_step) if record["kind"] != "stop"]
        tables = _kept(run / SAMPLES_FILE, resumed_step)
        _rewrite(self.path, self.records)
        _rewrite(run / SAMPLES_FILE, tables)
        self.lost: list[str] = []
        self._curves = open_curves(run, tracking, run_id, facts or Facts())
        for record in self.records:
            self._draw(record)
        for table in tables:
            self._show(table["step"], table["samples"])

    def log(self, kind: str, step: int, **values: Any) -> None:
        """Appends a record and flushes it."""
        record = {"kind": kind, "step": step, "time": round(time.time(), 3), **values}
        self.records.append(record)
        _append(self.path, record)
        self._draw(record)

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        """Appends the sample table of an evaluation, if it has rows."""
        if not rows:
            return
        _append(self._run / SAMPLES_FILE, {"kind": "samples", "step": step, "samples": list(rows)})
        write_text_atomic(self._run / SHOWN_FILE, render(step, rows))
        self._show(step, rows)

    def close(self) -> None:
        self._each(lambda curves: curves.close())
        self._curves = []

    def _draw(self, record: Record) -> None:
        if record["kind"] in KINDS:
            self._each(lambda curves: curves.record(record))

    def _show(self, step: int, rows: Sequence[Row]) -> None:
        self._each(lambda curves: curves.samples(step, rows))

    def _each(self, act: Callable[[Curves], None]) -> None:
        """One that fails is left out from then on: the log is whole without it, and training is worth more."""
        for curves in list(self._curves):
            try:
                act(curves)
            except Exception as error:  # noqa: BLE001 (trackers raise anything; it is said, and once more at the end)
                self._curves.remove(curves)
                self.lost.append(
                    f"warning: {curves.name} failed and gets nothing more until the next start, which hands on what is "
                    f"missing; {self.path} has everything. It said: {type(error).__name__}: {error}"
                )
                print(self.lost[-1], file=sys.stderr)


def read_log(path: Path) -> list[Record]:
    """Records of a log; a last line that a kill cut short is left out. No log, no records.

    Raises:
        ProblemsError: kind `log.not_json`, naming the line.
    """
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        fix = "delete that line, or choose another output folder"
        try:
            record = json.loads(line, parse_constant=_refuse)
        except ValueError as error:
            raise problem_error(f"{path}, line {number}", "log.not_json", f"is not JSON: {error}", fix) from None
        if not _is_record(record):
            raise problem_error(f"{path}, line {number}", "log.not_json", "is no record of this kind and step", fix)
        records.append(record)
    return records


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no finite number")


def _is_record(record: object) -> bool:
    """Whether it has what is read of it later."""
    if not isinstance(record, dict) or type(record.get("step")) is not int or not isinstance(record.get("kind"), str):
        return False
    if record["kind"] == "samples":
        rows = record.get("samples")
        return isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
    return record["kind"] != "train" or isinstance(record.get("loss"), int | float)


def _kept(path: Path, resumed_step: int | None) -> list[Record]:
    """The records up to the checkpoint's step; none of a run that begins."""
    return [] if resumed_step is None else [record for record in read_log(path) if record["step"] <= resumed_step]


def _rewrite(path: Path, records: Sequence[Record]) -> None:
    write_text_atomic(path, "".join(_line(record) for record in records))


def _append(path: Path, record: Record) -> None:
    with explained_os_errors(path), path.open("a", encoding="utf-8") as file:
        file.write(_line(record))


def _line(record: Record) -> str:
    return json.dumps(record, allow_nan=False) + "\n"
