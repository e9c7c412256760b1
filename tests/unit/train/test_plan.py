"""`eagle3 train --plan`: the worst micro-batch, what fits, and what is refused."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eagle3.cli import app
from eagle3.config import TrainConfig, dump_config
from eagle3.data.loader import load_windows
from eagle3.draft.chains import plan_chains
from eagle3.draft.fused.memory import Sizes
from eagle3.errors import ProblemsError
from eagle3.train import plan
from eagle3.train.memory import Run, run_ledger
from eagle3.train.moments import moment_bytes
from eagle3.train.samples import Samples
from eagle3.train.setup import make_setup, open_samples, ttt_settings
from eagle3.train.worst_batch import Share, _micro_batches, _read, find_worst, largest
from tests.rings import ring_config, ring_plan, ring_samples, write_ring
from tests.stores import train_config, write_random_store

GIB = 2**30
ROOMY = 64.0
FLOAT8_DRAFT = {
    "draft_vocab_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 32,
}
"""A shape whose products can be made in float8."""


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return write_random_store(tmp_path / "store", count=60)


def config_for(store: Path, **values: object) -> TrainConfig:
    return train_config(store, store.parent / "run", **{"mixed_precision": "bf16", "accumulate": 2, **values})


def run_of(config: TrainConfig, processes: int = 1) -> tuple[Samples, Run]:
    samples = open_samples(config, processes)
    return samples, plan.make_run(config, samples, ttt_settings(config), processes)


@pytest.mark.parametrize("values", [{"batch_tokens": 50}, {"batch_size": 3}, {"batch_size": 2, "pack": True}])
@pytest.mark.parametrize("processes", [1, 2])
def test_micro_batches_are_those_that_training_loads(store: Path, values: dict[str, object], processes: int) -> None:
    config = config_for(store, **values, max_length=12)
    samples, run = run_of(config, processes)
    windows, found = (
        samples.train.windows(config, processes, run.cost),
        list(_micro_batches(samples.train, config, run)),
    )
    reader, indices = samples.train.reader, samples.train.indices  # type: ignore[attr-defined]
    loaded = [list(load_windows(reader, windows, indices, 12, rank)) for rank in range(processes)]
    batches = [batch for window in zip(*loaded, strict=True) for rank in window for batch in rank]
    for mine, batch in zip(found, batches, strict=True):
        chains = plan_chains(batch.loss_mask, batch.document_ids, 3, "served")
        expected = Sizes.of(chains, batch.input_ids.numel(), len(batch.last_hidden), run.ttt.chunk)
        if mine.rows:
            assert (mine.tokens, _read(samples.train, mine, run)) == (batch.input_ids.numel(), expected)
            assert mine.bound(run).peak >= plan_peak(run, mine, expected)


def plan_peak(run: Run, batch: Share, sizes: Sizes) -> int:
    return run_ledger(run, sizes, batch.place(run)).peak


def test_the_worst_micro_batch_is_found_and_no_other_passes_the_bound(store: Path) -> None:
    config = config_for(store, batch_size=4)
    samples, run = run_of(config)
    worst = find_worst(samples.train, config, run)
    peaks = []
    for batch in _micro_batches(samples.train, config, run):
        sizes = _read(samples.train, batch, run)
        assert sizes is not None
        peaks.append(plan_peak(run, batch, sizes))
    assert worst.count == len(peaks) > 5 and 0 < worst.read < worst.count
    assert max(peaks) * 0.999 < worst.ledger.peak <= max(peaks) <= worst.bound


@pytest.mark.parametrize("values", [{}, {"ttt": {"steps": 3, "float8": True}, "optim": {"moments": "float8"}}])
def test_the_drafter_planned_is_the_drafter_trained(store: Path, values: dict[str, object]) -> None:
    config = config_for(store, batch_tokens=64, **values)
    _, run = run_of(config)
    setup = make_setup(config)
    assert run.draft == setup.module.model.config and run.ttt == setup.module.ttt
    assert run.moments == config.optim.moments and run.types.float8 == setup.module.ttt.float8
    assert run.moment_bytes == moment_bytes(setup.module.model, run.moments)
    assert run.types.weights == next(setup.module.model.norm.parameters()).element_size()
    assert run.types.embedding == setup.module.model.embed_tokens.weight.element_size()
    assert run.types.head == setup.head.lm_head.element_size()


def test_the_most_tokens_that_fit_fit_and_no_more(store: Path) -> None:
    config = config_for(store, batch_tokens=64)
    samples, run = run_of(config)

    def bound(tokens: int) -> int:
        update = {"batch_tokens": tokens}
        return largest(samples.train, config.model_copy(update=update), run)[1][0].bound(run).peak

    assert bound(256) < bound(512)
    card = plan.Card("a card", int(bound(256) * 1.05) + plan._CONTEXT + 1)
    assert plan._most_tokens(samples, config, run, card) == 256
    assert plan._most_tokens(samples, config, run, plan.Card("a card", 2**40)) == plan._MOST_TOKENS
    assert plan._most_tokens(samples, config, run, plan.Card("a card", plan._CONTEXT)) == 0


def test_a_plan_says_what_fits_and_writes_nothing(store: Path) -> None:
    before = sorted(path.name for path in store.parent.rglob("*"))
    found = plan.plan_memory(config_for(store, batch_tokens=64), ROOMY)
    text = found.render()
    assert not found.problems
    for said in ("moments", "DDP", "the largest: ", "it fits: 62.", "card: 64 GiB", "nothing was written"):
        assert (said in text) == (said != "DDP"), said
    assert sorted(path.name for path in store.parent.rglob("*")) == before


def test_float8_and_moments_are_planned(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle3.train.moments.SMALL", 1)
    said, sizes = [], []
    for values in ({}, {"ttt": {"steps": 3, "float8": True}}, {"optim": {"moments": "bfloat16"}}):
        config = config_for(store, batch_tokens=64, **{"draft": FLOAT8_DRAFT, **values})
        rendered = plan.plan_memory(config, ROOMY).render()
        said.append([part for part in ("products in float8", "bfloat16 moments") if part in rendered])
        samples, run = run_of(config)
        ledger = find_worst(samples.train, config, run).ledger
        sizes.append((ledger.groups("sums")["weights"], ledger.groups("update")["moments"]))
    assert said == [[], ["products in float8"], ["bfloat16 moments"]]
    (plain, moments), float8, narrow = sizes
    assert float8[0] > plain and float8[1] == moments
    assert narrow[0] == plain and narrow[1] < moments


def test_a_shape_that_float8_cannot_multiply_is_refused(store: Path) -> None:
    config = config_for(
        store, batch_tokens=64, ttt={"steps": 3, "float8": True}, draft=FLOAT8_DRAFT | {"intermediate_size": 40}
    )
    with pytest.raises(ProblemsError) as caught:
        plan.plan_memory(config, ROOMY)
    assert [problem.kind for problem in caught.value.problems] == ["train.float8"]


def test_several_processes_have_buckets(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "DDP's buckets" in plan.plan_memory(config_for(store, batch_tokens=64), ROOMY).render()


def test_what_does_not_fit_is_a_problem_with_the_number_that_would(store: Path) -> None:
    config = config_for(store, batch_tokens=1024, eval_fraction=0.1)
    samples, run = run_of(config)
    smaller = config.model_copy(update={"batch_tokens": 256})
    peak = largest(samples.train, smaller, run)[1][0].bound(run).peak
    found = plan.plan_memory(config, (peak * 1.05 + plan._CONTEXT + 1) / GIB)
    (problem,) = found.problems
    assert (problem.kind, problem.fix[:30]) == ("plan.does_not_fit", "set batch_tokens=256 or less, ")
    less = plan.plan_memory(config, 1.001)
    assert [problem.kind for problem in less.problems] == ["plan.does_not_fit"] * 2
    assert "not even one sample of max_length=16" in less.render() and "eval_fraction=0" in less.render()


def test_a_rings_masks_are_not_there_so_its_plan_is_the_bound(tmp_path: Path) -> None:
    samples = ring_samples()
    write_ring(tmp_path / "ring", ring_plan(samples, shards=99), samples)
    config = ring_config(tmp_path / "ring", tmp_path / "run", batch_tokens=48, mixed_precision="bf16")
    text = plan.plan_memory(config, ROOMY).render()
    assert "the largest, at most (a ring's loss masks are not known before): 27 tokens" in text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("values", "memory", "kinds"),
    [
        ({"ttt": {"steps": 3, "chunk": None}}, ROOMY, ["plan.autograd"]),
        ({"mixed_precision": "no"}, ROOMY, ["plan.precision"]),
        ({}, None, ["plan.device"]),
        ({}, -1.0, ["plan.device"]),
        ({}, float("nan"), ["plan.device"]),
        ({"ttt": {"chunk": None}, "mixed_precision": "no"}, None, ["plan.autograd", "plan.precision", "plan.device"]),
    ],
)
def test_what_is_not_modelled_is_refused(
    store: Path, values: dict[str, object], memory: float | None, kinds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ProblemsError) as caught:
        plan.plan_memory(config_for(store, **values), memory)
    assert [problem.kind for problem in caught.value.problems] == kinds


def test_the_command_exits_with_2_where_it_does_not_fit_and_prints_once(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.yaml").write_text(dump_config(config_for(store, batch_tokens=64)))
    command = ["train", "--config", str(tmp_path / "train.yaml"), "--plan", "--device-memory"]
    fits, not_so = (CliRunner().invoke(app, [*command, memory]) for memory in ("64", "1"))
    assert (fits.exit_code, not_so.exit_code) == (0, 2)
    assert "it fits" in fits.output and "[plan.does_not_fit]" in not_so.output
    monkeypatch.setenv("RANK", "1")
    assert CliRunner().invoke(app, [*command, "64"]).output == ""
    alone = CliRunner().invoke(app, [*command[:3], "--device-memory", "64"])
    assert isinstance(alone.exception, ProblemsError) and "without --plan" in str(alone.exception)
    assert not (store.parent / "run").exists()


@pytest.mark.parametrize("memory", [float("inf"), 1e308, 2.0**21, 0.0])
def test_a_size_that_no_card_has_is_refused(store: Path, memory: float) -> None:
    with pytest.raises(ProblemsError, match=r"plan\.device.*above 0 and at most 1,048,576"):
        plan.plan_memory(config_for(store), memory)


@pytest.mark.parametrize("count", ["abc", "", "0", "-2", "1" * 5000, "²"])
def test_a_number_of_processes_that_is_none_is_refused(
    store: Path, count: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", count)
    with pytest.raises(ProblemsError, match=r"plan\.processes"):
        plan.plan_memory(config_for(store), ROOMY)


def test_the_most_tokens_said_are_never_fewer_than_a_sample_may_have(store: Path) -> None:
    config = config_for(store, max_length=plan._MOST_TOKENS + 1)
    samples, run = run_of(config)
    assert plan._most_tokens(samples, config, run, plan.Card("a card", 2**40)) >= config.max_length


def test_a_plan_of_a_store_at_a_url_says_that_the_cache_was_written(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(store)
    monkeypatch.setattr(plan, "open_samples", lambda given, processes: open_samples(config, processes))
    remote = config.model_copy(update={"dataset": "s3://bucket/store"})
    assert plan.plan_memory(remote, ROOMY).render().endswith("nothing was written but the cache of the store at a URL")
    assert plan.plan_memory(config, ROOMY).render().endswith("nothing was written")


def test_a_plan_does_not_wait_for_a_ring_that_nobody_has_begun(tmp_path: Path) -> None:
    config = train_config(tmp_path / "ring", tmp_path / "run", ring={"wait_seconds": 600}, mixed_precision="bf16")
    began = time.monotonic()
    with pytest.raises(ProblemsError, match=r"ring\.no_writer"):
        plan.plan_memory(config, 100.0)
    assert time.monotonic() - began < 60 and list(tmp_path.iterdir()) == []
