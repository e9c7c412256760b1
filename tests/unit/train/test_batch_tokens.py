"""Micro-batches as budgets of tokens: one packed row in place of rows."""

from pathlib import Path

import pytest

from eagle3.config import TrainConfig, load_config
from eagle3.errors import ProblemsError
from eagle3.train.run_folder import CONFIG_FILE
from eagle3.train.tracking import Record, read_log
from eagle3.train.trainer import run_training
from tests.stores import train_config, write_random_store

SAMPLES = [(5, (2, 5)), (16, (1, 16)), (6, (3, 6)), (14, (2, 5)), (20, (4, 20)), (9, (2, 9))]
IN_ALL = 66
"""Their tokens, cut to 16."""


def log(run: Path) -> list[Record]:
    return [record for record in read_log(run / "log.jsonl") if record["kind"] == "train"]


def assert_same_steps(run: Path, other: Path) -> None:
    for mine, theirs in zip(log(run), log(other), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert mine["step_accuracy"] == theirs["step_accuracy"]


def test_samples_in_one_packed_row_train_as_they_do_in_rows_of_their_own(tmp_path: Path) -> None:
    store = write_random_store(tmp_path / "store", SAMPLES)
    run_training(train_config(store, tmp_path / "rows", batch_size=len(SAMPLES), epochs=8))
    run_training(train_config(store, tmp_path / "row", batch_tokens=IN_ALL, epochs=8))
    assert len(log(tmp_path / "row")) == 8
    assert log(tmp_path / "row")[0]["loss"] > 1.05 * log(tmp_path / "row")[-1]["loss"]
    assert_same_steps(tmp_path / "row", tmp_path / "rows")


def test_more_micro_batches_take_the_steps_of_as_many_rows(tmp_path: Path) -> None:
    store = write_random_store(tmp_path / "store", SAMPLES * 3)
    run_training(train_config(store, tmp_path / "budget", batch_tokens=20, max_length=20, accumulate=4, epochs=4))
    run_training(train_config(store, tmp_path / "rows", batch_size=4, pack=True, max_length=20, epochs=4))
    assert len(log(tmp_path / "budget")) > 8
    assert_same_steps(tmp_path / "budget", tmp_path / "rows")


def test_the_budget_is_part_of_the_run(tmp_path: Path) -> None:
    store = write_random_store(tmp_path / "store", SAMPLES)
    values: dict[str, object] = {"epochs": 2, "save_every": 1, "eval_fraction": 0.2}
    config = train_config(store, tmp_path / "run", batch_tokens=32, **values)
    run_training(config)
    assert load_config(TrainConfig, tmp_path / "run" / CONFIG_FILE) == config
    run_training(config)
    with pytest.raises(ProblemsError, match="batch_tokens is 32 there, 48 now"):
        run_training(train_config(store, tmp_path / "run", batch_tokens=48, **values))
    with pytest.raises(ProblemsError, match="batch_tokens is 32 there, not set now") as caught:
        run_training(train_config(store, tmp_path / "run", batch_size=2, pack=True, **values))
    assert len(caught.value.problems) == 1, "the run has no batch_size that this start could differ from"
