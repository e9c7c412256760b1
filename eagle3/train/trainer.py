"""The training loop: windows in the plan's order, logs, evaluations, checkpoints, exact resume.

The step counts the windows of the plan from 1; learning rate and sample order are functions of it alone. A window
without a loss term changes nothing, is logged and counted as skipped.
"""

from __future__ import annotations

import math
import sys
import uuid
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import asdict, replace
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from accelerate import Accelerator

from eagle3.config import TrainConfig
from eagle3.data.dealing import Window
from eagle3.data.loader import Ahead
from eagle3.draft.batch import DraftBatch
from eagle3.draft.cost import Cost
from eagle3.errors import problem_error, raise_problems
from eagle3.files import only_writer, refuse_url
from eagle3.progress import progress
from eagle3.provenance import provenance
from eagle3.train.balance import balance_notes
from eagle3.train.cards import peak_of
from eagle3.train.checkpoint import Best, TrainState, checkpoint_name, load_checkpoint
from eagle3.train.curves import Facts, check_tracking
from eagle3.train.disk_room import checkpoint_bytes, room_note
from eagle3.train.early_stopping import after_evaluation, reason_to_stop
from eagle3.train.engine import check_active, describe, make_accelerator, make_engine
from eagle3.train.engines.base import Engine
from eagle3.train.evaluation import evaluate
from eagle3.train.float8 import check_float8
from eagle3.train.meter import Meter
from eagle3.train.muon import check_muon
from eagle3.train.optim import learning_rate
from eagle3.train.pulse import own_store
from eagle3.train.result import TrainResult, read_result
from eagle3.train.run_folder import LOCK_FILE, find_resume_point, point_at_best, read_origin, write_run_files
from eagle3.train.sample_table import SampleTable
from eagle3.train.samples import order_of
from eagle3.train.saver import Saver
from eagle3.train.setup import Setup, make_setup
from eagle3.train.signals import StopRequest
from eagle3.train.tracking import Tracker
from eagle3.train.watch import COMPUTING, EVALUATING, READING, SAVING, WAITING, Watch
from eagle3.train.window import Totals, accumulate_window

_FAILED = 2.0**20
"""What a process that cannot save raises among the ranks; one that was asked to stop raises 1."""


def run_training(config: TrainConfig, signals: bool = True) -> TrainResult:
    """Trains a drafter, or goes on with the run that lies in `config.output`.

    Args:
        signals: SIGTERM, SIGINT or SIGUSR1 stops the run after a step, saved, if this is the main thread; handlers are
            put back when training ends.

    Raises:
        ProblemsError: anything about the launch, the dataset, the config or the run folder, before it is touched;
            a loss or gradient that is not finite (the samples of that step are named); a full disk.
    """
    refuse_url(config.output, "a run", "give a folder; datasets may lie at a URL")
    raise_problems(check_tracking(config.tracking) + check_muon(config.optim))
    accelerator = make_accelerator(config.mixed_precision)
    setup = make_setup(config, accelerator.num_processes)
    if config.ttt.float8:
        shape = setup.module.model.config
        raise_problems(check_float8(shape, config.mixed_precision, accelerator.device), "cannot train in float8")
    if config.early_stopping is not None and setup.samples.heldout is None:
        message, fix = "is given, and no sample is held out to go by", "give eval_dataset, or leave out early_stopping"
        raise problem_error("early_stopping", "train.early_stopping", message, fix)
    run = Path(config.output)
    checkpoint = find_resume_point(run, config, setup, accelerator.num_processes)
    size = checkpoint_bytes(setup.module.model, config.optim.kept)
    accelerator.wait_for_everyone()
    with only_writer(run, LOCK_FILE) if accelerator.is_main_process else nullcontext():
        trainer = Trainer(config, setup, accelerator, checkpoint)
        if accelerator.is_main_process:
            lines = [*describe(trainer.engine, accelerator), *setup.notes, *trainer.notes, *balance_notes(trainer.feed)]
            lines += filter(None, [room_note(run, config.keep_checkpoints, size)])
            lines.append(f"run: {run}" if checkpoint is None else f"run: {run}, resumed from {checkpoint.name}")
            print("\n".join(lines), file=sys.stderr)
        with trainer.stop.listening() if signals else nullcontext():
            result = trainer.train()
    del trainer  # DDP as the last to hold its process group waits, with the GIL, for a thread that may need it
    accelerator.free_memory()
    accelerator.end_training()
    return result


class Trainer:
    """One run from its start, or from a checkpoint, to its last step."""

    def __init__(
        self,
        config: TrainConfig,
        setup: Setup,
        accelerator: Accelerator,
        checkpoint: Path | None,
        engine: Engine | None = None,
    ) -> None:
        """Args:
        engine: default: the one that the accelerator was launched for.
        """
        self.config, self.accelerator, self.module = config, accelerator, setup.module
        self.run, self.samples = Path(config.output), setup.samples
        cost = Cost.of(setup.module.model.config, setup.module.ttt)
        self.feed = self.samples.train.feed(config, accelerator.num_processes, cost)
        self.epoch_ends = list(accumulate(self.feed.epoch_steps))
        self.total_steps = min(self.epoch_ends[-1], config.max_steps or self.epoch_ends[-1])
        self.head = setup.head.to(accelerator.device)
        self.engine = make_engine(accelerator, config.mixed_precision) if engine is None else engine
        self.state = self._prepare(checkpoint)
        raise_problems(check_active(self.engine))
        self.setup, self.resumed = setup, checkpoint is not None
        self.origin = read_origin(self.run) if self.resumed else {"run_id": uuid.uuid4().hex, **setup.origin}
        self.tracker: Tracker | None = None
        peak, self.notes = peak_of(config, accelerator.device)
        self.meter = Meter(self.feed, cost, self.engine, peak)
        self.watch = Watch(self.engine, config.tracking.stall_seconds, own_store())
        self.engine.waiting = partial(self.watch.doing, WAITING)
        self.table = SampleTable(config, self.samples.heldout if accelerator.is_main_process else None)
        self.notes += self.table.notes
        self.stop, self.stopping = StopRequest(), False
        self.saver = Saver(self.run, config.keep_checkpoints, self.engine.copies)

    def train(self) -> TrainResult:
        """Runs the steps that are left."""
        step, is_main = self.state.step, self.accelerator.is_main_process
        end = self.total_steps if self._ended is None else step
        with self.feed.opened(step, end, str(self.origin["run_id"]), is_main):
            self.tracker = self._open_run() if is_main else None
            if step < end:
                with self.watch, self.saver:
                    self._train()
        if self.tracker is not None:
            self._report(step < end)
        self.accelerator.wait_for_everyone()
        return read_result(self.run, self.state, is_main, self.stopping)

    def _report(self, trained: bool) -> None:
        assert self.tracker is not None
        lines = []
        if trained and self._ended is not None:
            lines.append(f"ended after step {self.state.step} of {self.total_steps}: {self._ended}")
        if self.stopping:
            self._log("stop", signal=self.stop.name)
            lines.append(self.stop.note(self.state.step, self.total_steps))
        self.tracker.close()
        if trained:
            lines += filter(None, [self.feed.note(*self.meter.in_all()), self.saver.note(), *self.tracker.lost])
        for line in lines:
            print(line, file=sys.stderr)

    def _train(self) -> None:
        tokens_left = sum(self.feed.tokens(window) for windows in self._epochs_left() for window in windows)
        if self.state.step == 0:
            self._evaluate()
        self.meter.begin()
        with progress("train", tokens_left, "tokens") as advance:
            for windows in self._epochs_left():
                with closing(self.feed.load(windows, self.accelerator.process_index, self.module.ttt)) as begun:
                    ahead = Ahead(begun)
                    for window in windows:
                        self.watch.step = self.state.step + 1
                        with self.watch.doing(READING), self.meter.waiting():
                            batches = ahead.take()
                        with self.watch.doing(COMPUTING):
                            note = self._step(window, batches, ahead)
                        advance(self.feed.tokens(window), f"step {self.state.step}/{self.total_steps} {note}")
                        self._evaluate_and_save()
                        if self.stopping or self._ended is not None:
                            return
                        self.meter.begin()

    def _epochs_left(self) -> Iterator[list[Window]]:
        step = self.state.step
        for epoch, end in enumerate(self.epoch_ends):
            if step < min(end, self.total_steps):
                begin = end - self.feed.epoch_steps[epoch]
                yield self.feed.epoch(epoch)[step - begin : self.total_steps - begin]
                step = end

    def _step(self, window: Window, batches: list[DraftBatch], ahead: Ahead) -> str:
        """Trains on one window, begins the next and logs this one; returns a note for the progress bar."""
        step, engine = self.state.step + 1, self.engine
        rate = learning_rate(step, self.total_steps, self.config.optim)
        if width := self.config.ttt.hidden_noise:
            batches = [batch.with_noise(width, self.config.seed, step) for batch in batches]
        totals = accumulate_window(engine.model, self.module, batches, self.head, engine, ahead.begin, self._flag)
        if totals.raised >= _FAILED:
            self._settle()
        self.stopping = totals.raised > 0 and step < self.total_steps
        skipped = not totals.in_vocab.any()
        norm = math.nan if skipped else self._update(rate, totals, window, step)
        self.meter.end(window, totals.active.tolist())
        self.state = replace(self.state, step=step, skipped=self.state.skipped + skipped)
        epoch = bisect_left(self.epoch_ends, step)
        if skipped:
            engine.clear()
            self._log("skip", epoch=epoch, samples=self.feed.ids(window))
            return "skipped"
        loss = totals.loss(self.config.ttt.decay)
        if step == 1 or step == self.total_steps or step % self.config.tracking.log_every == 0:
            speed = {**self.meter.take(), **self.saver.take()}
            self._log("train", epoch=epoch, loss=loss, lr=rate, grad_norm=norm, **totals.by_step(), **speed)
            if self.tracker is not None and (warning := self.meter.warning(speed)):
                print(warning, file=sys.stderr)
        return f"loss {loss:.4f}"

    def _update(self, rate: float, totals: Totals, window: Window, step: int) -> float:
        """Clips and steps; returns the gradient's norm before clipping."""
        self._check_finite("loss", totals.loss(self.config.ttt.decay), window, step)
        max_norm = self.config.optim.max_grad_norm
        return self.engine.update(rate, max_norm, lambda norm: self._check_finite("gradient norm", norm, window, step))

    def _check_finite(self, what: str, value: float, window: Window, step: int) -> None:
        if math.isfinite(value):
            return
        message = f"the {what} of step {step} is {value}; its samples are {', '.join(self.feed.ids(window))}"
        config = self.config
        rate = "optim.learning_rate" if config.optim.name == "adamw" else "the learning rates of optim"
        noise = f", or ttt.hidden_noise (it is {config.ttt.hidden_noise:g})" if config.ttt.hidden_noise else ""
        fix = f"look at these samples; if they are sound, lower {rate}{noise}"
        raise problem_error(str(self.run), "train.not_finite", message, fix)

    def _evaluate_and_save(self) -> None:
        step, last = self.state.step, self.state.step == self.total_steps
        improved = False
        if last or self._is_due(step, self.config.eval_every):
            improved = self._evaluate()
        if self._ended is not None and not last:
            last, self.stopping = True, False
            self._log("early_stop", reason=self._ended)
        due = last or self.stopping or self._is_due(step, self.config.save_every)
        if due or improved or self.feed.must_save(step):
            self._save()
            if last or self.stopping or self.feed.releases:
                self._settle()
            self.feed.saved(step, last, self.accelerator.is_main_process)

    @property
    def _ended(self) -> str | None:
        """Why no further step is taken before the last one, if so."""
        return reason_to_stop(self.state.plateau, self.config.early_stopping)

    def _is_due(self, step: int, every: int | None) -> bool:
        """Whether it is time for what happens every so many steps; by default at the end of an epoch."""
        return step % every == 0 if every else step in self.epoch_ends

    def _evaluate(self) -> bool:
        """Evaluates and logs; whether this is the best so far (step 0 has no checkpoint, so it never is)."""
        if self.samples.heldout is None:
            return False
        config, heldout = self.config, self.samples.heldout
        with self.watch.doing(EVALUATING), self.engine.whole():
            found = evaluate(self.module, self.head, heldout, config.heldout_rows, self.engine, config.eval_depths)
            rows = self.table.rows(self.module, self.engine)
        self._log("eval", **asdict(found))
        if self.tracker is not None:
            self.tracker.samples(self.state.step, rows)
        if config.early_stopping is not None and self.state.step:
            plateau = after_evaluation(self.state.plateau, found.acceptance_length, config.early_stopping)
            self.state = replace(self.state, plateau=plateau)
        best = Best(checkpoint_name(self.state.step), found.acceptance_length, found.loss)
        if self.state.step == 0 or (self.state.best is not None and best.rank <= self.state.best.rank):
            return False
        self.state = replace(self.state, best=best)
        return True

    def _save(self) -> None:
        if self.samples.heldout is None:
            self.state = replace(self.state, best=Best(checkpoint_name(self.state.step), None, None))
        with self.watch.doing(SAVING), self.saver.waiting():
            weights, moments = self.engine.weights(), self.engine.moments()
            if self.accelerator.is_main_process:
                self.saver.begin(weights, moments, self.state)

    def _flag(self) -> float:
        """What this process has to say to the others in a step."""
        return _FAILED * self.saver.failed + (self.stop.name is not None)

    def _settle(self) -> None:
        """Waits for the checkpoint being written, on every process; where that failed, all of them raise."""
        with self.watch.doing(SAVING), self.saver.waiting():
            error = self.saver.wait()
            failed = torch.tensor(float(error is not None), device=self.engine.device)
            failed = self.engine.reduce(failed, reduction="sum")
        if error is not None:
            raise error
        if failed:
            fix = "see what the main process says"
            raise problem_error(str(self.run), "train.not_saved", "the main process could not save a checkpoint", fix)

    def _prepare(self, folder: Path | None) -> TrainState:
        """Hands the drafter to the engine, as it begins or as a checkpoint has it."""
        if folder is None:
            self.engine.prepare(self.module, self.config.optim)
            order = order_of(self.config)
            return TrainState(0, 0, self.accelerator.num_processes, self.samples.digest, order=order)
        checkpoint = load_checkpoint(folder)
        self.module.model.load_trainable_state(checkpoint.weights)
        self.engine.prepare(self.module, self.config.optim)
        state = replace(checkpoint.state, processes=self.accelerator.num_processes)
        self.engine.load_moments(checkpoint.optimizer, state.step - state.skipped, folder)
        return state

    def _open_run(self) -> Tracker:
        """Writes the run's files and opens its log."""
        origin = self.origin
        start = {**provenance(), "step": self.state.step, "engine": describe(self.engine, self.accelerator)[0]}
        origin = {**origin, "starts": [*origin.get("starts", []), start]}
        write_run_files(self.run, self.config, self.setup, origin)
        point_at_best(self.run, self.state)
        resumed_step = self.state.step if self.resumed else None
        facts = Facts(self.config.model_dump(mode="json"), origin)
        return Tracker(self.run, self.config.tracking, origin["run_id"], resumed_step, facts)

    def _log(self, kind: str, **values: object) -> None:
        if self.tracker is not None:
            self.tracker.log(kind, self.state.step, **values)
