"""Curves in the real files of TensorBoard and Weights & Biases (offline), across a kill; and trackers that fail."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import PartialState

from eagle3.config import TrackingSection, TrainConfig, dump_config
from eagle3.errors import ProblemsError
from eagle3.train.checkpoint import list_checkpoints
from eagle3.train.curves import Facts, TensorBoardCurves, check_tracking, open_curves
from eagle3.train.tracking import Record, Tracker, read_log
from eagle3.train.trainer import run_training
from tests.disks import small_disk
from tests.stores import train_config, write_random_store
from tests.wandb_files import wandb_config, wandb_history, wandb_metrics

ROOT = Path(__file__).parents[3]
KILLED_AFTER = 7
DYING = f"""
import os, signal, sys
from pathlib import Path
import torch
from eagle3.config import TrainConfig, load_config
from eagle3.train.trainer import Trainer, run_training
torch.set_num_threads(1)
go_on = Trainer._evaluate_and_save
def die(self):
    if self.state.step == {KILLED_AFTER}:
        os.kill(os.getpid(), signal.SIGKILL)
    go_on(self)
Trainer._evaluate_and_save = die
run_training(load_config(TrainConfig, Path(sys.argv[1])))
"""


def config_for(folder: Path, **tracking: object) -> TrainConfig:
    values: dict[str, object] = {"epochs": 2, "save_every": 5, "eval_every": 3, "eval_fraction": 0.2}
    return train_config(folder / "store", folder / "run", **values, tracking={"log_every": 1, "samples": 2, **tracking})


def events(run: Path, **options: Any) -> Any:
    """What TensorBoard reads of a run, or of one event file."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run), size_guidance={"scalars": 0, "tensors": 0}, **options)
    return found.Reload()


def scalars(found: Any, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in found.Scalars(tag)]


def values(records: list[Record], kind: str, name: str) -> list[tuple[int, float]]:
    return [(record["step"], record[name]) for record in records if record["kind"] == kind]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a run that was killed two steps behind its checkpoint of step 5, and gone on with."""
    pytest.importorskip("wandb")
    pytest.importorskip("tensorboard")
    folder = tmp_path_factory.mktemp("curves")
    write_random_store(folder / "store", [(8, (2, 8)), (9, (8, 9)), (12, (3, 12)), (7, (1, 7))] * 2)
    config = config_for(folder, wandb="offline", tensorboard=True)
    (folder / "config.yaml").write_text(dump_config(config))
    # Without the service of another test's run: it would outlive the kill, and hold the run's id.
    others = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    environment = {**others, "OMP_NUM_THREADS": "1", "HOME": str(folder / "home")}
    command = [sys.executable, "-c", DYING, str(folder / "config.yaml")]
    child = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=120)
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()
    assert list_checkpoints(folder / "run")[-1].name == "step-00000005"
    assert read_log(folder / "run" / "log.jsonl")[-1]["step"] == KILLED_AFTER
    (events_of_first,) = (folder / "run" / "tensorboard").iterdir()
    shutil.copy(events_of_first, folder / events_of_first.name)
    run_training(config)
    return folder


def test_tensorboards_curves_go_on_and_have_no_step_twice(folder: Path) -> None:
    run = folder / "run"
    records, (first,) = read_log(run / "log.jsonl"), folder.glob("events.*")
    found = events(run / "tensorboard")
    assert scalars(events(first), "train/loss")[-1][0] == KILLED_AFTER, "else no step is taken twice"
    for kind, name in (("train", "loss"), ("train", "tokens_per_second"), ("train", "grad_norm"), ("eval", "loss")):
        assert scalars(found, f"{kind}/{name}") == [
            (step, pytest.approx(value, rel=1e-6)) for step, value in values(records, kind, name)
        ]
    lists = {f"train/{name}_{place}" for name in ("step_accuracy", "step_loss", "in_vocab") for place in range(3)}
    assert lists <= set(found.Tags()["scalars"])
    times = [record["time"] for record in records if record["kind"] == "train"]
    assert [event.wall_time for event in found.Scalars("train/loss")] == pytest.approx(times, abs=1e-3)
    shown = found.Tensors("samples/text_summary")
    assert [event.step for event in shown] == [record["step"] for record in records if record["kind"] == "eval"]
    assert b"tokens a round" in shown[0].tensor_proto.string_val[0]
    assert b'"learning_rate": 0.01' in found.Tensors("config/text_summary")[0].tensor_proto.string_val[0]


def test_wandbs_newest_folder_has_the_whole_run_once(folder: Path) -> None:
    run = folder / "run"
    records = read_log(run / "log.jsonl")
    starts = sorted((run / "wandb").glob("offline-run-*"))
    assert len(starts) == 2 and len({start.name.rsplit("-")[-1] for start in starts}) == 1
    assert (run / "wandb" / "latest-run").resolve() == starts[1]
    history = wandb_history(starts[1])
    for kind, name in (("train", "loss"), ("train", "data_wait"), ("eval", "loss")):
        assert [(item["step"], item[f"{kind}/{name}"]) for item in history if f"{kind}/{name}" in item] == values(
            records, kind, name
        )
    tables = [item["step"] for item in history if "samples/table/path" in item]
    assert tables == [record["step"] for record in records if record["kind"] == "eval"]
    assert wandb_metrics(starts[1]) == {"step": "", "*": "step"}
    config = wandb_config(starts[1])
    assert config["optim"]["learning_rate"] == 0.01 and len(config["provenance"]["starts"]) == 2


def test_a_tensorboard_that_is_at_work_drops_what_it_had_of_before(folder: Path, tmp_path: Path) -> None:
    (first,), (second,) = folder.glob("events.*"), (folder / "run" / "tensorboard").iterdir()
    for number, path in enumerate((first, second)):
        shutil.copy(path, tmp_path / f"events.out.tfevents.{number}")
    assert scalars(events(tmp_path), "train/loss") == scalars(events(second), "train/loss")


def test_trackers_write_into_the_run_folder_only(folder: Path) -> None:
    elsewhere = [path for path in folder.rglob("*") if path.is_file() and (folder / "run") not in path.parents]
    names = {str(path.relative_to(folder)) for path in elsewhere if (folder / "store") not in path.parents}
    assert {name for name in names if not name.startswith("events.")} == {"config.yaml"}
    assert not {"WANDB_DATA_DIR", "WANDB_CACHE_DIR"} & set(os.environ)


def test_a_tracker_that_is_switched_on_later_gets_the_steps_of_before(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    PartialState(cpu=True)
    for step in (1, 2, 3):
        Tracker(tmp_path, TrackingSection(), "id", step - 1 or None).log("train", step, loss=1 / step)
    tracker = Tracker(tmp_path, TrackingSection(tensorboard=True), "id", 2)
    tracker.log("train", 3, loss=0.5)
    tracker.close()
    assert scalars(events(tmp_path / "tensorboard"), "train/loss") == [(1, 1.0), (2, 0.5), (3, 0.5)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's writer
def test_a_full_disk_under_tensorboard_costs_its_curves_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    PartialState(cpu=True)
    with small_disk(tmp_path / "tensorboard", "32k"):
        tracker = Tracker(tmp_path, TrackingSection(tensorboard=True), "id", None)
        for step in range(1, 1001):
            tracker.log("train", step, loss=1.0, step_accuracy=[0.5, 0.25])
        tracker.close()
    assert [record["step"] for record in read_log(tmp_path / "log.jsonl")] == list(range(1, 1001))
    assert len(tracker.lost) == 1
    said = capsys.readouterr().err
    assert said.count("warning: TensorBoard failed and gets nothing more until the next start") == 1
    assert "No space left on device" in said


class FakeRun:
    """A run of Weights & Biases whose server has some steps already."""

    def __init__(self, summary: dict[str, int], lasts: int = 1000) -> None:
        self.summary, self.lasts, self.settings = summary, lasts, SimpleNamespace(sync_dir="DIR")
        self.sent: list[dict[str, Any]] = []

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        assert step is None, "steps of Weights & Biases' own may not go back"
        if len(self.sent) >= self.lasts:
            raise ConnectionError("the service is gone")
        self.sent.append(values)

    def define_metric(self, *_: object, **__: object) -> None:
        pass

    def finish(self) -> None:
        if self.lasts < 1000:
            raise TimeoutError("Timed out finishing run.")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    PartialState(cpu=True)
    module = SimpleNamespace(
        __spec__=object(), Error=RuntimeError, config=SimpleNamespace(update=lambda *_, **__: None), Table=dict
    )
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_online_only_what_the_server_lacks_is_sent(tmp_path: Path, fake: Any) -> None:
    before = Tracker(tmp_path, TrackingSection(), "id", None)
    before.log("eval", 0, loss=9.0)
    for step in (1, 2, 3, 4, 5):
        before.log("train", step, loss=float(step))
    before.log("eval", 5, loss=5.5)
    run = FakeRun({"train/step": 4, "eval/step": 0})
    asked: dict[str, Any] = {}
    fake.init = lambda **options: asked.update(options) or run
    tracker = Tracker(tmp_path, TrackingSection(wandb="online"), "id", 3)
    for step in (4, 5):
        tracker.log("train", step, loss=float(step))
    tracker.log("eval", 5, loss=5.5)
    sent = [{key: value for key, value in item.items() if key != "step"} for item in run.sent]
    assert sent == [{"train/step": 5, "train/loss": 5.0}, {"eval/step": 5, "eval/loss": 5.5}]
    assert [item["step"] for item in run.sent] == [5, 5]
    assert (asked["id"], asked["resume"], asked["settings"]["finish_timeout"]) == ("id", "allow", 60)


def test_training_goes_on_without_a_tracker_that_fails(
    tmp_path: Path, fake: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    write_random_store(tmp_path / "store", count=4)
    run = FakeRun({}, lasts=2)
    fake.init = lambda **_: run
    result = run_training(config_for(tmp_path, wandb="online"))
    assert result.steps == 6 and len(read_log(tmp_path / "run" / "log.jsonl")) == 6 + 3
    assert len(run.sent) == 2
    said = capsys.readouterr().err
    assert said.count("warning: Weights & Biases failed") == 2, "when it happens, and at the end"
    assert "ConnectionError: the service is gone" in said


def test_an_upload_that_takes_too_long_says_how_to_send_the_rest(tmp_path: Path, fake: Any) -> None:
    fake.init = lambda **_: FakeRun({}, lasts=1)
    tracker = Tracker(tmp_path, TrackingSection(wandb="online"), "id", None)
    tracker.close()
    assert "`wandb sync DIR` sends the rest" in tracker.lost[0]


def test_an_event_folder_that_cannot_be_made_is_a_problem(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    PartialState(cpu=True)
    (tmp_path / "tensorboard").write_text("in the way")
    with pytest.raises(ValueError, match=r"disk\.not_a_folder"):
        TensorBoardCurves(tmp_path, Facts())


def test_every_tracker_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = check_tracking(TrackingSection(wandb="offline", tensorboard=True))
    assert [problem.kind for problem in found] == ["tracking.wandb_missing", "tracking.tensorboard_missing"]
    assert "pip install 'eagle3[tensorboard]'" in found[1].fix


def test_a_run_of_before_goes_on(tmp_path: Path) -> None:
    """Its records have no time, its config no such keys, and its folder no samples."""
    pytest.importorskip("tensorboard")
    PartialState(cpu=True)
    (tmp_path / "log.jsonl").write_text('{"kind": "train", "step": 1, "loss": 2.0}\n{"kind": "stop", "step": 1}\n')
    tracker = Tracker(tmp_path, TrackingSection(tensorboard=True), "id", 1)
    tracker.log("train", 2, loss=1.0)
    tracker.close()
    assert tracker.lost == []
    assert scalars(events(tmp_path / "tensorboard"), "train/loss") == [(1, 2.0), (2, 1.0)]


def test_whatever_weights_and_biases_raises_at_a_start_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")

    def refuse(_: object) -> None:
        raise RuntimeError("run ID is in use")

    monkeypatch.setattr("accelerate.tracking.WandBTracker.start", refuse)
    with pytest.raises(ProblemsError, match=r"tracking\.wandb_refused.*run ID is in use"):
        open_curves(tmp_path, TrackingSection(wandb="offline"), "id", Facts())
