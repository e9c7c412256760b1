"""Two gloo ranks take the steps of one process on the same global batches; one launch runs every case."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle3.config import TrainConfig, dump_config
from eagle3.data.store import StoredSample
from eagle3.files import read_json
from eagle3.train.checkpoint import list_checkpoints
from eagle3.train.plan import make_run
from eagle3.train.setup import open_samples, ttt_settings
from eagle3.train.tracking import Record, read_log
from eagle3.train.trainer import run_training
from tests.children import in_a_child
from tests.rings import ring_config, ring_plan, ring_samples, write_ring
from tests.stores import Span, train_config, write_random_store

ROOT = Path(__file__).parents[3]
MIXED: list[tuple[int, Span]] = [(5, (2, 5)), (16, (1, 16)), (6, (3, 6)), (14, (2, 5)), (9, (2, 9))]
NO_TERM = (8, (7, 8))
RING_SAMPLES = ring_samples()
CONSTANT = {"learning_rate": 1e-2, "schedule": "constant", "warmup_fraction": 0.0}
CASES: dict[str, tuple[list[tuple[int, Span]], dict[str, object], dict[str, object]]] = {
    # samples; settings of both runs; settings of the single process besides
    "plain": (MIXED * 2, {"max_steps": 30}, {"batch_size": 2}),
    "accumulated": (MIXED * 2, {"max_steps": 30, "accumulate": 2}, {"batch_size": 2}),
    "large_batch": (MIXED * 2, {"max_steps": 30, "batch_size": 2, "accumulate": 2}, {"batch_size": 8, "accumulate": 1}),
    "packed": (MIXED * 2, {"max_steps": 30, "accumulate": 2, "pack": True, "max_length": 20}, {"batch_size": 2}),
    "budget": (MIXED * 2, {"max_steps": 30, "accumulate": 2, "batch_tokens": 20}, {"accumulate": 4}),
    "fault_16": ([(4, (1, 3)), (6, (1, 6))], {"max_steps": 1}, {"batch_size": 2}),
    "fault_17_masked": ([(8, (2, 8))] * 7 + [NO_TERM], {"epochs": 2}, {"batch_size": 2}),
    "fault_17_seven": ([(8, (2, 8))] * 7, {"epochs": 2}, {"batch_size": 2}),
    "nothing": ([(8, (2, 8)), NO_TERM, NO_TERM, NO_TERM], {"epochs": 2}, {"batch_size": 2}),
    "resumed": (
        MIXED * 2,
        {"max_steps": 8, "accumulate": 2, "save_every": 5, "keep_checkpoints": 9},
        {"batch_size": 2},
    ),
    "dealt": (
        MIXED * 3,
        {"max_steps": 8, "accumulate": 3, "save_every": 5, "keep_checkpoints": 9},
        {"accumulate": 6},
    ),
    "muon": (
        MIXED * 2,
        {"max_steps": 6, "optim": {"name": "muon", "learning_rate": 1e-3, "schedule": "constant"}},
        {"batch_size": 2},
    ),
    "ended_early": (
        MIXED * 2,
        {"max_steps": 9, "eval_every": 1, "eval_fraction": 0.3, "early_stopping": {"patience": 2, "min_delta": 9.0}},
        {"batch_size": 2},
    ),
    "noisy": (
        MIXED * 2,
        {"max_steps": 8, "accumulate": 2, "batch_tokens": 20, "ttt": {"steps": 3, "hidden_noise": 0.3}},
        {"accumulate": 4},
    ),
    "held_out": (MIXED * 2, {"max_steps": 30, "eval_fraction": 0.3, "eval_every": 10}, {"batch_size": 2}),
}


ROUNDED: dict[str, object] = {
    **CASES["resumed"][1],
    "optim": {**CONSTANT, "moments": "float8"},
    "draft": {"intermediate_size": 300},
}


def config_for(folder: Path, case: str, run: str, values: dict[str, object]) -> TrainConfig:
    defaults = {"epochs": 30, "optim": CONSTANT, "keep_checkpoints": 1}
    return train_config(folder / "stores" / case, folder / run / case, **{**defaults, **values})


def overflowing(sample: StoredSample) -> StoredSample:
    states = torch.full_like(sample.last_hidden_states, 3e38)
    return replace(sample, last_hidden_states=states) if sample.id == "s02" else sample


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds every case's run by two ranks under `two`, and how each case ended on each rank."""
    folder = tmp_path_factory.mktemp("ddp")
    for case, (answers, values, _) in CASES.items():
        write_random_store(folder / "stores" / case, answers)
        (folder / f"{case}.yaml").write_text(dump_config(config_for(folder, case, "two", values)))
    write_random_store(folder / "stores" / "not_finite", [(8, (2, 8))] * 4, change=overflowing)
    (folder / "not_finite.yaml").write_text(dump_config(config_for(folder, "not_finite", "two", {})))
    write_random_store(folder / "stores" / "rounded_resumed", MIXED * 2)
    (folder / "rounded_resumed.yaml").write_text(dump_config(config_for(folder, "rounded_resumed", "two", ROUNDED)))
    ring = folder / "rings" / "two"
    (folder / "ring.yaml").write_text(dump_config(ring_config(ring, folder / "two" / "ring", batch_size=1)))
    writer = in_a_child(lambda: write_ring(ring, ring_plan(RING_SAMPLES), RING_SAMPLES, wait_seconds=150))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    worker = str(Path(__file__).with_name("ddp_worker.py"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([*command, worker, str(folder)], check=True, cwd=ROOT, env=environment, timeout=200)
    assert os.waitpid(writer, 0)[1] == 0
    return folder


def both(folder: Path, case: str) -> tuple[list[Record], list[Record]]:
    """(two ranks', one process's) log of a case; the weights are compared on the way."""
    _, values, single = CASES[case]
    run_training(config_for(folder, case, "one", {**values, **single}))
    return same_weights(folder / "two" / case, folder / "one" / case)


def same_weights(many: Path, one: Path) -> tuple[list[Record], list[Record]]:
    """Logs of two runs, whose weights are compared on the way."""
    mine, theirs = (load_file(list_checkpoints(run)[-1] / "draft.safetensors") for run in (many, one))
    assert max(float((mine[name] - theirs[name]).abs().max()) for name in theirs) < 1e-4
    return read_log(many / "log.jsonl"), read_log(one / "log.jsonl")


def assert_same_steps(many: list[Record], one: list[Record]) -> None:
    assert len(many) == len(one)
    for mine, theirs in zip(many, one, strict=True):
        assert (mine["kind"], mine["step"]) == (theirs["kind"], theirs["step"])
        if mine["kind"] not in ("skip", "early_stop"):
            assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
            assert mine["step_accuracy"] == theirs["step_accuracy"]
        for name in ("acceptance_length", "acceptance_rate", "acceptance_by_depth", "acceptance_by_source", "lr"):
            assert mine.get(name) == theirs.get(name)


def test_two_ranks_end_early_after_the_same_step(folder: Path) -> None:
    two, _ = both(folder, "ended_early")
    assert (two[-1]["kind"], two[-1]["step"]) == ("early_stop", 3)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_take_the_steps_of_one_process(folder: Path, case: str) -> None:
    assert_same_steps(*both(folder, case))


@pytest.mark.parametrize("case", CASES)
def test_fault_17_ranks_end_with_bit_equal_finite_weights(folder: Path, case: str) -> None:
    digests = read_json(folder / "outcomes.json", "outcomes")[case]
    assert len(digests) == 2
    assert len(digests[0]) == 64
    assert digests[0] == digests[1]
    weights = load_file(list_checkpoints(folder / "two" / case)[-1] / "draft.safetensors")
    assert all(torch.isfinite(value).all() for value in weights.values())


def test_two_ranks_consume_a_ring_as_one_process_does(folder: Path) -> None:
    digests = read_json(folder / "outcomes.json", "outcomes")["ring"]
    assert digests[0] == digests[1] and len(digests[0]) == 64, digests[0]
    plan, ring = ring_plan(RING_SAMPLES), folder / "rings" / "one"
    writer = in_a_child(lambda: write_ring(ring, plan, RING_SAMPLES))
    run_training(ring_config(ring, folder / "one" / "ring"))
    assert os.waitpid(writer, 0)[1] == 0
    two, one = (read_log(folder / run / "ring" / "log.jsonl") for run in ("two", "one"))
    assert [record["loss"] for record in two] == pytest.approx([record["loss"] for record in one], abs=1e-5)
    assert len(two) == 14 and not list((folder / "rings" / "two").glob("shard-*"))


def test_rows_that_are_dealt_by_cost_train_as_in_order_and_go_on_as_one_process(folder: Path) -> None:
    two, one = both(folder, "dealt")
    config = config_for(folder, "dealt", "two", CASES["dealt"][1])
    samples = open_samples(config, 2)
    run = make_run(config, samples, ttt_settings(config), 2)
    feed = samples.train.feed(config, 2, run.cost)
    pairs = [pair for epoch in range(2) for pair in zip(feed.epoch(epoch), feed.epoch_in_order(epoch), strict=True)]
    assert sum(mine != theirs for mine, theirs in pairs) > len(pairs) // 2
    shares = [record["imbalance"] for record in two if record["kind"] == "train"]
    assert len(shares) == 8 and all(1 <= share < 1.5 for share in shares)
    shutil.copytree(folder / "two" / "dealt", folder / "moved" / "dealt")
    for checkpoint in list_checkpoints(folder / "moved" / "dealt"):
        if checkpoint.name != "step-00000005":
            shutil.rmtree(checkpoint)
    run_training(config_for(folder, "dealt", "moved", {**CASES["dealt"][1], "accumulate": 6}))
    moved = read_log(folder / "moved" / "dealt" / "log.jsonl")
    assert ["imbalance" in record for record in moved if record["kind"] == "train"] == [True] * 5 + [False] * 3
    assert [record.get("loss") for record in moved] == pytest.approx([record.get("loss") for record in one], abs=1e-5)


def test_fault_16_loss_is_normalised_by_global_tokens(folder: Path) -> None:
    """Rank 0 has 1 term at step 0, rank 1 has 4: the first gradient is that of one process on both samples."""
    two, one = both(folder, "fault_16")
    assert two[0]["grad_norm"] == pytest.approx(one[0]["grad_norm"], rel=1e-5)
    assert two[0]["loss"] == pytest.approx(one[0]["loss"], abs=1e-6)


def test_fault_17_every_sample_counts_though_ranks_are_uneven(folder: Path) -> None:
    records = read_log(folder / "two" / "fault_17_seven" / "log.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert all(record["kind"] == "train" for record in records)


def test_a_window_without_a_term_on_any_rank_is_skipped_by_all(folder: Path) -> None:
    kinds = [record["kind"] for record in read_log(folder / "two" / "nothing" / "log.jsonl")]
    assert sorted(kinds) == ["skip", "skip", "train", "train"]


def test_a_loss_that_is_not_finite_on_one_rank_stops_both_with_all_samples_of_the_step(folder: Path) -> None:
    messages = read_json(folder / "outcomes.json", "outcomes")["not_finite"]
    assert messages[0] == messages[1]
    assert "train.not_finite" in messages[0]
    assert "s02" in messages[0]
    assert sum(f"s0{number}" in messages[0] for number in range(4)) == 2


def test_two_ranks_round_their_moments_alike(folder: Path) -> None:
    """A gradient's last bit decides which way a moment is rounded, so one process ends near them, and not in the same
    place."""
    outcomes = read_json(folder / "outcomes.json", "outcomes")
    digests = outcomes["rounded_resumed"]
    assert digests[0] == digests[1] and len(digests[0]) == 64, digests[0]
    assert outcomes["rounded_resumed again"] == digests
    run_training(config_for(folder, "rounded_resumed", "one", {**ROUNDED, "batch_size": 2}))
    two, one = (read_log(folder / run / "rounded_resumed" / "log.jsonl") for run in ("two", "one"))
    assert [record["loss"] for record in two] == pytest.approx([record["loss"] for record in one], rel=0.02)
    tensors = load_file(list_checkpoints(folder / "two" / "rounded_resumed")[-1] / "optimizer.safetensors")
    assert sum(value.dtype == torch.float8_e4m3fn for value in tensors.values()) == 6


def test_two_ranks_resume_exactly(folder: Path) -> None:
    outcomes = read_json(folder / "outcomes.json", "outcomes")
    assert outcomes["resumed again"] == outcomes["resumed"]
    assert [start["step"] for start in read_json(folder / "two/resumed/provenance.json", "")["starts"]] == [0, 5]
