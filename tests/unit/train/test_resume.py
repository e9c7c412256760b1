"""A run that is stopped anywhere and started again equals one that was never stopped, bit for bit."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import eagle3.data.loader as loader
from eagle3.config import TrainConfig, dump_config
from eagle3.data.dealing import Window
from eagle3.errors import ProblemsError
from eagle3.files import only_writer, read_json
from eagle3.serve.saved_draft import load_run
from eagle3.train.checkpoint import list_checkpoints
from eagle3.train.run_folder import find_resume_point
from eagle3.train.setup import make_setup
from eagle3.train.tracking import TIMED, read_log
from eagle3.train.trainer import Trainer, run_training
from tests.stores import rewrite_manifest, train_config, write_random_store

ROOT = Path(__file__).parents[3]


def assert_same_run(run: Path, whole: Path) -> None:
    """Weights, moments, state and log but for times."""
    for name in ("draft.safetensors", "optimizer.safetensors"):
        mine, theirs = (load_file(list_checkpoints(path)[-1] / name) for path in (run, whole))
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    states = [read_json(list_checkpoints(path)[-1] / "state.json", "state") for path in (run, whole)]
    assert states[0] == states[1]
    mine, theirs = (
        [{key: value for key, value in record.items() if key not in TIMED} for record in read_log(path / "log.jsonl")]
        for path in (run, whole)
    )
    assert mine == theirs
    assert [path.name for path in list_checkpoints(run)] == [path.name for path in list_checkpoints(whole)]


def start_child(config: TrainConfig, folder: Path, before: str = "") -> subprocess.Popen[bytes]:
    (folder / "config.yaml").write_text(dump_config(config))
    code = (
        "import os, signal, sys, torch\n"
        "from pathlib import Path\n"
        "from eagle3.config import TrainConfig, load_config\n"
        "from eagle3.train.trainer import run_training\n"
        f"{before}\n"
        "run_training(load_config(TrainConfig, Path(sys.argv[1])))\n"
    )
    command = [sys.executable, "-c", code, str(folder / "config.yaml")]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)


class Stopped(Exception):
    pass


def assert_stops_change_nothing(
    store: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, stops: tuple[int, ...], settings: dict[str, Any]
) -> None:
    """A run that is stopped after these steps, `run`, is one that nobody stopped, `whole`."""
    for steps in stops:
        with monkeypatch.context() as patch, pytest.raises(Stopped):
            stop_after(steps, patch)
            run_training(config_for(store, folder / "run", **settings))
    run_training(config_for(store, folder / "run", **settings))
    run_training(config_for(store, folder / "whole", **settings))
    assert_same_run(folder / "run", folder / "whole")


def stop_after(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the trainer stop like a crash once step `steps` is logged, before anything is saved."""
    original = Trainer._evaluate_and_save

    def stopping(self: Trainer) -> None:
        if self.state.step == steps:
            raise Stopped
        original(self)

    monkeypatch.setattr(Trainer, "_evaluate_and_save", stopping)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return write_random_store(tmp_path / "store", [(8, (2, 8)), (9, (8, 9)), (12, (3, 12)), (7, (1, 7))] * 3)


def config_for(store: Path, output: Path, **values: object) -> TrainConfig:
    settings: dict[str, object] = {"batch_size": 2, "epochs": 3, "save_every": 2, "eval_every": 3, "eval_fraction": 0.2}
    return train_config(store, output, **{**settings, **values})


def test_killed_anywhere_it_goes_on_as_if_nothing_had_happened(store: Path, tmp_path: Path) -> None:
    lines = random.randint(2, 30)
    print(f"killing after {lines} log lines")
    config = config_for(store, tmp_path / "run", epochs=6)
    child = start_child(config, tmp_path)
    log = tmp_path / "run" / "log.jsonl"
    while child.poll() is None and (not log.exists() or len(read_log(log)) < lines):
        time.sleep(0.002)
    child.kill()
    assert child.wait() == -signal.SIGKILL
    run_training(config)
    run_training(config_for(store, tmp_path / "whole", epochs=6))
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_killed_in_the_middle_of_a_checkpoint_it_goes_on_from_the_one_before(store: Path, tmp_path: Path) -> None:
    kill_in_third_checkpoint = (
        "import eagle3.train.checkpoint as checkpoint\n"
        "original, calls = checkpoint.save_tensors, []\n"
        "def save_tensors(tensors, path):\n"
        "    original(tensors, path)\n"
        "    calls.append(path)\n"
        "    if len(calls) == 6:\n"
        "        os.truncate(path, path.stat().st_size // 2)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "checkpoint.save_tensors = save_tensors\n"
    )
    config = config_for(store, tmp_path / "run")
    child = start_child(config, tmp_path, kill_in_third_checkpoint)
    assert child.wait(120) == -signal.SIGKILL
    leftovers = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if path.suffix == ".tmp"]
    assert len(leftovers) == 1
    assert len(list_checkpoints(tmp_path / "run")) == 2
    run_training(config)
    run_training(config_for(store, tmp_path / "whole"))
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert not list((tmp_path / "run" / "checkpoints").glob("*.tmp"))


def test_fault_14_a_resumed_run_sees_the_samples_of_an_uninterrupted_one(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[str] = []
    original = Trainer._step

    def step(self: Trainer, window: Window, batches: list[loader.DraftBatch], ahead: loader.Ahead) -> str:
        trained.extend(name for batch in batches for name in batch.sample_ids)
        return original(self, window, batches, ahead)

    monkeypatch.setattr(Trainer, "_step", step)
    settings = {"eval_fraction": 0.0, "save_every": 1, "eval_every": None}
    run_training(config_for(store, tmp_path / "whole", **settings))
    whole, trained[:] = list(trained), []
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        stop_after(10, patch)  # six batches in an epoch: the fourth of epoch 1 is trained, its checkpoint missing
        run_training(config_for(store, tmp_path / "run", **settings))
    before = trained[: 9 * 2]
    trained.clear()
    run_training(config_for(store, tmp_path / "run", **settings))
    assert before + trained == whole
    epochs = [whole[begin : begin + 12] for begin in (0, 12, 24)]
    assert all(len(set(epoch)) == 12 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_without_a_checkpoint_yet_it_starts_again(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        stop_after(1, patch)
        run_training(config_for(store, tmp_path / "run"))
    run_training(config_for(store, tmp_path / "run"))
    run_training(config_for(store, tmp_path / "whole"))
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_finished_run_is_only_reported_again(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run_training(config_for(store, tmp_path / "run"))
    monkeypatch.setattr(Trainer, "_step", lambda *_: pytest.fail("trained again"))
    assert run_training(config_for(store, tmp_path / "run")) == first
    starts = read_json(tmp_path / "run" / "provenance.json", "provenance")["starts"]
    assert [start["step"] for start in starts] == [0, first.steps]


def test_every_other_setting_is_listed_and_nothing_is_touched(store: Path, tmp_path: Path) -> None:
    run_training(config_for(store, tmp_path / "run"))
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    changed = config_for(
        store, tmp_path / "run", epochs=4, max_steps=5, ttt={"steps": 2}, draft={"rope": {"rope_theta": 5.0}}
    )
    with pytest.raises(ProblemsError) as caught:
        run_training(changed)
    messages = [problem.message for problem in caught.value.problems]
    for key in ("epochs is 3 there, 4 now", "max_steps is not set there, 5 now", "ttt.steps is 3 there, 2 now"):
        assert key in messages
    assert any(message.startswith("draft.rope") for message in messages)
    assert {path: path.read_bytes() for path in before} == before


def test_output_indices_are_not_mistaken_for_output(store: Path, tmp_path: Path) -> None:
    run_training(config_for(store, tmp_path / "run"))
    text = (tmp_path / "run" / "config.yaml").read_text()
    (tmp_path / "run" / "config.yaml").write_text(text.replace("output_indices:\n- 0\n", "output_indices:\n- 1\n"))
    with pytest.raises(ProblemsError, match="output_indices is"):
        run_training(config_for(store, tmp_path / "run"))


def test_where_things_lie_may_change(store: Path, tmp_path: Path) -> None:
    first = run_training(config_for(store, tmp_path / "run"))
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    config = config_for(
        store.rename(tmp_path / "elsewhere"), moved, keep_checkpoints=2, tracking={"log_every": 5, "project": "x"}
    )
    assert run_training(config).steps == first.steps


def test_other_data_is_refused(store: Path, tmp_path: Path) -> None:
    run_training(config_for(store, tmp_path / "run"))
    other = write_random_store(tmp_path / "other", seed=1)
    with pytest.raises(ProblemsError, match=r"run\.other_data"):
        run_training(config_for(other, tmp_path / "run"))


def test_another_number_of_processes_is_refused(store: Path, tmp_path: Path) -> None:
    run_training(config_for(store, tmp_path / "run"))
    state = list_checkpoints(tmp_path / "run")[-1] / "state.json"
    state.write_text(state.read_text().replace('"processes": 1', '"processes": 2'))
    with pytest.raises(ProblemsError, match="was trained by 2 processes, this start has 1"):
        run_training(config_for(store, tmp_path / "run"))


@pytest.mark.parametrize(
    ("before", "now", "refused"),
    [  # processes, settings besides batch_size 2 and accumulate 2: of the run, of this start
        ((2, {}), (4, {"accumulate": 1}), ""),
        ((2, {}), (1, {"batch_size": 4}), ""),
        ((2, {}), (1, {"accumulate": 4}), ""),
        ((2, {}), (8, {"batch_size": 1, "accumulate": 1}), ""),
        ((2, {"batch_tokens": 20}), (1, {"batch_tokens": 20, "accumulate": 4}), ""),
        ((2, {}), (1, {}), "was trained by 2 processes, this start has 1: its steps would have other rows"),
        ((2, {}), (4, {}), "was trained by 2 processes, this start has 4"),
        ((2, {}), (3, {"accumulate": 1}), "accumulate is 2 there, 1 now; was trained by 2 processes, this start has 3"),
        ((2, {}), (2, {"batch_size": 1}), "batch_size is 2 there, 1 now"),
        ((2, {}), (1, {"batch_size": 8}), "batch_size is 2 there, 8 now; this start has 1: its steps would have other"),
        ((2, {}), (1, {"batch_size": 8, "accumulate": 1}), ""),
        ((2, {}), (1, {"accumulate": 4, "pack": True}), "pack is False there, True now"),
        ((2, {}), (1, {"accumulate": 4, "seed": 7}), "seed is 0 there, 7 now"),
        ((2, {"batch_tokens": 20}), (1, {"batch_tokens": 40}), "batch_tokens is 20 there, 40 now"),
        ((2, {"batch_tokens": 20}), (1, {"batch_tokens": 20}), "was trained by 2 processes, this start has 1"),
    ],
)
def test_another_number_of_processes_goes_on_only_where_each_step_keeps_its_rows(
    store: Path, tmp_path: Path, before: tuple[int, dict[str, object]], now: tuple[int, dict[str, object]], refused: str
) -> None:
    run, (processes, settings) = tmp_path / "run", before

    def config_of(settings: dict[str, object]) -> TrainConfig:
        rows = {"accumulate": 2} if "batch_tokens" in settings else {"batch_size": 2, "accumulate": 2}
        values = {"epochs": 1, "save_every": 2, "eval_fraction": 0.2, **rows, **settings}
        return train_config(store, run, **values)

    run_training(config_of(settings))
    state = list_checkpoints(run)[-1] / "state.json"
    state.write_text(state.read_text().replace('"processes": 1', f'"processes": {processes}'))
    config = config_of(now[1])
    if not refused:
        assert find_resume_point(run, config, make_setup(config, now[0]), now[0]) == state.parent
        return
    with pytest.raises(ProblemsError, match="cannot resume") as caught:
        find_resume_point(run, config, make_setup(config, now[0]), now[0])
    messages = [problem.message for problem in caught.value.problems]
    assert all(any(part in message for message in messages) for part in refused.split("; ")), messages
    assert {problem.kind for problem in caught.value.problems} <= {
        "run.other_config",
        "run.other_processes",
        "contract.draft_vocab_digest",
    }


def test_the_rows_of_a_step_may_be_divided_otherwise_when_resuming(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        stop_after(5, patch)
        run_training(config_for(store, tmp_path / "run"))
    with pytest.raises(ProblemsError, match="batch_size is 2 there, 1 now"):
        run_training(config_for(store, tmp_path / "run", batch_size=1))
    run_training(config_for(store, tmp_path / "run", batch_size=1, accumulate=2))
    run_training(config_for(store, tmp_path / "whole"))
    mine, theirs = ([record["loss"] for record in read_log(tmp_path / run / "log.jsonl")] for run in ("run", "whole"))
    assert mine == pytest.approx(theirs, abs=1e-5)


def test_a_damaged_newest_checkpoint_is_refused_by_name_and_deleting_it_helps(store: Path, tmp_path: Path) -> None:
    run_training(config_for(store, tmp_path / "run"))
    run_training(config_for(store, tmp_path / "whole"))
    newest = list_checkpoints(tmp_path / "run")[-1]
    file = newest / "draft.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ProblemsError, match=f"delete {newest}"):
        run_training(config_for(store, tmp_path / "run"))
    for path in newest.iterdir():
        path.unlink()
    newest.rmdir()
    run_training(config_for(store, tmp_path / "run"))
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_folder_that_is_no_run_is_refused(store: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("mine")
    with pytest.raises(ProblemsError, match=r"run\.not_a_run"):
        run_training(config_for(store, tmp_path / "run"))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.txt"]


def test_bf16_resumes_exactly_too(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_stops_change_nothing(store, tmp_path, monkeypatch, (5,), {"mixed_precision": "bf16"})


def test_noise_resumes_exactly_and_evaluations_have_none(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"ttt": {"steps": 3, "hidden_noise": 0.3}}
    assert_stops_change_nothing(store, tmp_path, monkeypatch, (3, 5), settings)
    run_training(config_for(store, tmp_path / "plain", max_steps=1))
    run_training(config_for(store, tmp_path / "noisy", max_steps=1, **settings))
    plain, noisy = (read_log(tmp_path / name / "log.jsonl") for name in ("plain", "noisy"))
    before = [{key: value for key, value in log[0].items() if key != "time"} for log in (plain, noisy)]
    assert before[0] == before[1] and noisy[0]["kind"] == "eval", "before the first step"
    assert noisy[1]["loss"] != plain[1]["loss"]


@pytest.mark.parametrize("moments", ["bfloat16", "float8"])
def test_rounded_moments_resume_exactly_and_keep_their_types(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moments: str
) -> None:
    settings = {"optim": {"learning_rate": 1e-2, "moments": moments}, "draft": {"intermediate_size": 300}}
    assert_stops_change_nothing(store, tmp_path, monkeypatch, (3, 5, 8), settings)
    stored = load_file(list_checkpoints(tmp_path / "run")[-1] / "optimizer.safetensors")
    wide = {name for name, value in stored.items() if value.numel() >= 4096}
    assert len(wide) == 6  # both moments of the MLP's three matrices
    assert {str(stored[name].dtype) for name in wide} == {f"torch.{moments}".replace("float8", "float8_e4m3fn")}


def test_another_type_of_moments_is_refused(store: Path, tmp_path: Path) -> None:
    run_training(config_for(store, tmp_path / "run", epochs=1))
    with pytest.raises(ProblemsError, match=r"optim\.moments is 'float32' there, 'float8' now"):
        run_training(config_for(store, tmp_path / "run", epochs=1, optim={"moments": "float8"}))


def test_a_second_trainer_in_the_same_run_is_refused(store: Path, tmp_path: Path) -> None:
    config = config_for(store, tmp_path / "run")
    with only_writer(tmp_path / "run", "writer.lock"), pytest.raises(ProblemsError, match=r"disk\.locked"):
        run_training(config)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["writer.lock"]
    run_training(config)  # what a killed start leaves is no other run


def test_a_file_as_output_is_refused(store: Path, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(ProblemsError, match=r"run\.not_a_run.*is a file"):
        run_training(config_for(store, tmp_path / "run"))


@pytest.mark.parametrize("text", ["[]", "{}", '{"run_id": "a", "starts": 1}', '{"run_id": 1, "starts": []}'])
def test_a_damaged_provenance_is_refused_by_name(store: Path, tmp_path: Path, text: str) -> None:
    config = config_for(store, tmp_path / "run", epochs=1)
    run_training(config)
    (tmp_path / "run" / "provenance.json").write_text(text)
    with pytest.raises(ProblemsError, match=r"provenance\.json"):
        run_training(config)


@pytest.mark.parametrize("value", [None, "abc", ["a"], [10**30], [True]])
def test_a_store_whose_special_tokens_are_damaged_is_refused(store: Path, tmp_path: Path, value: object) -> None:
    manifest = read_json(store / "manifest.json", "manifest")
    manifest["settings"]["keep_ids"] = value
    rewrite_manifest(store / "manifest.json", manifest)
    with pytest.raises(ProblemsError, match=r"store\.keep_ids"):
        run_training(config_for(store, tmp_path / "run", draft={"draft_vocab_size": 8}))


def test_a_best_file_without_a_checkpoint_is_refused(store: Path, tmp_path: Path) -> None:
    run_training(config_for(store, tmp_path / "run", epochs=1))
    (tmp_path / "run" / "best.json").write_text("{}")
    with pytest.raises(ProblemsError, match=r"run\.checkpoint"):
        load_run(tmp_path / "run")
