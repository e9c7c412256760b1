"""Checkpoints that are written beside the training: each is that of its step, and the one before stays until then."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.config import TrainConfig
from eagle3.errors import ProblemsError
from eagle3.files import read_json
from eagle3.train import checkpoint, disk_room, saver
from eagle3.train.checkpoint import Best, TrainState, list_checkpoints, load_checkpoint
from eagle3.train.disk_room import checkpoint_bytes, room_note
from eagle3.train.saver import Saver
from eagle3.train.setup import make_setup
from eagle3.train.tracking import read_log
from eagle3.train.trainer import Trainer, run_training
from tests.disks import small_disk
from tests.stores import train_config, write_random_store

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3)}


def config_for(folder: Path, run: str, **values: object) -> TrainConfig:
    if not (folder / "store").exists():
        write_random_store(folder / "store", count=6)
    settings: dict[str, object] = {"epochs": 2, "save_every": 2, "keep_checkpoints": 99}
    return train_config(folder / "store", folder / run, **{**settings, **values})


def state(step: int, best: str | None = None) -> TrainState:
    return TrainState(step, 0, 1, "sha256:0", None if best is None else Best(best, 1.0, 1.0))


class Late:
    """Lets a checkpoint be written only once training has taken another step, or waits for it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._changed, self._step, self._waited_for = threading.Condition(), 0, False
        self.late: list[int] = []
        self.at_work = 0
        step, wait, save = Trainer._step, Saver._join, saver.save_checkpoint

        def stepped(trainer: Trainer, *args: Any) -> str:
            note = step(trainer, *args)
            self._say(step=trainer.state.step)
            return note

        def waiting(one: Saver) -> None:
            self._say(waited_for=True)
            wait(one)
            self._say(waited_for=False)

        def late(run: Path, weights: saver.Tensors, moments: saver.Tensors, state: TrainState) -> Path:
            self.at_work += 1
            assert self.at_work == 1, "two are written at a time"
            with self._changed:
                assert self._changed.wait_for(lambda: self._waited_for or self._step > state.step, 60)
                self.late += [state.step] if self._step > state.step else []
            done = save(run, weights, moments, state)
            self.at_work -= 1
            return done

        patch.setattr(Trainer, "_step", stepped)
        patch.setattr(Saver, "_join", waiting)
        patch.setattr(saver, "save_checkpoint", late)

    def _say(self, step: int = 0, waited_for: bool | None = None) -> None:
        with self._changed:
            self._step = step or self._step
            self._waited_for = self._waited_for if waited_for is None else waited_for
            self._changed.notify_all()


@pytest.mark.parametrize("moments", ["float32", "float8"])
def test_a_checkpoint_is_that_of_its_step_though_training_goes_on_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moments: str
) -> None:
    settings = {"optim": {"learning_rate": 1e-2, "moments": moments}, "draft": {"intermediate_size": 300}}
    run_training(config_for(tmp_path, "whole", save_every=1, **settings))
    late = Late(monkeypatch)
    run_training(config_for(tmp_path, "run", **settings))
    assert late.late == [2, 4, 6, 8, 10]
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == [f"step-{n:08}" for n in range(2, 13, 2)]
    for path in list_checkpoints(tmp_path / "run"):
        for name in ("draft.safetensors", "optimizer.safetensors"):
            assert (path / name).read_bytes() == (tmp_path / "whole/checkpoints" / path.name / name).read_bytes()
    whole = {record["step"]: record["loss"] for record in read_log(tmp_path / "whole" / "log.jsonl")}
    assert {record["step"]: record["loss"] for record in read_log(tmp_path / "run" / "log.jsonl")} == whole


def test_the_log_says_what_checkpoints_took(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_training(config_for(tmp_path, "run"))
    records = read_log(tmp_path / "run" / "log.jsonl")
    waited = [record["save_wait"] for record in records]
    assert [step + 1 for step, value in enumerate(waited) if value > 0] == [3, 5, 7, 9, 11]
    assert sum(record["save_seconds"] for record in records) > 0
    assert "checkpoints: 6, written in " in capsys.readouterr().err


def fail_at(step: int, patch: pytest.MonkeyPatch) -> None:
    """The disk is full when the checkpoint of a step is half done."""
    original = checkpoint.save_tensors

    def save(tensors: dict[str, torch.Tensor], path: Path) -> None:
        original(tensors, path)
        if f"step-{step:08}" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")

    patch.setattr(checkpoint, "save_tensors", save)


def test_a_disk_that_is_full_ends_the_run_at_the_next_step_and_keeps_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(tmp_path, "run", keep_checkpoints=1)
    with monkeypatch.context() as patch:
        fail_at(6, patch)
        Late(patch)  # it fails beside step 7
        with pytest.raises(ProblemsError) as caught:
            run_training(config)
    (problem,) = caught.value.problems
    assert problem.kind == "disk.full" and problem.where.endswith("step-00000006")
    assert problem.message == (
        "cannot write: No space left on device; the newest whole checkpoint is step-00000004, from which the same "
        "command goes on"
    )
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000004"]
    assert read_json(tmp_path / "run" / "best.json", "best")["checkpoint"] == "step-00000004"
    assert read_log(tmp_path / "run" / "log.jsonl")[-1]["step"] in (7, 8)
    run_training(config)
    run_training(config_for(tmp_path, "whole", keep_checkpoints=1))
    mine, theirs = (list_checkpoints(tmp_path / run)[-1] / "draft.safetensors" for run in ("run", "whole"))
    assert mine.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize("step", [2, 12])
def test_the_first_and_the_last_checkpoint_fail_in_words_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    fail_at(step, monkeypatch)
    stands = "there is no checkpoint yet" if step == 2 else "the newest whole checkpoint is step-00000010"
    with pytest.raises(ProblemsError, match=rf"disk\.full.*{stands}"):
        run_training(config_for(tmp_path, "run"))


def test_an_error_that_nobody_expects_is_raised_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Path:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(saver, "save_checkpoint", broken)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        run_training(config_for(tmp_path, "run"))


def test_best_moves_and_old_ones_go_once_the_new_one_is_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, list[str]]] = []
    original = saver.save_checkpoint

    def noting(run: Path, *args: Any) -> Path:
        best = run / "best.json"
        now = read_json(best, "best")["checkpoint"] if best.exists() else "none"
        seen.append((now, [path.name for path in list_checkpoints(run)]))
        return original(run, *args)

    monkeypatch.setattr(saver, "save_checkpoint", noting)
    names = {step: f"step-{step:08}" for step in (1, 2, 3)}
    with Saver(tmp_path, keep=1, copies=False) as one:
        for step in (1, 2, 3):
            one.begin(WEIGHTS, {}, state(step, names[min(step, 2)]))
            assert one.wait() is None
    assert seen == [("none", []), (names[1], [names[1]]), (names[2], [names[2]])]
    assert read_json(tmp_path / "best.json", "best")["checkpoint"] == names[2]
    assert [path.name for path in list_checkpoints(tmp_path)] == [names[2], names[3]]


@pytest.mark.parametrize("copies", [False, True])
def test_what_is_written_is_what_the_tensors_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copies: bool
) -> None:
    go, original = threading.Event(), saver.save_checkpoint

    def blocked(*args: Any) -> Path:
        assert go.wait(60)
        return original(*args)

    monkeypatch.setattr(saver, "save_checkpoint", blocked)
    live = {"a": torch.zeros(2, 3).t(), "step": torch.tensor(3.0)}
    with Saver(tmp_path, 1, copies) as one:
        one.begin(live, live, state(1))
        live["a"].fill_(1.0)
        go.set()
        one.wait()
    found = load_checkpoint(list_checkpoints(tmp_path)[0])
    for part in (found.weights, found.optimizer):
        assert torch.equal(part["a"], torch.full((3, 2), float(copies))) and part["step"] == 3


def test_ctrl_c_does_not_wait_for_a_checkpoint_and_another_error_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, ended, original = threading.Event(), threading.Event(), saver.save_checkpoint

    def blocked(*args: Any) -> Path:
        assert go.wait(60)
        ended.set()
        return original(*args)

    monkeypatch.setattr(saver, "save_checkpoint", blocked)
    with pytest.raises(KeyboardInterrupt), Saver(tmp_path, 1, False) as one:
        one.begin(WEIGHTS, {}, state(1, "step-00000001"))
        raise KeyboardInterrupt
    assert not ended.is_set()
    go.set()
    one.wait()
    assert not (tmp_path / "best.json").exists(), "it was given up"
    with pytest.raises(ZeroDivisionError), Saver(tmp_path, 1, False) as two:
        two.begin(WEIGHTS, {}, state(2))
        raise ZeroDivisionError
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000002"]


def test_an_error_that_ends_the_run_does_not_hide_that_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_at(1, monkeypatch)
    with pytest.raises(ZeroDivisionError), Saver(tmp_path, 1, False) as one:
        one.begin(WEIGHTS, {}, state(1))
        raise ZeroDivisionError
    assert "a checkpoint could not be written: 1 problem" in capsys.readouterr().err


def free(patch: pytest.MonkeyPatch, amount: int) -> None:
    patch.setattr(disk_room, "_free", lambda run: amount)


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "float8"])
def test_the_size_of_a_checkpoint_is_known_before_it_is_written(tmp_path: Path, moments: str) -> None:
    optim, draft = {"learning_rate": 1e-2, "moments": moments}, {"intermediate_size": 300, "draft_vocab_size": 24}
    config = config_for(tmp_path, "run", optim=optim, draft=draft)
    size = checkpoint_bytes(make_setup(config).module.model, config.optim.moments)
    run_training(config)
    newest = list_checkpoints(tmp_path / "run")[-1]
    stored = load_checkpoint(newest)
    counts = [name for name in stored.optimizer if name.endswith(".step")]
    assert sum(
        value.nbytes for part in (stored.weights, stored.optimizer) for value in part.values()
    ) == size + 4 * len(counts)


def test_a_disk_with_too_little_room_is_said_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_for(tmp_path, "run", keep_checkpoints=2)
    size = checkpoint_bytes(make_setup(config).module.model, config.optim.moments)
    free(monkeypatch, 4 * size)
    assert room_note(tmp_path / "run", 2, size) is None
    free(monkeypatch, 4 * size - 1)
    run_training(config)
    said = capsys.readouterr().err
    assert (
        "warning: checkpoints need up to 0.17 MiB (0.04 MiB each: the newest 2, the best, and one being written)"
        in (said)
    )
    assert f"{tmp_path / 'run'} has 0.17 MiB free" in said
    assert room_note(tmp_path / "run", 2, size) is None, "those that are there count"


def test_a_checkpoint_that_cannot_fit_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Saver(tmp_path, 1, False) as one:
        one.begin(WEIGHTS, {}, state(1))
        assert one.wait() is None
        free(monkeypatch, 23)
        monkeypatch.setattr(saver, "save_checkpoint", lambda *_: pytest.fail("begun"))
        one.begin(WEIGHTS, {}, state(2))
        error = one.wait()
    assert isinstance(error, ProblemsError)
    message = "a checkpoint needs 0.00 MiB, 0.00 MiB are free; the newest whole checkpoint is step-00000001"
    assert error.problems[0].kind == "disk.full" and message in error.problems[0].message


def test_a_run_on_a_disk_that_is_really_full_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_disk(tmp_path / "disk", "180k") as disk:
        free(monkeypatch, 1 << 40)  # a file system need not say what is left
        config = config_for(tmp_path, "disk/run")
        with pytest.raises(ProblemsError, match=r"disk\.full.*the newest whole checkpoint is step-0"):
            run_training(config)
        kept = list_checkpoints(disk / "run")
        assert kept and not list((disk / "run" / "checkpoints").glob("*.tmp"))
        load_checkpoint(kept[-1])
        assert read_json(disk / "run" / "best.json", "best")["checkpoint"] == kept[-1].name
