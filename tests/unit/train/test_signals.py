"""A signal ends a run after its step, saved; the run that goes on from there is the one that nobody stopped."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle3.config import TrainConfig, dump_config
from eagle3.data.ring_folder import read_reader
from eagle3.data.ring_windows import RingWindows
from eagle3.errors import EXIT_STOPPED
from eagle3.files import read_json
from eagle3.train import signals
from eagle3.train.checkpoint import list_checkpoints
from eagle3.train.signals import STOP_SIGNALS, StopRequest
from eagle3.train.tracking import TIMED, read_log
from eagle3.train.trainer import Trainer, run_training
from tests.rings import ring_config, ring_plan, ring_samples, write_ring
from tests.stores import train_config, write_random_store

ROOT = Path(__file__).parents[3]


def config_for(folder: Path, run: str, **values: object) -> TrainConfig:
    store = folder / "store"
    if not store.exists():
        write_random_store(store, [(8, (2, 8)), (9, (8, 9)), (12, (3, 12)), (7, (1, 7))] * 2)
    settings: dict[str, object] = {"epochs": 2, "save_every": 3, "eval_fraction": 0.2}
    return train_config(store, folder / run, **{**settings, **values})


def signal_at(patch: pytest.MonkeyPatch, numbers: dict[int, int]) -> None:
    """Raises signals in this process within steps: step -> signal."""
    original = Trainer._step

    def step(self: Trainer, *args: Any) -> str:
        if (number := numbers.get(self.state.step + 1)) is not None:
            signal.raise_signal(number)
        return original(self, *args)

    patch.setattr(Trainer, "_step", step)


def stopped_at(config: TrainConfig, numbers: dict[int, int]) -> int:
    """Trains until a signal stops it; returns the step."""
    with pytest.MonkeyPatch.context() as patch:
        signal_at(patch, numbers)
        result = run_training(config)
    assert result.stopped
    assert list_checkpoints(Path(config.output))[-1].name == f"step-{result.steps:08}"
    return result.steps


def log(run: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in record.items() if key not in TIMED} for record in read_log(run / "log.jsonl")]


def assert_same_end(run: Path, whole: Path) -> None:
    """Log, state, and bits and types of weights and moments; a stop's own checkpoints come on top."""
    assert log(run) == log(whole)
    mine, theirs = (list_checkpoints(path)[-1] for path in (run, whole))
    assert read_json(mine / "state.json", "state") == read_json(theirs / "state.json", "state")
    for name in ("draft.safetensors", "optimizer.safetensors"):
        assert (mine / name).read_bytes() == (theirs / name).read_bytes()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(signals, "time", clock)
    return clock


@pytest.fixture
def before() -> Any:
    """The signals that reached the handler of before."""
    reached: list[int] = []
    kept = {number: signal.signal(number, lambda number, frame: reached.append(number)) for number in STOP_SIGNALS}
    yield reached
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_noted_and_handlers_are_put_back(number: int, before: list[int]) -> None:
    stop = StopRequest()
    handler = signal.getsignal(number)
    with stop.listening():
        assert stop.name is None
        signal.raise_signal(number)
    assert stop.name == signal.Signals(number).name and not before
    assert signal.getsignal(number) is handler
    signal.raise_signal(number)
    assert before == [number]


def test_a_request_that_comes_twice_is_one_and_a_later_one_does_what_it_did_before(
    clock: SimpleNamespace, before: list[int]
) -> None:
    stop = StopRequest()
    with stop.listening():
        signal.raise_signal(signal.SIGINT)
        clock.now += 4.9
        signal.raise_signal(signal.SIGTERM)
        assert not before
        clock.now += 0.2
        signal.raise_signal(signal.SIGTERM)
        assert before == [signal.SIGTERM]
    assert stop.name == "SIGINT"


def test_ignored_signals_and_other_threads_are_left_alone(before: list[int]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    with StopRequest().listening():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is not handlers[signal.SIGTERM]
    found: list[bool] = []

    def elsewhere() -> None:
        with StopRequest().listening():
            found.append({number: signal.getsignal(number) for number in STOP_SIGNALS} == handlers)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [True]


def test_a_caller_may_keep_its_own_handlers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: list[int]) -> None:
    signal_at(monkeypatch, {2: signal.SIGTERM})
    assert not run_training(config_for(tmp_path, "run", epochs=1), signals=False).stopped
    assert before == [signal.SIGTERM]


def test_a_run_that_is_stopped_again_and_again_is_the_one_that_nobody_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    config = config_for(tmp_path, "run", epochs=3)
    for step, number in ((2, signal.SIGTERM), (3, signal.SIGINT), (8, signal.SIGUSR1)):
        assert stopped_at(config, {step: number}) == step
        record = log(tmp_path / "run")[-1]
        assert record == {"kind": "stop", "step": step, "signal": signal.Signals(number).name}
        assert f"stopped by {signal.Signals(number).name} after step {step} of 18" in capsys.readouterr().err
    assert {number: signal.getsignal(number) for number in STOP_SIGNALS} == handlers
    result = run_training(config)
    assert not result.stopped and "stopped" not in result.render().splitlines()[0]
    run_training(config_for(tmp_path, "whole", epochs=3))
    assert_same_end(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize(
    "settings",
    [
        {"mixed_precision": "no"},
        {"mixed_precision": "bf16"},
        {"mixed_precision": "bf16", "optim": {"learning_rate": 1e-2, "moments": "float8"}},
    ],
)
def test_fault_15_weights_and_moments_keep_type_and_bits_through_five_resumes_as_through_one(
    tmp_path: Path, settings: dict[str, object]
) -> None:
    settings = {**settings, "draft": {"intermediate_size": 300, "init": "random"}, "eval_fraction": 0.0}
    for run, stops in {"once": [5], "five": [1, 2, 4, 7, 9], "whole": []}.items():
        config = config_for(tmp_path, run, **settings)
        for step in stops:
            assert stopped_at(config, {step: signal.SIGTERM}) == step
        run_training(config)
        starts = read_json(tmp_path / run / "provenance.json", "provenance")["starts"]
        assert [start["step"] for start in starts] == [0, *stops]
    for run in ("once", "five"):
        assert_same_end(tmp_path / run, tmp_path / "whole")
    newest = list_checkpoints(tmp_path / "five")[-1]
    assert {value.dtype for value in load_file(newest / "draft.safetensors").values()} == {torch.float32}
    moments = {str(value.dtype) for value in load_file(newest / "optimizer.safetensors").values()}
    assert moments == {"torch.float32"} | ({"torch.float8_e4m3fn"} if "optim" in settings else set())


def test_a_signal_in_the_last_step_ends_nothing_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_for(tmp_path, "run", epochs=1)
    signal_at(monkeypatch, {6: signal.SIGTERM})
    result = run_training(config)
    assert (result.steps, result.stopped) == (6, False)
    assert read_log(tmp_path / "run" / "log.jsonl")[-1]["kind"] == "eval"


def test_a_stop_during_a_window_without_a_term_is_taken_too(tmp_path: Path) -> None:
    store = write_random_store(tmp_path / "terms", [(8, (7, 8)), (8, (2, 8)), (8, (2, 8))])
    runs = [train_config(store, tmp_path / run, epochs=2) for run in ("run", "whole")]
    run_training(runs[1])
    skipped = next(record["step"] for record in log(tmp_path / "whole") if record["kind"] == "skip")
    assert stopped_at(runs[0], {skipped: signal.SIGTERM}) == skipped
    run_training(runs[0])
    assert_same_end(tmp_path / "run", tmp_path / "whole")


def test_a_ring_s_shards_are_released_up_to_the_checkpoint_of_the_stop(tmp_path: Path) -> None:
    samples = ring_samples()
    plan = ring_plan(samples, shards=99)
    write_ring(tmp_path / "ring", plan, samples)
    config = ring_config(tmp_path / "ring", tmp_path / "run", batch_size=2)
    assert stopped_at(config, {5: signal.SIGTERM}) == 5
    found = read_reader(tmp_path / "ring", len(plan.shards))
    assert (found.released, found.finished) == (RingWindows(plan, 16, batch_size=2).first_needed(5), False)
    assert 0 < found.released < len(plan.shards)
    assert not run_training(config).stopped
    assert read_reader(tmp_path / "ring", len(plan.shards)).finished
    write_ring(tmp_path / "other", plan, samples)
    run_training(ring_config(tmp_path / "other", tmp_path / "whole", batch_size=2))
    assert_same_end(tmp_path / "run", tmp_path / "whole")


def command_line(config: TrainConfig, folder: Path, before: str) -> subprocess.Popen[bytes]:
    """`eagle3 train` in a process, after some code."""
    (folder / "config.yaml").write_text(dump_config(config))
    code = (
        "import os, signal, sys, threading, torch\n"
        "from eagle3.train import saver, signals\n"
        "from eagle3.train.trainer import Trainer\n"
        f"{before}\n"
        "from eagle3.cli import main\n"
        "main(['train', '--config', sys.argv[1]])\n"
    )
    command = [sys.executable, "-c", code, str(folder / "config.yaml")]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


AT_STEP_4 = (
    "original = Trainer._step\n"
    "def step(self, *args):\n"
    "    if self.state.step == 3: os.kill(os.getpid(), signal.SIGTERM)\n"
    "    return original(self, *args)\n"
    "Trainer._step = step\n"
)


def test_the_command_ends_with_75_and_then_with_0(tmp_path: Path) -> None:
    config = config_for(tmp_path, "run")
    child = command_line(config, tmp_path, AT_STEP_4)
    said = child.communicate(timeout=120)[1].decode()
    assert child.returncode == EXIT_STOPPED == 75, said
    assert "SIGTERM: stopping after this step" in said
    assert "stopped by SIGTERM after step 4 of 12, which is saved: the same command goes on from there" in said
    child = command_line(config, tmp_path, "")
    assert child.communicate(timeout=120) and child.returncode == 0
    run_training(config_for(tmp_path, "whole"))
    assert_same_end(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize(("number", "code"), [("SIGTERM", -signal.SIGTERM), ("SIGINT", 130)])
def test_a_second_signal_stops_at_once_while_a_checkpoint_is_written_and_harms_nothing(
    tmp_path: Path, number: str, code: int
) -> None:
    """The writer of the stop's checkpoint sends it, half done, and would never come back."""
    stuck = (
        "signals.SAME_SECONDS = 0\n"
        "from eagle3.train import checkpoint\n"
        "save = checkpoint.save_tensors\n"
        "def save_tensors(tensors, path):\n"
        "    save(tensors, path)\n"
        "    if 'step-00000004' in str(path):\n"
        f"        os.kill(os.getpid(), signal.{number})\n"
        "        threading.Event().wait()\n"
        "checkpoint.save_tensors = save_tensors\n"
    )
    config = config_for(tmp_path, "run")
    child = command_line(config, tmp_path, AT_STEP_4 + stuck)
    said = child.communicate(timeout=120)[1].decode()
    assert child.returncode == code, said
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step-00000003"]
    run_training(config)
    run_training(config_for(tmp_path, "whole"))
    assert_same_end(tmp_path / "run", tmp_path / "whole")
    assert not list((tmp_path / "run" / "checkpoints").glob("*.tmp"))
