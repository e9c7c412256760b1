"""How a run ended, read from its log."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from eagle3.train.checkpoint import TrainState, checkpoint_name, checkpoints_folder
from eagle3.train.curves import Record
from eagle3.train.tracking import LOG_FILE, read_log


@dataclass(frozen=True)
class TrainResult:
    """How a run ended; NaN where there is no number.

    Attributes:
        run: the run folder.
        steps: steps of the schedule done, `skipped` ones included.
        skipped: steps without a loss term, which changed nothing.
        first_loss, last_loss: training loss of the first and last step that were logged.
        step_accuracy: at each TTT step, on the held-out samples (on the last logged step where there are none).
        acceptance_length_before, acceptance_length: on the held-out samples, before and after training.
        best_checkpoint: the best one's folder; the last one where nothing is held out.
        is_main_process: whether this rank should report.
        stopped: a signal ended it before its last step; its last checkpoint is that of `steps`.
        early_stop: why it ended before its last step by itself, if it did.
    """

    run: Path
    steps: int
    skipped: int
    first_loss: float
    last_loss: float
    step_accuracy: list[float]
    acceptance_length_before: float
    acceptance_length: float
    best_checkpoint: Path
    is_main_process: bool
    stopped: bool = False
    early_stop: str | None = None

    def render(self) -> str:
        """The same as text for people."""
        accuracy = ", ".join(f"{value:.1%}" for value in self.step_accuracy)
        lengths = f", before and after: {self.acceptance_length_before:.3f}, {self.acceptance_length:.3f}"
        if math.isnan(self.acceptance_length):
            lengths = ": not measured, nothing was held out or no answer is longer than one token"
        stopped = ", stopped by a signal: the same command goes on from there" if self.stopped else ""
        lines = [
            f"{self.steps} steps ({self.skipped} skipped: no loss term in them){stopped}",
            *([] if self.early_stop is None else [f"ended early: {self.early_stop}"]),
            f"loss, first and last: {self.first_loss:.4f}, {self.last_loss:.4f}",
            f"step accuracy: {accuracy}",
            f"acceptance length{lengths}",
            f"best checkpoint: {self.best_checkpoint}",
        ]
        return "\n".join(lines)


def read_result(run: Path, state: TrainState, is_main_process: bool, stopped: bool = False) -> TrainResult:
    """The result of the run that ended in `state`."""
    best = state.best.checkpoint if state.best is not None else checkpoint_name(state.step)
    records = read_log(run / LOG_FILE)
    losses = _numbers(records, "train", "loss")
    lengths = _numbers(records, "eval", "acceptance_length")
    accuracies = [record["step_accuracy"] for record in records if "step_accuracy" in record]
    return TrainResult(
        run=run,
        steps=state.step,
        skipped=state.skipped,
        first_loss=losses[0],
        last_loss=losses[-1],
        step_accuracy=[_number(value) for value in accuracies[-1]] if accuracies else [],
        acceptance_length_before=lengths[0],
        acceptance_length=lengths[-1],
        best_checkpoint=checkpoints_folder(run) / best,
        is_main_process=is_main_process,
        stopped=stopped,
        early_stop=next((record["reason"] for record in records[-1:] if record["kind"] == "early_stop"), None),
    )


def _numbers(records: Iterable[Record], kind: str, name: str) -> list[float]:
    """A metric in log order; at least one value."""
    return [_number(record[name]) for record in records if record["kind"] == kind] or [math.nan]


def _number(value: float | None) -> float:
    return math.nan if value is None else value
