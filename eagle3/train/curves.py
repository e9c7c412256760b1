"""Where a run's log is drawn: Weights & Biases and TensorBoard, through Accelerate's trackers.

Each start hands on the log from its beginning, as far as the tracker lacks it (docs/watching.md): so curves go on after
a resume, whatever a kill lost, and a step is not in them twice.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from accelerate.tracking import TensorBoardTracker, WandBTracker

from eagle3.config import TrackingSection
from eagle3.errors import Problem, problem_error
from eagle3.files import explained_os_errors
from eagle3.train.sample_table import COLUMNS, Row, columns, render

Record = dict[str, Any]

KINDS = ("train", "skip", "eval")
"""Records that are drawn."""
FINISH_SECONDS = 60.0
"""How long the end of a run waits for Weights & Biases to take what is left; the rest is on disk."""
TENSORBOARD_FOLDER = "tensorboard"
_WANDB_FOLDERS = ("WANDB_DATA_DIR", "WANDB_CACHE_DIR")
"""Where it would write outside of its `dir`."""


@dataclass(frozen=True)
class Facts:
    """What a tracker shows of a run besides its records: JSON values."""

    config: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)


class Curves(Protocol):
    """One tracker of one run."""

    name: str

    def record(self, record: Record) -> None:
        """Draws a record of the log."""
        ...

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        """Shows the sample table of an evaluation."""
        ...

    def close(self) -> None:
        """Hands on what is left."""
        ...


def check_tracking(tracking: TrackingSection) -> list[Problem]:
    """Finds trackers that are asked for and not installed."""
    asked = {"wandb": tracking.wandb != "off", "tensorboard": tracking.tensorboard}
    off = {"wandb": "tracking.wandb=off", "tensorboard": "tracking.tensorboard=false"}
    return [
        Problem(
            f"tracking.{name}",
            f"tracking.{name}_missing",
            f"{name} is not installed",
            f"pip install 'eagle3[{name}]', or set {off[name]}",
        )
        for name, wanted in asked.items()
        if wanted and importlib.util.find_spec(name) is None
    ]


def open_curves(run: Path, tracking: TrackingSection, run_id: str, facts: Facts) -> list[Curves]:
    """Every tracker that the config asks for.

    Raises:
        ProblemsError: kinds `tracking.wandb_refused`, `disk.*`.
    """
    found: list[Curves] = []
    if tracking.tensorboard:
        found.append(TensorBoardCurves(run, facts))
    if tracking.wandb != "off":
        found.append(WandbCurves(run, tracking, run_id, facts))
    return found


class WandbCurves:
    """See `Curves`. Records carry their step as a metric of its own, over which all others are drawn."""

    name = "Weights & Biases"

    def __init__(self, run: Path, tracking: TrackingSection, run_id: str, facts: Facts) -> None:
        assert tracking.wandb != "off"
        online = tracking.wandb == "online"
        self._environment = {key: str(run.absolute() / "wandb") for key in _WANDB_FOLDERS if key not in os.environ}
        os.environ.update(self._environment)
        self._tracker = WandBTracker(
            tracking.project,
            name=tracking.run_name or run.name,
            mode=tracking.wandb,
            dir=str(run),
            id=run_id,
            resume="allow" if online else None,
            settings={"finish_timeout": FINISH_SECONDS, "finish_timeout_raises": True},
        )
        try:
            self._tracker.start()
        except Exception as error:  # its service's errors are no wandb.Error
            self._give_back()
            if isinstance(error, OSError):
                raise
            way = "log in with `wandb login`, or set tracking.wandb=offline" if online else "set tracking.wandb=off"
            fix = f"correct what it names, or {way}"
            raise problem_error(
                "tracking.wandb", "tracking.wandb_refused", f"Weights & Biases: {error}", fix
            ) from error
        self._folder = str(getattr(self._tracker.run.settings, "sync_dir", run / "wandb"))
        self._known = {kind: self._known_step(kind) if online else -1 for kind in (*KINDS, "samples")}
        self._tracker.run.define_metric("step", hidden=True)
        self._tracker.run.define_metric("*", step_metric="step")
        self._tracker.store_init_configuration({**facts.config, "provenance": facts.provenance})

    def record(self, record: Record) -> None:
        self._log(record["kind"], record["step"], flat(record))

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        import wandb

        if step > self._known["samples"]:
            self._log("samples", step, {"samples/table": wandb.Table(columns=[*COLUMNS], data=columns(step, rows))})

    def close(self) -> None:
        try:
            self._tracker.finish()
        except TimeoutError as error:
            message = f"it did not take all within {FINISH_SECONDS:.0f} s; `wandb sync {self._folder}` sends the rest"
            raise TimeoutError(message) from error
        finally:
            self._give_back()

    def _known_step(self, kind: str) -> int:
        """The last step of this kind that the server has: it takes them in order."""
        step = self._tracker.run.summary.get(f"{kind}/step")
        return -1 if step is None else int(step)

    def _log(self, kind: str, step: int, values: dict[str, Any]) -> None:
        if step > self._known[kind]:
            self._tracker.log({"step": step, f"{kind}/step": step, **values})

    def _give_back(self) -> None:
        for key, value in self._environment.items():
            if os.environ.get(key) == value:
                del os.environ[key]


class TensorBoardCurves:
    """See `Curves`. The event file of an earlier start goes, for the new one has all that it had of this run; a
    TensorBoard that has read it already is told that nothing of it counts, from step 0 on."""

    name = "TensorBoard"

    def __init__(self, run: Path, facts: Facts) -> None:
        self._tracker = TensorBoardTracker(TENSORBOARD_FOLDER, run, purge_step=0)
        with explained_os_errors(run / TENSORBOARD_FOLDER):
            for path in (run / TENSORBOARD_FOLDER).glob("events.out.tfevents.*"):
                path.unlink()
            self._tracker.start()
            self._tracker.log({name: _text(values) for name, values in vars(facts).items()}, step=0)

    def record(self, record: Record) -> None:
        values = {name: value for name, value in flat(record).items() if isinstance(value, int | float)}
        self._tracker.log(values, step=record["step"], walltime=record.get("time"))

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        self._tracker.log({"samples": render(step, rows)}, step=step)

    def close(self) -> None:
        self._tracker.finish()


def flat(record: Record) -> Record:
    """A record's numbers by name, `train/loss`, one a TTT step for lists, `train/step_accuracy_0`, and one a key:
    `eval/acceptance_by_source/chat`."""
    kind, found = record["kind"], Record()
    for name, value in record.items():
        if isinstance(value, list):
            found |= {f"{kind}/{name}_{place}": item for place, item in enumerate(value)}
        elif isinstance(value, dict):
            found |= {f"{kind}/{name}/{key}": item for key, item in value.items()}
        elif name not in ("kind", "step", "time"):
            found[f"{kind}/{name}"] = value
    return {name: value for name, value in found.items() if not isinstance(value, str)}


def _text(values: dict[str, Any]) -> str:
    """JSON as Markdown that leaves it alone."""
    return "".join(f"    {line}\n" for line in json.dumps(values, indent=2, ensure_ascii=False).splitlines())
