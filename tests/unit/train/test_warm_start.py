"""`init_from`: a run that starts from a drafter has its numbers and its draft vocab."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle3.config import ServeConfig, TrainConfig
from eagle3.data.store import StoredSample
from eagle3.errors import ProblemsError
from eagle3.files import read_json, sha256_file
from eagle3.serve.export import export_run
from eagle3.train.checkpoint import list_checkpoints
from eagle3.train.setup import make_setup
from eagle3.train.tracking import read_log
from eagle3.train.trainer import run_training
from eagle3.wiring.checks import check_checkpoint
from eagle3.wiring.contract import WiringContract
from tests.rings import ring_config, ring_plan, ring_samples, write_ring
from tests.stores import VOCAB, train_config, write_random_store
from tests.unit.train.warm_cases import evaluations, make_first_run, warm_config, write_as_another_tool


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_first_run(tmp_path_factory.mktemp("first"))


def refused(config: TrainConfig) -> list[str]:
    """The kinds of a run that is refused before anything is written."""
    with pytest.raises(ProblemsError) as caught:
        run_training(config)
    assert not Path(config.output).exists()
    return [problem.kind for problem in caught.value.problems]


@pytest.mark.parametrize("source", ["export", "run", "checkpoint", "specforge", "sharded"])
def test_before_its_first_step_it_has_the_numbers_the_other_run_ended_with(
    first: Path, tmp_path: Path, source: str
) -> None:
    start = {"export": first / "export", "run": first / "run", "checkpoint": list_checkpoints(first / "run")[-1]}
    if source == "specforge":
        start[source] = write_as_another_tool(first / "export", tmp_path / "other", t2d=None)
    if source == "sharded":
        start[source] = write_as_another_tool(first / "export", tmp_path / "other", "model.layers.0.", shards=3)
    ended, best = evaluations(first / "run")[-1], read_json(first / "run" / "best.json", "best")
    assert best["checkpoint"] == list_checkpoints(first / "run")[-1].name

    run_training(warm_config(first, tmp_path / "run", start[source], max_steps=2))

    begins = evaluations(tmp_path / "run")[0]
    assert begins["step"] == 0 and ended["step"] == 6
    assert begins["loss"] == pytest.approx(ended["loss"], abs=1e-6)
    assert begins["acceptance_length"] == pytest.approx(ended["acceptance_length"], abs=1e-6)
    assert begins["loss"] < evaluations(first / "run")[0]["loss"] - 0.01


def test_the_schedule_begins_anew(first: Path, tmp_path: Path) -> None:
    values = {"optim": {"learning_rate": 1e-2, "warmup_fraction": 0.5}, "epochs": 2}
    run_training(warm_config(first, tmp_path / "warm", first / "export", **values))
    run_training(train_config(first / "store", tmp_path / "cold", eval_fraction=0.25, batch_size=4, **values))
    rates = [
        [record["lr"] for record in read_log(tmp_path / name / "log.jsonl") if record["kind"] == "train"]
        for name in ("warm", "cold")
    ]
    assert rates[0] == rates[1] and rates[0][0] < rates[0][1]


def test_its_export_passes_the_wiring_check_and_its_contract_has_the_kept_draft_vocab(
    first: Path, tmp_path: Path
) -> None:
    run_training(warm_config(first, tmp_path / "run", first / "export", max_steps=1))
    export_run(ServeConfig(run=str(tmp_path / "run"), output=str(tmp_path / "out")))
    assert check_checkpoint(tmp_path / "out", dataset=first / "store") == []
    assert WiringContract.load(tmp_path / "out") == WiringContract.load(first / "export")


def test_provenance_says_what_it_started_from_and_keeps_saying_so(first: Path, tmp_path: Path) -> None:
    config = warm_config(first, tmp_path / "run", first / "export", epochs=2, max_steps=3)
    for _ in range(2):
        run_training(config)
        said = read_json(tmp_path / "run" / "provenance.json", "provenance")["init_from"]
        assert said == {
            "folder": str(first / "export"),
            "written_by": "eagle3",
            "weights": {"model.safetensors": sha256_file(first / "export" / "model.safetensors")},
            "draft_vocab_digest": WiringContract.load(first / "run").draft_vocab_digest,
            "head_rows_kept": 24,
        }


def test_the_draft_vocab_is_the_checkpoints_and_its_coverage_of_this_dataset_is_said(
    first: Path, tmp_path: Path
) -> None:
    kept = set(make_setup(warm_config(first, tmp_path / "run", first / "export")).vocab.ids.tolist())
    absent = next(token for token in range(VOCAB) if token not in kept)
    present = next(iter(kept))

    def half_known(sample: StoredSample) -> StoredSample:
        ids = torch.full_like(sample.input_ids, absent)
        ids[sample.input_ids.numel() // 2 :] = present
        return replace(sample, input_ids=ids, loss_mask=torch.ones_like(sample.loss_mask))

    store = write_random_store(tmp_path / "store", [(8, (0, 8))] * 8, change=half_known)
    setup = make_setup(warm_config(first, tmp_path / "run", first / "export", dataset=str(store)))
    assert set(setup.vocab.ids.tolist()) == kept
    assert "24 of 32 tokens, 50.00% of the supervised tokens; kept as it is" in " ".join(setup.notes)


def test_a_rebuilt_draft_vocab_moves_the_rows_of_kept_ids_and_takes_the_targets_for_new_ones(
    first: Path, tmp_path: Path
) -> None:
    only = [0, 1, *range(20, VOCAB)]

    def change(sample: StoredSample) -> StoredSample:
        return replace(sample, input_ids=20 + sample.input_ids % 12)

    store = write_random_store(tmp_path / "store", count=8, change=change)
    draft = {"draft_vocab_size": 14, "init": "target_head"}
    config = warm_config(first, tmp_path / "run", first / "export", dataset=str(store), rebuild_vocab=True, draft=draft)
    setup = make_setup(config)
    assert setup.vocab.ids.tolist() == only
    stored, head = load_file(first / "export" / "model.safetensors"), setup.module.model.lm_head.weight
    target = load_file(store / "target_head.safetensors")["lm_head.weight"]
    old = (stored["d2t"] + torch.arange(24)).tolist()
    for row, token in enumerate(only):
        expected = stored["lm_head.weight"][old.index(token)] if token in old else target[token]
        assert torch.equal(head[row], expected), token
    assert torch.equal(setup.module.model.fc.weight, stored["fc.weight"])
    count = len(set(only) & set(old))
    assert 0 < count < 14
    assert f"counted anew: {count} of the 24 rows of the head are kept, {14 - count} are new" in " ".join(setup.notes)
    run_training(config.model_copy(update={"max_steps": 1}))
    origin = read_json(tmp_path / "run" / "provenance.json", "provenance")["init_from"]
    assert origin["head_rows_kept"] == count


def test_provenance_names_the_checkpoint_of_a_run(first: Path, tmp_path: Path) -> None:
    last = list_checkpoints(first / "run")[-1]
    weights = {last: "draft.safetensors", first / "run": f"checkpoints/{last.name}/draft.safetensors"}
    for start, name in weights.items():
        origin = make_setup(warm_config(first, tmp_path / "run", start)).origin["init_from"]
        assert origin["weights"] == {name: sha256_file(last / "draft.safetensors")}


def test_a_ring_is_trained_on_from_a_drafter_too(first: Path, tmp_path: Path) -> None:
    samples = ring_samples(8)
    config = ring_config(tmp_path / "ring", tmp_path / "run", draft={}, init_from=str(first / "export"))
    write_ring(tmp_path / "ring", ring_plan(samples, shards=100), samples)
    setup = make_setup(config)
    assert setup.vocab.digest == WiringContract.load(first / "export").draft_vocab_digest
    head = load_file(first / "export" / "model.safetensors")["lm_head.weight"]
    assert torch.equal(setup.module.model.lm_head.weight, head)


def test_half_precision_weights_become_float32_master_copies(first: Path, tmp_path: Path) -> None:
    export_run(ServeConfig(run=str(first / "run"), output=str(tmp_path / "half"), checkpoint="last"))
    setup = make_setup(warm_config(first, tmp_path / "run", tmp_path / "half"))
    stored = load_file(tmp_path / "half" / "model.safetensors")
    for name, weight in setup.module.model.trainable_state().items():
        assert stored[name].dtype == torch.bfloat16 and weight.dtype == torch.float32
        assert torch.equal(weight, stored[name].float())


def test_an_embedding_in_the_checkpoint_is_left_where_it_is_but_its_shape_is_checked(
    first: Path, tmp_path: Path
) -> None:
    good = write_as_another_tool(first / "export", tmp_path / "good", embed_tokens__weight=torch.full((VOCAB, 16), 7.0))
    setup = make_setup(warm_config(first, tmp_path / "run", good))
    target = load_file(first / "store" / "target_head.safetensors")["embed_tokens.weight"]
    assert torch.equal(setup.module.model.embed_tokens.weight, target)
    bad = write_as_another_tool(first / "export", tmp_path / "bad", embed_tokens__weight=torch.ones(VOCAB, 8))
    assert refused(warm_config(first, tmp_path / "run", bad)) == ["tensor.shape"]


def test_a_resumed_run_does_not_read_the_folder_again(first: Path, tmp_path: Path) -> None:
    start = write_as_another_tool(first / "export", tmp_path / "start")
    config = warm_config(first, tmp_path / "run", start, epochs=2, save_every=1, keep_checkpoints=9)
    run_training(config)
    whole = load_file(list_checkpoints(tmp_path / "run")[-1] / "draft.safetensors")
    for folder in list_checkpoints(tmp_path / "run")[2:]:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    for file in start.iterdir():
        file.unlink()
    start.rmdir()

    run_training(config)

    resumed = load_file(list_checkpoints(tmp_path / "run")[-1] / "draft.safetensors")
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    assert read_json(tmp_path / "run" / "provenance.json", "provenance")["starts"][-1]["step"] == 2


def test_killed_before_its_first_checkpoint_it_starts_from_the_folder_once_more(first: Path, tmp_path: Path) -> None:
    config = warm_config(first, tmp_path / "run", first / "export", max_steps=1)
    run_training(config)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    run_training(config)
    begins = [record for record in evaluations(tmp_path / "run") if record["step"] == 0]
    assert begins[-1] == begins[0] and begins[0]["loss"] == evaluations(first / "run")[-1]["loss"]


@pytest.mark.parametrize(
    ("change", "key"),
    [({"init_from": "elsewhere"}, "init_from"), ({"init_from": None}, "init_from"),
     ({"rebuild_vocab": True}, "rebuild_vocab"), ({"init_layers": [0, 2, 5]}, "init_layers")],
)  # fmt: skip
def test_the_keys_belong_to_the_run(first: Path, tmp_path: Path, change: dict[str, object], key: str) -> None:
    run_training(warm_config(first, tmp_path / "run", first / "export", max_steps=1))
    with pytest.raises(ProblemsError) as caught:
        run_training(warm_config(first, tmp_path / "run", first / "export", max_steps=1, **change))
    assert any(item.kind == "run.other_config" and item.message.startswith(key) for item in caught.value.problems)


def test_a_cold_run_cannot_be_made_a_warm_one(first: Path, tmp_path: Path) -> None:
    run_training(train_config(first / "store", tmp_path / "run", max_steps=1, eval_fraction=0.25, batch_size=4))
    with pytest.raises(ProblemsError, match="init_from is not set there"):
        run_training(warm_config(first, tmp_path / "run", first / "export", max_steps=1))


def test_keys_that_say_how_to_start_need_something_to_start_from(tmp_path: Path) -> None:
    with pytest.raises(ProblemsError, match="init_layers and rebuild_vocab without init_from"):
        train_config(tmp_path, tmp_path, init_layers=[1, 2, 3], rebuild_vocab=True)
