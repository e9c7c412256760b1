"""What a run says of how evenly its work is spread over processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3.config import TrainConfig
from eagle3.data.dealing import places_of, rows_of
from eagle3.errors import ProblemsError
from eagle3.files import read_json, write_json_atomic
from eagle3.train import plan
from eagle3.train.balance import Imbalance, balance_notes
from eagle3.train.checkpoint import list_checkpoints, load_state
from eagle3.train.feed import Feed
from eagle3.train.setup import open_samples, ttt_settings
from eagle3.train.tracking import read_log
from eagle3.train.trainer import run_training
from tests.rings import ring_config, ring_plan, ring_samples, write_ring
from tests.stores import train_config, write_random_store

UNEVEN = [(16, (16 - 1 - 5 * (number % 3), 16)) for number in range(30)]


def feed_of(config: TrainConfig, processes: int) -> Feed:
    samples = open_samples(config, processes)
    run = plan.make_run(config, samples, ttt_settings(config), processes)
    return samples.train.feed(config, processes, run.cost)


def test_the_busiest_over_the_mean_since_the_last_line() -> None:
    found = Imbalance()
    found.add([30, 10])
    found.add([10, 10])
    assert found.take() == {"imbalance": pytest.approx(40 / 30)}
    assert found.take() == {}
    found.add([7, 7])
    assert found.take() == {"imbalance": 1}


def test_one_process_has_nobody_to_wait_for(tmp_path: Path) -> None:
    found = Imbalance()
    found.add([30])
    assert found.take() == {}
    store = write_random_store(tmp_path / "store", UNEVEN)
    assert balance_notes(feed_of(train_config(store, tmp_path / "run"), 1)) == []
    run_training(train_config(store, tmp_path / "run"))
    assert all("imbalance" not in record for record in read_log(tmp_path / "run" / "log.jsonl"))


def test_the_line_says_both_figures(tmp_path: Path) -> None:
    store = write_random_store(tmp_path / "store", UNEVEN)
    feed = feed_of(train_config(store, tmp_path / "run", accumulate=3), 2)
    figures = []
    for windows in (feed.epoch(0), feed.epoch_in_order(0)):
        loads = [feed.loads(window) for window in windows]
        figures.append(sum(map(max, loads)) * 2 / sum(map(sum, loads)) - 1)
    assert figures[0] < 0.1 < figures[1]
    assert balance_notes(feed) == [
        f"balance: over 5 windows the busiest of 2 processes has {figures[0]:.1%} more to do than the mean "
        f"({figures[1]:.1%} if dealt in order)"
    ]


def test_a_plan_says_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = write_random_store(tmp_path / "store", UNEVEN)
    config = train_config(store, tmp_path / "run", mixed_precision="bf16")
    assert "balance: " not in plan.plan_memory(config, 64.0).render()
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "\nbalance: over 15 windows the busiest of 2 processes has " in plan.plan_memory(config, 64.0).render()


def test_of_a_cut_sample_only_what_is_left_is_supervised(tmp_path: Path) -> None:
    store = write_random_store(tmp_path / "store", [(20, (2, 20)), (20, (15, 20)), (10, (4, 10))] * 2)
    train = open_samples(train_config(store, tmp_path / "run", max_length=16), 1).train
    assert [train.info(place).supervised for place in range(6)] == [14, 1, 6] * 2
    masks = [train.loss_mask(place) for place in range(6)]
    assert [mask.sum() for mask in masks if mask is not None] == [14, 1, 6] * 2


def test_a_rings_windows_are_dealt_by_cost_and_hold_what_they_did(tmp_path: Path) -> None:
    samples = ring_samples()
    write_ring(tmp_path / "ring", ring_plan(samples, shards=99), samples)
    config = ring_config(tmp_path / "ring", tmp_path / "run", batch_size=1, accumulate=3)
    feed = feed_of(config, 2)
    pairs = [pair for epoch in range(2) for pair in zip(feed.epoch(epoch), feed.epoch_in_order(epoch), strict=True)]
    assert all(sorted(places_of(mine)) == sorted(places_of(theirs)) for mine, theirs in pairs)
    assert all(max(feed.loads(mine)) <= max(feed.loads(theirs)) for mine, theirs in pairs)
    assert any(rows_of(mine) != rows_of(theirs) for mine, theirs in pairs)


def as_before(checkpoint: Path, **values: object) -> None:
    """A checkpoint as a release wrote it that knew one order only."""
    state = read_json(checkpoint / "state.json", "state")
    del state["order"]
    write_json_atomic(checkpoint / "state.json", {**state, **values})


@pytest.mark.parametrize("values", [{"batch_tokens": 40}, {"pack": True}])
def test_a_run_whose_rows_were_packed_otherwise_is_refused(tmp_path: Path, values: dict[str, object]) -> None:
    config = train_config(write_random_store(tmp_path / "store", UNEVEN), tmp_path / "run", epochs=2, **values)
    run_training(config)
    run_training(config)
    (*_, checkpoint) = list_checkpoints(tmp_path / "run")
    assert load_state(checkpoint).order == 2
    as_before(checkpoint)
    with pytest.raises(ProblemsError, match=r"come in order 1, .* this one makes order 2") as caught:
        run_training(config)
    assert [problem.kind for problem in caught.value.problems] == ["run.other_order"]
    assert "another output folder" in caught.value.problems[0].fix


def test_a_run_that_packs_nothing_goes_on_from_an_older_checkpoint(tmp_path: Path) -> None:
    config = train_config(write_random_store(tmp_path / "store", UNEVEN), tmp_path / "run", epochs=2)
    run_training(config)
    (*_, checkpoint) = list_checkpoints(tmp_path / "run")
    as_before(checkpoint)
    assert run_training(config).steps == 60


def test_an_order_that_is_no_number_is_damage(tmp_path: Path) -> None:
    config = train_config(write_random_store(tmp_path / "store", UNEVEN), tmp_path / "run")
    run_training(config)
    (*_, checkpoint) = list_checkpoints(tmp_path / "run")
    as_before(checkpoint, order="2")
    with pytest.raises(ProblemsError, match=r"checkpoint\.damaged.*order '2'"):
        run_training(config)
