"""Early stopping: when a run ends, what it says, and that a resumed run ends where the other one did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle3.config import EarlyStoppingSection, TrainConfig
from eagle3.errors import ProblemsError
from eagle3.files import read_json, write_json_atomic
from eagle3.train import trainer
from eagle3.train.checkpoint import Plateau, list_checkpoints, load_state
from eagle3.train.early_stopping import after_evaluation, reason_to_stop
from eagle3.train.evaluation import Evaluation
from eagle3.train.tracking import read_log
from eagle3.train.trainer import run_training
from tests.stores import train_config, write_random_store

from .test_resume import Stopped, assert_same_run, stop_after

LENGTHS = [1.9, 1.1, 1.2, 1.2, 1.15, 1.3, 1.3, 1.3, 1.3]
"""By step; that of step 0 does not count."""


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations give `LENGTHS` in place of what the drafter comes to."""

    def given(self: trainer.Trainer) -> Evaluation:
        return Evaluation(1.0, [0.5], LENGTHS[self.state.step], 0.1, [0.1], {})

    original = trainer.Trainer._evaluate

    def evaluate(self: trainer.Trainer) -> bool:
        with monkeypatch.context() as patch:
            patch.setattr(trainer, "evaluate", lambda *_: given(self))
            return original(self)

    monkeypatch.setattr(trainer.Trainer, "_evaluate", evaluate)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return write_random_store(tmp_path / "store", [(8, (2, 8)), (9, (3, 9)), (12, (3, 12)), (7, (1, 7))] * 3)


def config_for(store: Path, output: Path, **values: object) -> TrainConfig:
    settings = {"eval_fraction": 0.2, "eval_every": 1, "save_every": 1, "max_steps": 8, "keep_checkpoints": 9}
    return train_config(store, output, **{**settings, "early_stopping": {"patience": 2}, **values})


def after(lengths: list[float | None], **values: float) -> list[int]:
    section, plateau, counts = EarlyStoppingSection(**values), None, []  # type: ignore[arg-type]
    for length in lengths:
        plateau = after_evaluation(plateau, length, section)
        counts.append(plateau.evaluations)
    return counts


def test_evaluations_without_an_improvement_are_counted() -> None:
    assert after([1.1, 1.2, 1.2, 1.15, 1.3, 1.3]) == [0, 0, 1, 2, 0, 1]
    assert after([1.0, 1.04, 1.08, 1.12, 1.13], min_delta=0.1) == [0, 1, 2, 0, 1], "many small steps add up to one"
    assert after([None, None, 1.0, None]) == [0, 1, 0, 1]


def test_the_reason_says_what_it_waited_for() -> None:
    section = EarlyStoppingSection(patience=2, min_delta=0.01)
    assert reason_to_stop(Plateau(1.5, 1), section) is None and reason_to_stop(Plateau(1.5, 9), None) is None
    said = reason_to_stop(Plateau(1.5, 2), section)
    assert said == "acceptance length has not risen above 1.5000 by more than 0.01 for 2 evaluations"


def test_a_run_ends_says_why_and_stays_ended(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_training(config_for(store, tmp_path / "run"))
    reason = "acceptance length has not risen above 1.2000 for 2 evaluations"
    assert result.steps == 4 and result.early_stop == reason and not result.stopped
    assert f"ended early: {reason}" in result.render()
    assert f"ended after step 4 of 8: {reason}" in capsys.readouterr().err
    log = read_log(tmp_path / "run" / "log.jsonl")
    ended = {key: value for key, value in log[-1].items() if key != "time"}
    assert ended == {"kind": "early_stop", "step": 4, "reason": reason}
    assert result.best_checkpoint.name == "step-00000002"
    assert list_checkpoints(tmp_path / "run")[-1].name == "step-00000004"
    again = run_training(config_for(store, tmp_path / "run"))
    assert again == result and read_log(tmp_path / "run" / "log.jsonl") == log


@pytest.mark.parametrize("crash", [2, 4])
def test_a_resumed_run_ends_where_the_uninterrupted_one_did(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash: int
) -> None:
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        stop_after(crash, patch)
        run_training(config_for(store, tmp_path / "run"))
    assert run_training(config_for(store, tmp_path / "run")).early_stop
    run_training(config_for(store, tmp_path / "whole"))
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_more_patience_lets_an_ended_run_go_on(store: Path, tmp_path: Path) -> None:
    run_training(config_for(store, tmp_path / "run"))
    result = run_training(config_for(store, tmp_path / "run", early_stopping={"patience": 3}))
    assert result.steps == 8 and result.early_stop is None
    assert load_state(list_checkpoints(tmp_path / "run")[-1]).plateau == Plateau(1.3, 3)


def test_without_it_a_run_takes_all_steps_and_its_state_has_no_such_key(store: Path, tmp_path: Path) -> None:
    result = run_training(config_for(store, tmp_path / "run", early_stopping=None))
    assert result.steps == 8 and result.early_stop is None
    assert "plateau" not in json.loads((list_checkpoints(tmp_path / "run")[-1] / "state.json").read_text())


@pytest.mark.parametrize("value", [{"evaluations": 1}, {"acceptance_length": 1.0, "evaluations": -1}, 3])
def test_a_state_that_no_run_writes_is_refused(store: Path, tmp_path: Path, value: object) -> None:
    run_training(config_for(store, tmp_path / "run"))
    path = list_checkpoints(tmp_path / "run")[-1] / "state.json"
    write_json_atomic(path, {**read_json(path, "a state"), "plateau": value})
    with pytest.raises(ProblemsError, match=r"checkpoint\.damaged.*plateau"):
        load_state(path.parent)


@pytest.mark.parametrize("values", [{"eval_fraction": 0.0}, {"ring": {}, "eval_fraction": 0.3}])
def test_without_held_out_samples_it_is_refused(store: Path, tmp_path: Path, values: dict[str, object]) -> None:
    with pytest.raises(ProblemsError, match="none are held out: give eval_dataset"):
        config_for(store, tmp_path / "run", **values)


def test_where_nothing_is_held_out_after_all_it_is_refused_too(store: Path, tmp_path: Path) -> None:
    """As by `--stream`, which changes a config that was read."""
    config = config_for(store, tmp_path / "run").model_copy(update={"eval_fraction": 0.0})
    with pytest.raises(ProblemsError, match=r"train\.early_stopping.*no sample is held out"):
        run_training(config)
    assert not (tmp_path / "run").exists()
