"""Training from a ring: the losses of a store, within the ring's bytes, through kills on either side, bit for bit."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle3.data.batch_plan import BatchPlan
from eagle3.data.ring_folder import listed_bytes, read_reader
from eagle3.data.ring_format import RingPlan, load_ring
from eagle3.data.ring_windows import RingWindows
from eagle3.data.store import StoreWriter
from eagle3.errors import ProblemsError
from eagle3.files import only_writer, read_json
from eagle3.train import saver
from eagle3.train.checkpoint import list_checkpoints
from eagle3.train.ring_feed import RingFeed
from eagle3.train.tracking import read_log
from eagle3.train.trainer import Trainer, run_training
from tests.children import in_a_child
from tests.rings import (
    head,
    of_type,
    other_masks,
    ring_config,
    ring_plan,
    ring_samples,
    slowly,
    without_ring,
    write_ring,
)
from tests.stores import TARGET_CONFIG, write_random_store

from .test_resume import Stopped, stop_after

SAMPLES = ring_samples()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., int]]:
    """Starts a writer of the ring `tmp_path / "ring"` in a process of its own; kills what is left of them."""
    children: list[int] = []

    def begin(plan: RingPlan, before: Callable[[int], object] = lambda number: None, wait_seconds: float = 20) -> int:
        child = in_a_child(lambda: write_ring(tmp_path / "ring", plan, SAMPLES, wait_seconds, before))
        children.append(child)
        return child

    yield begin
    for child in children:
        try:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        except ChildProcessError:  # it was waited for
            continue
        except ProcessLookupError:
            continue


def said(tmp_path: Path) -> tuple[int, bool]:
    state = read_reader(tmp_path / "ring", 99)
    return state.released, state.finished


def kinds(error: ProblemsError) -> set[str]:
    return {problem.kind for problem in error.problems}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbed, from a ring with room for all."""
    folder = tmp_path_factory.mktemp("whole")
    write_ring(folder / "ring", ring_plan(SAMPLES, shards=99), SAMPLES)
    run_training(ring_config(folder / "ring", folder / "run"))
    return folder / "run"


ROWS = {"batch_size": 2}
PACKED = {"batch_size": 2, "pack": True, "max_length": 32}


@pytest.mark.parametrize(
    ("batches", "dtype"), [(ROWS, "float32"), (PACKED, "float8_e4m3fn"), ({"batch_tokens": 48}, "float32")]
)
def test_a_ring_trains_as_a_store_with_the_same_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batches: dict[str, object], dtype: str
) -> None:
    plan, samples = ring_plan(SAMPLES, dtype=dtype), of_type(SAMPLES, dtype)
    writer = in_a_child(lambda: write_ring(tmp_path / "ring", plan, samples))
    config = ring_config(tmp_path / "ring", tmp_path / "run", **batches)
    run_training(config)
    assert os.waitpid(writer, 0)[1] == 0

    with StoreWriter(tmp_path / "store", plan.contract, {"keep_ids": [0, 1]}, TARGET_CONFIG, head()) as store:
        store.write_shard(samples)
    windows = RingWindows(plan, config.max_length, config.batch_size, pack=config.packs, row_tokens=config.batch_tokens)
    in_store = [sample for shard in plan.shards for sample in shard.samples]
    epochs = [
        [[[[[in_store[place] for place in row] for row in rows] for rows in micro] for micro in window] for window in e]
        for e in windows.epochs
    ]
    monkeypatch.setattr(BatchPlan, "epoch", lambda self, number: epochs[number])
    monkeypatch.setattr(BatchPlan, "steps_per_epoch", len(epochs[0]))
    run_training(without_ring(config, tmp_path / "store", tmp_path / "stored"))

    assert len(epochs[0]) == len(epochs[1]) and epochs[0] != epochs[1]
    mine, theirs = (read_log(tmp_path / run / "log.jsonl") for run in ("run", "stored"))
    assert [record["loss"] for record in mine] == [record["loss"] for record in theirs] and len(mine) > 7
    weights = [load_file(list_checkpoints(tmp_path / run)[-1] / "draft.safetensors") for run in ("run", "stored")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])


def test_the_ring_keeps_within_its_bytes_and_is_empty_in_the_end(tmp_path: Path, start: Callable[..., int]) -> None:
    plan = ring_plan(SAMPLES)
    assert plan.ends[-1] > 2 * plan.max_bytes
    writer, most, ended = start(plan), [0], threading.Event()

    def look() -> None:
        while not ended.wait(0.001):
            if (tmp_path / "ring").is_dir():
                files = [path for path in (tmp_path / "ring").glob("shard-*.safetensors*")]
                sizes = []
                for path in files:
                    try:
                        sizes.append(path.stat().st_size)
                    except FileNotFoundError:
                        continue
                most.append(sum(sizes))

    looker = threading.Thread(target=look)
    looker.start()
    run_training(ring_config(tmp_path / "ring", tmp_path / "run"))
    ended.set()
    looker.join()

    assert plan.max_bytes // 2 < max(most) <= plan.max_bytes
    assert os.waitpid(writer, 0)[1] == 0
    assert listed_bytes(tmp_path / "ring") == 0 and said(tmp_path) == (14, True)


@pytest.mark.parametrize("unit", [1, 3])
def test_the_smallest_ring_that_is_accepted_comes_to_its_end(
    tmp_path: Path, start: Callable[..., int], unit: int
) -> None:
    plan = ring_plan(SAMPLES, unit=unit)
    config = ring_config(tmp_path / "ring", tmp_path / "run", batch_size=3, save_every=None)
    smallest = RingWindows(plan, config.max_length, batch_size=3).most_bytes
    plan = RingPlan(**{**vars_of(plan), "max_bytes": smallest - 1})
    child = start(plan)
    with pytest.raises(ProblemsError, match=f"ring.max_bytes={smallest}") as error:
        run_training(config)
    assert kinds(error.value) == {"ring.too_small"} and not (tmp_path / "run").exists()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)

    plan = RingPlan(**{**vars_of(plan), "max_bytes": smallest})
    child = in_a_child(lambda: write_ring(tmp_path / "smallest", plan, SAMPLES))
    run_training(config.model_copy(update={"dataset": str(tmp_path / "smallest")}))
    assert os.waitpid(child, 0)[1] == 0
    assert len(losses(tmp_path / "run")) == 10


def vars_of(plan: RingPlan) -> dict[str, object]:
    names = ("layout", "settings", "target_config", "max_bytes", "samples", "shards")
    return {name: getattr(plan, name) for name in names}


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in read_log(run / "log.jsonl")]


def assert_same_weights(run: Path, other: Path) -> None:
    mine, theirs = (load_file(list_checkpoints(path)[-1] / "draft.safetensors") for path in (run, other))
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_writer_that_is_killed_anywhere_goes_on(tmp_path: Path, start: Callable[..., int], whole: Path) -> None:
    plan, chance = ring_plan(SAMPLES), random.Random(1)
    result: list[object] = []
    config = ring_config(tmp_path / "ring", tmp_path / "run")
    training = threading.Thread(target=lambda: result.append(run_training(config)))
    training.start()
    kills = 0
    while training.is_alive():
        child = start(plan, slowly)
        deadline = time.monotonic() + chance.uniform(0.02, 0.15)
        while time.monotonic() < deadline and os.waitpid(child, os.WNOHANG) == (0, 0):
            time.sleep(0.001)
        try:
            os.kill(child, signal.SIGKILL)
            kills += os.waitpid(child, 0)[1] == signal.SIGKILL
        except (ProcessLookupError, ChildProcessError):  # it had come to its end
            training.join()
    assert kills > 2 and result
    assert_same_weights(tmp_path / "run", whole)
    assert losses(tmp_path / "run") == losses(whole)


@pytest.mark.parametrize("steps", [1, 7, 13])
def test_a_trainer_that_stops_before_its_checkpoint_sees_the_same_windows_again(
    tmp_path: Path, start: Callable[..., int], monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    plan = ring_plan(SAMPLES)
    trained: list[str] = []
    original = Trainer._step

    def step(self: Trainer, window: object, batches: list[object], ahead: object) -> str:
        trained.append(" ".join(name for batch in batches for name in batch.sample_ids))  # type: ignore[attr-defined]
        return original(self, window, batches, ahead)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "_step", step)
    start(plan)
    config = ring_config(tmp_path / "ring", tmp_path / "run")
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        stop_after(steps, patch)
        run_training(config)
    done = max((int(path.name[5:]) for path in list_checkpoints(tmp_path / "run")), default=0)
    assert done < steps
    before = trained[:done]
    trained.clear()
    run_training(config)
    seen = before + trained
    windows = RingWindows(plan, 16, batch_size=2)
    assert seen == [
        " ".join(windows.sample(place).id for micro in window for rows in micro for row in rows for place in row)
        for window in windows.windows
    ]


def test_nothing_is_released_before_its_checkpoint_is_there(
    tmp_path: Path, start: Callable[..., int], monkeypatch: pytest.MonkeyPatch, whole: Path
) -> None:
    start(ring_plan(SAMPLES))
    config, saved = ring_config(tmp_path / "ring", tmp_path / "run"), []
    original = saver.save_checkpoint

    def failing(*args: object) -> Path:
        if len(saved) == 2:
            raise Stopped
        saved.append(original(*args))  # type: ignore[arg-type]
        return saved[-1]

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(saver, "save_checkpoint", failing)
        run_training(config)
    step = int(saved[-1].name[5:])
    needed = RingWindows(ring_plan(SAMPLES), 16, batch_size=2).first_needed(step)
    assert said(tmp_path) == (needed, False)
    run_training(config)
    assert_same_weights(tmp_path / "run", whole)


def test_a_run_that_was_killed_after_its_last_checkpoint_lets_the_writer_go(
    tmp_path: Path, start: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = start(ring_plan(SAMPLES))
    config = ring_config(tmp_path / "ring", tmp_path / "run", max_steps=8)
    original = RingFeed.saved

    def dying(feed: RingFeed, step: int, *args: bool) -> None:
        if step == 8:
            raise Stopped
        original(feed, step, *args)

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(RingFeed, "saved", dying)
        run_training(config)
    assert not said(tmp_path)[1]
    assert run_training(config).steps == 8
    assert os.waitpid(writer, 0)[1] == 0 and said(tmp_path)[1]
    other = (tmp_path / "ring" / "reader.json").read_text().replace('"finished": true', '"finished": false')
    (tmp_path / "ring" / "reader.json").write_text(other.replace('"run": "', '"run": "x'))
    run_training(config)
    assert not said(tmp_path)[1], "another run's word is left as it is"


def test_max_steps_ends_the_writer(tmp_path: Path, start: Callable[..., int]) -> None:
    writer = start(ring_plan(SAMPLES))
    config = ring_config(tmp_path / "ring", tmp_path / "run", max_steps=3)
    assert run_training(config).steps == 3
    assert os.waitpid(writer, 0)[1] == 0
    assert said(tmp_path)[1]
    assert run_training(config).steps == 3, "a run that has ended needs no ring"


def test_another_run_is_refused_what_was_released_and_may_have_it_made_again(
    tmp_path: Path, start: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = ring_plan(SAMPLES)
    start(plan)
    run_training(ring_config(tmp_path / "ring", tmp_path / "run"))
    assert "training waited for the ring" in capsys.readouterr().err
    with pytest.raises(ProblemsError, match="needs shards 0 to 13, which were released") as error:
        run_training(ring_config(tmp_path / "ring", tmp_path / "other"))
    assert kinds(error.value) == {"ring.released"} and list_checkpoints(tmp_path / "other") == []
    assert said(tmp_path) == (14, True)
    section = {"ring": {"rewind": True, "wait_seconds": 20}}
    threading.Timer(0.3, start, (plan,)).start()  # until then the old state says that nothing is needed
    run_training(ring_config(tmp_path / "ring", tmp_path / "other", **section))
    assert_same_weights(tmp_path / "run", tmp_path / "other")


def test_going_back_to_an_older_checkpoint_makes_room_in_a_full_ring(
    tmp_path: Path, start: Callable[..., int], monkeypatch: pytest.MonkeyPatch, whole: Path
) -> None:
    plan = ring_plan(SAMPLES)
    writer = start(plan)
    config = ring_config(tmp_path / "ring", tmp_path / "run", save_every=2, keep_checkpoints=9)
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        stop_after(9, patch)
        run_training(config)
    released = said(tmp_path)[0]
    deadline = time.monotonic() + 10
    while listed_bytes(tmp_path / "ring") < plan.max_bytes - 7600 and time.monotonic() < deadline:
        time.sleep(0.01)  # until the ring is full
    for checkpoint in list_checkpoints(tmp_path / "run")[2:]:
        for path in checkpoint.iterdir():
            path.unlink()
        checkpoint.rmdir()
    with pytest.raises(ProblemsError) as error:
        run_training(config)
    assert kinds(error.value) == {"ring.released"} and f"to {released - 1}," in str(error.value)
    again = ring_config(
        tmp_path / "ring", tmp_path / "run", save_every=2, keep_checkpoints=9, ring={"rewind": True, "wait_seconds": 20}
    )
    run_training(again)
    assert os.waitpid(writer, 0)[1] == 0
    assert_same_weights(tmp_path / "run", whole)


def test_what_does_not_fit_the_ring_is_listed_at_once(tmp_path: Path, start: Callable[..., int]) -> None:
    start(ring_plan(SAMPLES))
    config = ring_config(tmp_path / "ring", tmp_path / "run", epochs=3, max_length=8, output_indices=[1, 2, 5])
    with pytest.raises(ProblemsError) as error:
        run_training(config)
    assert {"ring.epochs", "ring.max_length", "contract.output_indices"} <= kinds(error.value)
    assert "holds 2 epoch(s), the training config has epochs=3" in str(error.value)
    assert "its longest sample has 16 tokens, max_length is 8" in str(error.value)
    assert not (tmp_path / "run").exists()


def test_without_the_word_stream_a_ring_is_no_store_and_a_store_is_no_ring(
    tmp_path: Path, start: Callable[..., int]
) -> None:
    start(ring_plan(SAMPLES))
    config = ring_config(tmp_path / "ring", tmp_path / "run")
    while not (tmp_path / "ring" / "ring.json").exists():
        time.sleep(0.01)
    with pytest.raises(ProblemsError) as error:
        run_training(without_ring(config, tmp_path / "ring", tmp_path / "run"))
    assert kinds(error.value) == {"store.is_a_ring"}
    store = write_random_store(tmp_path / "store")
    with pytest.raises(ProblemsError) as error:
        run_training(ring_config(store, tmp_path / "run"))
    assert kinds(error.value) == {"ring.not_a_ring"}


def test_another_ring_is_other_data(tmp_path: Path, start: Callable[..., int]) -> None:
    start(ring_plan(SAMPLES))
    run_training(ring_config(tmp_path / "ring", tmp_path / "run"))
    (tmp_path / "ring").rename(tmp_path / "old")
    start(ring_plan(SAMPLES, seed=1))
    with pytest.raises(ProblemsError) as error:
        run_training(ring_config(tmp_path / "ring", tmp_path / "run"))
    assert kinds(error.value) == {"run.other_data"}


def test_a_second_trainer_is_refused_and_one_without_a_writer_names_what_it_lacks(
    tmp_path: Path, start: Callable[..., int], whole: Path
) -> None:
    with pytest.raises(ProblemsError, match="no ring has been begun here") as error:
        run_training(ring_config(tmp_path / "ring", tmp_path / "run", ring={"wait_seconds": 0.2}))
    assert kinds(error.value) == {"ring.no_writer"}
    writer = start(ring_plan(SAMPLES), wait_seconds=0.1)
    assert os.waitpid(writer, 0)[1] != 0, "no trainer came, so the writer gave up"
    config = ring_config(tmp_path / "ring", tmp_path / "run", ring={"wait_seconds": 0.3})
    shard = tmp_path / "ring" / "shard-00002.safetensors"
    shard.rename(tmp_path / "gone")
    with pytest.raises(ProblemsError, match=r"shard-00002\.safetensors is not there: it was made, and has vanished"):
        run_training(config)
    (tmp_path / "gone").rename(shard)
    with only_writer(tmp_path / "ring", "reader.lock"), pytest.raises(ProblemsError) as error:
        run_training(config)
    assert kinds(error.value) == {"ring.locked"}
    data = bytearray(shard.read_bytes())
    shard.write_bytes(data[:-1])
    with pytest.raises(ProblemsError, match=r"shard-00002\.json: the writer makes them anew") as error:
        run_training(config)
    assert kinds(error.value) == {"store.shard_truncated"}
    data[-200] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ProblemsError, match=r"shard-00002\.json: the writer makes them anew") as error:
        run_training(config)
    assert kinds(error.value) == {"store.checksum"}
    shard.with_suffix(".json").unlink()
    start(ring_plan(SAMPLES))
    run_training(config)
    assert_same_weights(tmp_path / "run", whole)


def test_a_shard_that_vanishes_is_made_again_by_a_writer_at_work(
    tmp_path: Path, start: Callable[..., int], whole: Path
) -> None:
    plan = ring_plan(SAMPLES)
    writer = start(plan)
    ring = tmp_path / "ring"
    while not (ring / "shard-00002.json").exists():
        time.sleep(0.005)
    (ring / "shard-00001.safetensors").unlink()
    run_training(ring_config(ring, tmp_path / "run"))
    assert os.waitpid(writer, 0)[1] == 0
    assert_same_weights(tmp_path / "run", whole)


def test_states_of_another_sample_than_the_fingerprint_says_are_refused(
    tmp_path: Path, start: Callable[..., int]
) -> None:
    start(ring_plan(SAMPLES), wait_seconds=20)
    fingerprint = tmp_path / "ring" / "eagle3_fingerprint.json"
    while not fingerprint.exists():
        time.sleep(0.005)
    other = tmp_path / "other"
    changed = [replace(sample, aux_hidden_states=-sample.aux_hidden_states) for sample in SAMPLES]
    child = in_a_child(lambda: write_ring(other, ring_plan(SAMPLES), changed, 1))
    os.waitpid(child, 0)
    fingerprint.write_bytes((other / "eagle3_fingerprint.json").read_bytes())
    with pytest.raises(ProblemsError) as error:
        run_training(ring_config(tmp_path / "ring", tmp_path / "run"))
    assert kinds(error.value) == {"fingerprint.states"}


def test_held_out_samples_come_from_a_store(tmp_path: Path, start: Callable[..., int]) -> None:
    start(ring_plan(SAMPLES))
    store = write_random_store(tmp_path / "store", seed=3)
    config = ring_config(tmp_path / "ring", tmp_path / "run", eval_dataset=str(store))
    run_training(config)
    records = read_log(tmp_path / "run" / "log.jsonl")
    assert [record["step"] for record in records if record["kind"] == "eval"] == [0, 7, 14]
    assert read_json(tmp_path / "run" / "best.json", "")["acceptance_length"] is not None


def test_checkpoints_come_before_the_ring_is_full(
    tmp_path: Path, start: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    start(ring_plan(SAMPLES))
    config = ring_config(tmp_path / "ring", tmp_path / "run", save_every=100, keep_checkpoints=50)
    run_training(config)
    steps = [int(path.name[5:]) for path in list_checkpoints(tmp_path / "run")]
    assert len(steps) > 4 and steps[-1] == 14
    assert f"asks for {len(steps) - 1} checkpoints in 14 steps" in capsys.readouterr().err
    windows, ring = RingWindows(ring_plan(SAMPLES), 16, batch_size=2), load_ring(tmp_path / "ring")
    for saved, following in zip([0, *steps], steps, strict=False):
        assert windows.bytes_held(saved, following - 1) <= ring.max_bytes // 2 or following == saved + 1


def test_other_samples_are_refused_by_the_writer(tmp_path: Path) -> None:
    plan = ring_plan(SAMPLES)
    child = in_a_child(lambda: write_ring(tmp_path / "ring", plan, SAMPLES, 0.2))
    os.waitpid(child, 0)
    counts = tmp_path / "ring" / "supervised_counts.safetensors"
    counts.unlink()
    with pytest.raises(ProblemsError, match=r"store\.other_target"):
        write_ring(tmp_path / "ring", plan, other_masks(SAMPLES), 0.2)
