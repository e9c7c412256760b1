"""Where metrics go: `log.jsonl` always, Weights & Biases if asked for.

A line is one JSON object with `kind`: `train` (a step), `skip` (a step without a loss term), `eval` (held-out
samples; step 0 is before training), `early_stop` (why the run ended before its last step) or `stop` (a signal). On
resume the lines after the checkpoint's step are dropped, and that of the stop, so that the log of a resumed run reads
like an uninterrupted one's.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from eagle3.config import TrackingSection
from eagle3.errors import Problem, problem_error
from eagle3.files import explained_os_errors, write_text_atomic

LOG_FILE = "log.jsonl"

Record = dict[str, Any]


def check_tracking(tracking: TrackingSection) -> list[Problem]:
    """Finds a tracker that is asked for and not installed."""
    if tracking.wandb == "off" or importlib.util.find_spec("wandb") is not None:
        return []
    fix = "pip install 'eagle3[wandb]', or set tracking.wandb=off"
    return [Problem("tracking.wandb", "tracking.wandb_missing", "wandb is not installed", fix)]


class Tracker:
    """Writes the records of one run; only the main process has one.

    Attributes:
        records: every record so far, those of before a resume included.
    """

    def __init__(self, run: Path, tracking: TrackingSection, run_id: str, resumed_step: int | None) -> None:
        self.path = run / LOG_FILE
        before = [] if resumed_step is None else [r for r in read_log(self.path) if r["step"] <= resumed_step]
        self.records = [record for record in before if record["kind"] != "stop"]
        write_text_atomic(self.path, "".join(_line(record) for record in self.records))
        self._wandb = None if tracking.wandb == "off" else _start_wandb(run, tracking, run_id)

    def log(self, kind: str, step: int, **values: Any) -> None:
        """Appends a record and flushes it."""
        record = {"kind": kind, "step": step, **values}
        self.records.append(record)
        with explained_os_errors(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(_line(record))
        if self._wandb is not None:
            self._wandb.log(_flat(kind, values), step=step)

    def close(self) -> None:
        if self._wandb is not None:
            self._wandb.finish()


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
            record = json.loads(line)
        except ValueError as error:
            raise problem_error(f"{path}, line {number}", "log.not_json", f"is not JSON: {error}", fix) from None
        if not isinstance(record, dict) or type(record.get("step")) is not int or "kind" not in record:
            raise problem_error(f"{path}, line {number}", "log.not_json", "is no record of kind and step", fix)
        records.append(record)
    return records


def _line(record: Record) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


def _flat(kind: str, values: Record) -> Record:
    """Wandb's names: `train/loss`, and one scalar a TTT step for lists of numbers, or a key."""
    flat: Record = {}
    for name, value in values.items():
        if isinstance(value, list):
            flat |= {f"{kind}/{name}_{i}": item for i, item in enumerate(value) if not isinstance(item, str)}
        elif isinstance(value, dict):
            flat |= {f"{kind}/{name}/{key}": item for key, item in value.items()}
        else:
            flat[f"{kind}/{name}"] = value
    return flat


def _start_wandb(run: Path, tracking: TrackingSection, run_id: str) -> Any:
    import wandb

    assert tracking.wandb != "off"
    try:
        return wandb.init(
            project=tracking.project,
            name=tracking.run_name or run.name,
            mode=tracking.wandb,
            dir=str(run),
            id=run_id,
            resume="allow",
        )
    except wandb.Error as error:
        fix = "log in with `wandb login`, or set tracking.wandb=offline"
        raise problem_error("tracking.wandb", "tracking.wandb_refused", f"Weights & Biases: {error}", fix) from error
