from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from eagle3.data.loader import Ahead
from eagle3.data.store import StoredSample, StoreReader
from eagle3.draft.batch import DraftBatch
from eagle3.errors import ProblemsError
from eagle3.files import read_json
from eagle3.train.setup import make_setup
from eagle3.train.tracking import Record, read_log
from eagle3.train.trainer import run_training
from eagle3.wiring.fingerprint_file import load_fingerprint
from tests.old_stores import as_version_2
from tests.stores import random_contract, random_sample, train_config, write_random_store


def log(run: Path, kind: str = "train") -> list[Record]:
    return [record for record in read_log(run / "log.jsonl") if record["kind"] == kind]


def checkpoints(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").iterdir())


def test_the_drafter_learns_and_the_run_says_so(tmp_path: Path) -> None:
    store = write_random_store(tmp_path / "store", count=6)
    draft = {"init": "random"}
    result = run_training(train_config(store, tmp_path / "run", batch_size=3, epochs=40, draft=draft))
    records = log(tmp_path / "run")
    assert load_fingerprint(tmp_path / "run")[0] == load_fingerprint(store)[0]
    assert result.steps == len(records) == 80
    assert "acceptance length: not measured" in result.render()
    assert records[0]["step_accuracy"][0] < 0.3
    assert records[-1]["step_accuracy"][0] > 0.8
    assert (result.first_loss, result.last_loss) == (records[0]["loss"], records[-1]["loss"])
    assert result.best_checkpoint == tmp_path / "run" / "checkpoints" / "step-00000080"
    assert all(record["tokens_per_second"] > 0 and record["seconds"] > 0 for record in records)


@pytest.mark.parametrize("moments", ["bfloat16", "float8"])
def test_the_drafter_learns_with_rounded_moments_what_it_learns_with_float32(
    tmp_path: Path, moments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = write_random_store(tmp_path / "store", count=6)
    draft = {"init": "random", "intermediate_size": 300}
    losses = {}
    for kind in ("float32", moments):
        optim = {"learning_rate": 1e-2, "moments": kind}
        config = train_config(store, tmp_path / kind, batch_size=3, epochs=40, draft=draft, optim=optim)
        run_training(config)
        losses[kind] = [record["loss"] for record in log(tmp_path / kind)]
    assert losses["float32"][-1] < 0.5 * losses["float32"][0]
    assert losses[moments][0] == losses["float32"][0]
    assert losses[moments][-1] == pytest.approx(losses["float32"][-1], rel=0.1)
    assert f"moments: {moments}, 0.0" in capsys.readouterr().err


@pytest.mark.parametrize("pack", [False, True])
def test_accumulation_takes_the_same_steps_as_a_larger_batch(tmp_path: Path, pack: bool) -> None:
    store = write_random_store(tmp_path / "store", [(5, (2, 5)), (16, (1, 16)), (6, (3, 6)), (14, (2, 5))] * 3)
    shapes = {"large": (4, 1), "half": (2, 2), "single": (1, 4)}
    for name, (batch_size, accumulate) in shapes.items():
        run_training(
            train_config(
                store, tmp_path / name, batch_size=batch_size, accumulate=accumulate, pack=pack, epochs=5, max_length=20
            )
        )
    large = log(tmp_path / "large")
    assert len(large) == (10 if pack else 15)
    for name in ("half", "single"):
        for mine, theirs in zip(log(tmp_path / name), large, strict=True):
            assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
            assert mine["step_accuracy"] == theirs["step_accuracy"]


def test_a_drafter_learns_from_an_fp8_store_what_it_learns_from_those_very_states_in_float32(tmp_path: Path) -> None:
    eight = replace(random_contract(), dtype="float8_e4m3fn")

    def halved(sample: StoredSample) -> StoredSample:
        aux, last = sample.aux_hidden_states.bfloat16(), sample.last_hidden_states.bfloat16()
        return replace(sample, aux_hidden_states=aux, last_hidden_states=last)

    store = write_random_store(tmp_path / "fp8", contract=eight, change=halved)
    reader = StoreReader(store)
    states = {sample.id: sample for sample in map(reader.read, range(len(reader)))}

    def widened(sample: StoredSample) -> StoredSample:
        read = states[sample.id]  # its greedy tokens are those of the states before they were rounded
        aux, last = read.aux_hidden_states.float(), read.last_hidden_states.float()
        return replace(read, aux_hidden_states=aux, last_hidden_states=last)

    wide = write_random_store(tmp_path / "float32", change=widened)
    for folder in (store, wide):
        run_training(train_config(folder, tmp_path / f"run-{folder.name}", batch_size=3, epochs=4, pack=True))
    losses = [[record["loss"] for record in log(tmp_path / f"run-{name}")] for name in ("fp8", "float32")]
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0]


@pytest.mark.parametrize("pack", [False, True])
def test_greedy_tokens_that_are_stored_train_as_those_that_are_found_with_the_head(tmp_path: Path, pack: bool) -> None:
    """A store of version 2 has none."""
    new = write_random_store(tmp_path / "new", [(5, (2, 5)), (16, (1, 16)), (6, (3, 6)), (14, (2, 5))] * 3)
    logs = {}
    for folder in (new, as_version_2(new, tmp_path / "old")):
        run = tmp_path / f"run-{folder.name}"
        run_training(train_config(folder, run, batch_size=3, epochs=4, pack=pack, max_length=15, eval_fraction=0.3))
        logs[folder.name] = [{key: record[key] for key in ("loss", "step_accuracy")} for record in log(run)]
        logs[f"{folder.name} eval"] = [record["step_accuracy"] for record in log(run, "eval")]
    for mine, theirs in zip(logs["new"], logs["old"], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-6)
        assert mine["step_accuracy"] == theirs["step_accuracy"]
    assert logs["new eval"] == logs["old eval"] and logs["new"]


def test_fault_13_short_last_window_is_stepped_with_its_full_gradient_and_counted(tmp_path: Path) -> None:
    first = random_sample("s00", 8, (2, 8), seed=0)
    store = write_random_store(
        tmp_path / "store", [(8, (2, 8))] * 5, change=lambda sample: replace(first, id=sample.id)
    )
    optim = {"learning_rate": 1e-12, "schedule": "linear", "warmup_fraction": 0.0, "final_fraction": 0.25}
    result = run_training(train_config(store, tmp_path / "run", accumulate=2, epochs=4, optim=optim))
    records = log(tmp_path / "run")
    assert result.steps == 12
    assert [record["epoch"] for record in records] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert [record["grad_norm"] for record in records] == pytest.approx([records[0]["grad_norm"]] * 12, rel=1e-5)
    rates = [record["lr"] / 1e-12 for record in records]
    assert rates[-1] == pytest.approx(0.25)
    assert min(rates[:-1]) > 0.25 + 1e-3


def test_gradients_are_clipped_to_the_norm_of_the_config(tmp_path: Path) -> None:
    """With a large epsilon AdamW's step is proportional to the gradient."""
    store = write_random_store(tmp_path / "store", count=4)
    shared = {"learning_rate": 1.0, "eps": 1e3, "schedule": "constant", "warmup_fraction": 0.0}
    moved = {}
    for norm in (1e-3, 1e-2):
        config = train_config(
            store, tmp_path / str(norm), batch_size=4, epochs=1, optim={**shared, "max_grad_norm": norm}
        )
        start = make_setup(config).module.model.trainable_state()
        run_training(config)
        end = load_file(checkpoints(tmp_path / str(norm))[-1] / "draft.safetensors")
        moved[norm] = float(torch.cat([(end[name] - start[name]).flatten() for name in start]).double().norm())
    assert log(tmp_path / "0.01")[0]["grad_norm"] > 0.1
    assert moved[1e-2] == pytest.approx(1e-5, rel=0.05)
    assert moved[1e-2] / moved[1e-3] == pytest.approx(10, rel=0.05)


def test_max_steps_ends_the_run_and_the_schedule(tmp_path: Path) -> None:
    store = write_random_store(tmp_path / "store", count=6)
    result = run_training(train_config(store, tmp_path / "run", epochs=4, max_steps=8))
    rates = [record["lr"] for record in log(tmp_path / "run")]
    assert result.steps == len(rates) == 8
    assert rates[-1] == 0.0 < rates[-2]


def test_fault_03_a_window_without_terms_takes_no_step_and_is_counted(tmp_path: Path) -> None:
    store = write_random_store(tmp_path / "store", [(8, (7, 8)), (8, (2, 8)), (8, (2, 8))])
    optim = {"schedule": "constant", "warmup_fraction": 0.0}
    config = train_config(store, tmp_path / "run", save_every=1, epochs=2, keep_checkpoints=9, optim=optim)
    result = run_training(config)
    skipped = log(tmp_path / "run", "skip")
    assert (result.steps, result.skipped) == (6, 2)
    assert [(record["epoch"], record["samples"]) for record in skipped] == [(0, ["s00"]), (1, ["s00"])]
    weights = {
        step: load_file(path / "draft.safetensors") for step, path in enumerate(checkpoints(tmp_path / "run"), 1)
    }
    for step in range(2, 7):
        changed = not torch.equal(weights[step]["fc.weight"], weights[step - 1]["fc.weight"])
        assert changed == (step not in [record["step"] for record in skipped])
        assert all(torch.isfinite(value).all() for value in weights[step].values())


@pytest.mark.parametrize(("field", "what"), [("last_hidden_states", "loss"), ("aux_hidden_states", "gradient norm")])
def test_a_value_that_is_not_finite_stops_with_its_samples_before_weights_change(
    tmp_path: Path, field: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overflowing(sample: StoredSample) -> StoredSample:
        states = getattr(sample, field)
        return replace(sample, **{field: torch.full_like(states, 3e38)}) if sample.id == "s02" else sample

    def step(*_: object) -> None:
        raise AssertionError("the weights were touched")

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    store = write_random_store(tmp_path / "store", [(8, (2, 8))] * 4, change=overflowing)
    with pytest.raises(ProblemsError, match=rf"train\.not_finite.*the {what} of step 1 is nan.*s02") as caught:
        run_training(train_config(store, tmp_path / "run", batch_size=4))
    assert all(name in str(caught.value) for name in ("s00", "s01", "s03"))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_held_out_samples_are_evaluated_before_every_epoch_end_and_the_best_is_kept(tmp_path: Path) -> None:
    store = write_random_store(tmp_path / "store", count=10)
    config = train_config(store, tmp_path / "run", epochs=4, eval_fraction=0.2, keep_checkpoints=1)
    result = run_training(config)
    evaluations = log(tmp_path / "run", "eval")
    assert [record["step"] for record in evaluations] == [0, 8, 16, 24, 32]
    best = max(evaluations[1:], key=lambda record: (record["acceptance_length"], -record["loss"]))
    pointer = read_json(tmp_path / "run" / "best.json", "best")
    assert pointer == {
        "checkpoint": f"step-{best['step']:08}",
        "acceptance_length": best["acceptance_length"],
        "loss": best["loss"],
    }
    kept = [path.name for path in checkpoints(tmp_path / "run")]
    assert kept == sorted({pointer["checkpoint"], "step-00000032"})
    assert result.best_checkpoint.name == pointer["checkpoint"]
    assert result.acceptance_length_before == evaluations[0]["acceptance_length"]


def test_evaluation_equals_the_training_loss_on_the_same_samples(tmp_path: Path) -> None:
    store = write_random_store(tmp_path / "store", count=6)
    config = train_config(store, tmp_path / "run", eval_dataset=str(store), batch_size=6, max_steps=1)
    run_training(config)
    training, evaluation = log(tmp_path / "run")[0], log(tmp_path / "run", "eval")[0]
    assert evaluation["step"] == 0
    assert evaluation["loss"] == pytest.approx(training["loss"], abs=1e-5)
    assert evaluation["step_accuracy"] == pytest.approx(training["step_accuracy"])


def test_bf16_on_a_cpu_is_honoured_with_float32_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = write_random_store(tmp_path / "store", count=4)
    run_training(train_config(store, tmp_path / "exact", max_steps=2))
    AcceleratorState._reset_state(reset_partial_state=True)
    run_training(train_config(store, tmp_path / "bf16", max_steps=2, mixed_precision="bf16"))
    assert all(
        value.dtype == torch.float32
        for value in load_file(checkpoints(tmp_path / "bf16")[-1] / "draft.safetensors").values()
    )
    losses = [log(tmp_path / name)[0]["loss"] for name in ("exact", "bf16")]
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=0.02)
    assert "mixed_precision=no is usually faster" in capsys.readouterr().err


def test_the_next_window_is_begun_while_this_one_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = write_random_store(tmp_path / "store", count=6)
    taken: list[bool] = []
    original = Ahead.take

    def take(self: Ahead) -> list[DraftBatch]:
        taken.append(self._next is not None)
        batches = original(self)
        assert all(batch.planned is not None for batch in batches)
        return batches

    monkeypatch.setattr(Ahead, "take", take)
    run_training(train_config(store, tmp_path / "run", batch_size=2, epochs=2))
    assert taken == [False, True, True] * 2
