"""A ring's plan, its windows, and the two sides' small files."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from eagle3.data import ring_pulse, ring_writer
from eagle3.data.ring_folder import ReaderState, check_ring_output, free_shards, is_listed, listed_bytes, read_reader
from eagle3.data.ring_format import load_ring
from eagle3.data.ring_pulse import Pulse, Watch
from eagle3.data.ring_reader import RingReader
from eagle3.data.ring_windows import RingWindows
from eagle3.data.store_format import SampleInfo
from eagle3.data.store_sample import shard_bytes
from eagle3.errors import ProblemsError
from eagle3.sealed import write_sealed
from tests.rings import open_writer, ring_plan, ring_samples

SAMPLES = ring_samples(11)


@pytest.fixture
def ring(tmp_path: Path) -> Path:
    """A ring that is full; nobody has consumed anything."""
    fill(tmp_path / "ring")
    return tmp_path / "ring"


def fill(folder: Path) -> list[int]:
    """What a writer does whom no trainer comes to; the shards that are there then."""
    plan = ring_plan(SAMPLES)
    with pytest.raises(ProblemsError) as error, open_writer(folder, plan, SAMPLES, 0) as writer:
        while numbers := writer.next_unit():
            writer.write_shard(numbers[0], [SAMPLES[place] for place in plan.shards[numbers[0]].samples])
    assert [problem.kind for problem in error.value.problems] == ["ring.no_trainer"]
    assert json.loads((folder / "writer.json").read_text())["state"] == "stopped"
    assert plan.max_bytes // 2 < listed_bytes(folder) <= plan.max_bytes
    return [number for number in range(12) if is_listed(folder, number)]


def places(windows: RingWindows) -> list[list[int]]:
    return [sorted(p for micro in window for rows in micro for row in rows for p in row) for window in windows.windows]


def edit(folder: Path, change: dict[str, Any]) -> None:
    value = json.loads((folder / "ring.json").read_text())
    for key, item in change.items():
        *parts, last = key.split(".")
        node = value
        for part in parts:
            node = node[int(part) if part.isdigit() else part]
        node[int(last) if last.isdigit() else last] = item
    write_sealed(folder / "ring.json", {key: item for key, item in value.items() if key != "seal"})


def test_the_plan_is_read_back_as_it_was(ring: Path) -> None:
    plan, read = ring_plan(SAMPLES), load_ring(ring)
    for name in ("layout", "settings", "target_config", "max_bytes", "samples", "shards"):
        assert getattr(read, name) == getattr(plan, name)
    assert read.epochs == 2 and read.longest == 16 and len(read.shards) == 12


def test_the_size_of_a_shard_is_known_before_it_is_made(ring: Path) -> None:
    plan = load_ring(ring)
    for number in range(4):
        assert (ring / f"shard-{number:05d}.safetensors").stat().st_size == plan.shards[number].bytes
    names = [SampleInfo("é" * 9, 7, 1)]
    assert shard_bytes(names, plan.layout) > shard_bytes([SampleInfo("e", 7, 1)], plan.layout)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "eagle3-hidden-states"}, "ring.format"),
        ({"format_version": 2}, "ring.format_version"),
        ({"more": 1}, "more"),
        ({"max_bytes": 0}, "max_bytes"),
        ({"max_bytes": "64"}, "max_bytes"),
        ({"samples.0.supervised": 0}, "samples.0.supervised"),
        ({"samples.0.supervised": 99}, "'s00' has 99 supervised"),
        ({"samples.0.id": "s01"}, "an id is listed twice"),
        ({"shards.3.unit": 7}, "numbered through"),
        ({"shards.11.epoch": 2}, "exactly once"),
        ({"shards.0.samples": []}, "shards.0.samples"),
        ({"shards.0.samples.0": 77}, "epoch 0 does not hold each sample exactly once"),
        ({"target_head.sha256": "x"}, "target_head.sha256"),
        ({"target_head.file": "../head"}, "files of head and counts"),
        ({"contract": {}}, "contract"),
        ({"store_version": 1}, "store_version"),
        ({"last_hidden_rows": "some"}, "last_hidden_rows"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_by_name(ring: Path, change: dict[str, Any], message: str) -> None:
    edit(ring, change)
    with pytest.raises(ProblemsError, match=message):
        load_ring(ring)


def test_a_ring_of_shards_of_version_2_is_read_and_not_gone_on_with(tmp_path: Path) -> None:
    plan = ring_plan(SAMPLES, version=2)
    with open_writer(tmp_path / "ring", plan, SAMPLES) as writer:
        assert writer.next_unit() == [0]
        writer.write_shard(0, [SAMPLES[place] for place in plan.shards[0].samples])
    reader = RingReader(tmp_path / "ring", 1)
    store = reader.store([reader.wait_for(0, Event())])
    assert (reader.ring.layout.version, store.read(0).target_argmax) == (2, None)
    with pytest.raises(ProblemsError, match=r"version 2.*writes version 3(.|\n)*let the eagle3 that began it") as error:
        open_writer(tmp_path / "ring", ring_plan(SAMPLES), SAMPLES)
    assert [problem.kind for problem in error.value.problems] == ["store.other_version"]


def test_a_plan_in_which_a_bit_was_flipped_is_refused(ring: Path) -> None:
    text = (ring / "ring.json").read_text()
    (ring / "ring.json").write_text(text.replace('"tokens": 16', '"tokens": 15', 1))
    with pytest.raises(ProblemsError, match=r"file\.seal"):
        load_ring(ring)


def test_each_epoch_has_an_order_of_its_own_and_a_seed_always_the_same() -> None:
    orders = [
        [place for shard in plan.shards if shard.epoch == epoch for place in shard.samples]
        for plan in (ring_plan(SAMPLES), ring_plan(SAMPLES, seed=1))
        for epoch in (0, 1)
    ]
    assert len({tuple(order) for order in orders}) == 4
    assert orders[0] == [6, 2, 8, 1, 9, 5, 3, 4, 7, 0, 10], "a seed's order is part of what a ring means"


@pytest.mark.parametrize(("pack", "room"), [(False, 32), (True, 32), (True, 70)])
@pytest.mark.parametrize(("batch_size", "accumulate", "world_size"), [(1, 1, 1), (2, 3, 1), (1, 2, 4), (3, 1, 2)])
def test_windows_hold_each_sample_once_an_epoch_in_the_order_of_the_shards(
    pack: bool, room: int, batch_size: int, accumulate: int, world_size: int
) -> None:
    plan = ring_plan(SAMPLES, unit=2)
    windows = RingWindows(plan, 32, batch_size, accumulate, world_size, pack, row_tokens=room)
    assert Counter(p for window in places(windows) for p in window) == Counter(range(22))
    for epoch, found in enumerate(windows.epochs):
        ids = [windows.sample(p).id for w in found for m in w for rows in m for row in rows for p in row]
        assert sorted(ids) == [sample.id for sample in SAMPLES]
        assert {plan.shards[n].epoch for w in found for n in windows.shards(w)} == {epoch}
        for window in found:
            assert all(len(micro) == world_size for micro in window) and len(window) <= accumulate
            assert all(sum(windows.sample(p).tokens for p in row) <= room for m in window for r in m for row in r)
    first = [windows.first_needed(step) for step in range(len(windows.windows) + 1)]
    assert first == sorted(first) and first[0] == 0 and first[-1] == 12
    for step, window in enumerate(windows.windows):
        assert first[step] == windows.shards(window).start <= first[step + 1]
        held = windows.bytes_held(step, step)
        last = plan.unit_ends[windows.shards(window)[-1]]
        assert held == sum(shard.bytes for shard in plan.shards[first[step] : last + 1]) <= windows.most_bytes


def test_a_step_sees_the_same_samples_however_the_work_is_split() -> None:
    plan = ring_plan(SAMPLES)
    splits = [(1, 4, 1), (1, 2, 2), (1, 1, 4), (2, 2, 1), (2, 1, 2), (4, 1, 1)]
    assert len({json.dumps(places(RingWindows(plan, 32, *split, pack=True))) for split in splits}) == 1


def test_a_damaged_shard_is_made_again_and_a_foreign_one_removed(ring: Path) -> None:
    shard = ring / "shard-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    (ring / "shard-00003.json").unlink()
    (ring / "shard-00099.json").write_text("{}")
    with open_writer(ring, ring_plan(SAMPLES), SAMPLES, 0) as writer:
        assert {problem.kind for problem in writer.redone} == {"store.shard_truncated", "ring.foreign_shard"}
        assert writer.next_unit() == [1]
        writer.write_shard(1, [SAMPLES[place] for place in writer.ring.shards[1].samples])
        assert writer.next_unit() == [3]
    assert not (ring / "shard-00099.json").exists() and not (ring / "shard-00003.safetensors").exists()


def test_the_furthest_shards_make_room_for_one_that_is_needed_first(ring: Path) -> None:
    (ring / "reader.json").write_text('{"released": 4, "finished": false, "run": ""}')
    free_shards(ring, 4)
    there = fill(ring)
    (ring / "reader.json").write_text('{"released": 2, "finished": false, "run": ""}')
    assert there == [4, 5, 6, 7, 8] and fill(ring) == [2, 3, 4, 5], "the last ones went for shards 2 and 3"


def test_a_shard_that_is_released_while_the_writer_looks_is_not_made_again(
    ring: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would remove it again before the next release, which may need its room."""
    real = ring_writer.is_listed

    def released_first(folder: Path, number: int) -> bool:
        if number == 0:
            (ring / "reader.json").write_text('{"released": 3, "finished": false, "run": ""}')
            free_shards(ring, 3)
        return real(folder, number)

    with open_writer(ring, ring_plan(SAMPLES), SAMPLES, 0) as writer:
        first = next(number for number in range(12) if not is_listed(ring, number))
        monkeypatch.setattr(ring_writer, "is_listed", released_first)
        assert writer.next_unit() == [first] and first > 3


@pytest.mark.parametrize("text", ['{"released": -1, "finished": false, "run": ""}', '{"released": 1}', "[]"])
def test_what_a_trainer_cannot_have_said_is_refused(ring: Path, text: str) -> None:
    assert read_reader(ring, 12) == ReaderState(0, False, "")
    (ring / "reader.json").write_text(text)
    with pytest.raises(ProblemsError, match=r"reader\.json"):
        read_reader(ring, 12)


def test_a_folder_with_other_things_is_no_place_for_a_ring(tmp_path: Path, ring: Path) -> None:
    assert check_ring_output(tmp_path / "new") == check_ring_output(ring) == []
    (tmp_path / "file").write_text("")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "shard-00000.safetensors").write_bytes(b"")
    for name in ("file", "mine"):
        assert [problem.kind for problem in check_ring_output(tmp_path / name)] == ["ring.not_a_ring"]
    (tmp_path / "mine" / "shard-00000.safetensors").rename(tmp_path / "mine" / "ring.json.tmp")
    assert check_ring_output(tmp_path / "mine") == []


def test_a_pulse_is_seen_and_its_end_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle3.data.ring_pulse._BEAT_SECONDS", 0.01)
    watch = Watch(tmp_path / "writer.json")
    with Pulse(tmp_path / "writer.json", {"state": "begun"}) as pulse:
        end = time.monotonic() + 0.2
        while time.monotonic() < end:
            assert watch.silent() < 0.15
            time.sleep(0.01)
        pulse.say({"state": "ended"})
    watch.silent()
    time.sleep(0.1)
    assert watch.silent() >= 0.1
    assert json.loads((tmp_path / "writer.json").read_text()) == {"state": "ended"}


def test_a_pulse_whose_folder_is_gone_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle3.data.ring_pulse._BEAT_SECONDS", 0.01)
    (tmp_path / "ring").mkdir()
    with Pulse(tmp_path / "ring" / "writer.json", {}) as pulse:
        shutil.rmtree(tmp_path / "ring")
        time.sleep(0.1)
        assert not (tmp_path / "ring").exists()
        with pytest.raises(ProblemsError):
            pulse.say({})


def test_fault_08_a_full_disk_is_one_error_and_the_writer_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, real = ring_plan(SAMPLES), os.replace

    def full(source: object, place: object) -> None:
        if str(place).endswith(("shard-00002.safetensors", "writer.json")) and (tmp_path / "shard-00001.json").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(source, place)  # type: ignore[arg-type]

    with (
        monkeypatch.context() as patch,
        pytest.raises(ProblemsError) as error,
        open_writer(tmp_path, plan, SAMPLES, 0) as writer,
    ):
        for number in range(3):
            if number == 2:
                patch.setattr(os, "replace", full)
            writer.write_shard(number, [SAMPLES[place] for place in plan.shards[number].samples])
    assert [(problem.kind, Path(problem.where).name) for problem in error.value.problems] == [
        ("disk.full", "shard-00002.safetensors")
    ]
    assert not list(tmp_path.glob("*.tmp")) and is_listed(tmp_path, 1) and not is_listed(tmp_path, 2)
    with open_writer(tmp_path, plan, SAMPLES, 0) as writer:
        assert writer.next_unit() == [2]


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def test_an_old_copy_of_what_a_side_says_or_none_does_not_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each side would wait for what the other believes to be done."""
    monkeypatch.setattr(ring_pulse, "_BEAT_SECONDS", 0.01)
    path = tmp_path / "reader.json"
    with Pulse(path, {"released": 0}) as pulse:
        old = path.read_bytes()
        pulse.say({"released": 6})
        for change in (lambda: path.write_bytes(old), path.unlink):
            change()
            assert comes_true(lambda: path.exists() and json.loads(path.read_text()) == {"released": 6})
        pulse.say({"released": 7})


def comes_true(done: Callable[[], bool]) -> bool:
    end = time.monotonic() + 20
    while not done() and time.monotonic() < end:
        time.sleep(0.01)
    return done()


def test_a_flipped_bit_in_the_targets_head_is_found_before_anything_is_trained(ring: Path) -> None:
    flip(ring / "target_head.safetensors")
    with pytest.raises(ProblemsError) as error:
        RingReader(ring, 1)
    [problem] = error.value.problems
    assert problem.kind == "store.checksum" and "delete it and restart the writer" in problem.fix
    (ring / "target_head.safetensors").unlink()
    with open_writer(ring, ring_plan(SAMPLES), SAMPLES, 0):
        pass
    assert RingReader(ring, 1).target_head()


def test_flipped_counts_are_refused_and_the_writer_writes_them_anew(ring: Path) -> None:
    whole = RingReader(ring, 1).supervised_counts().clone()
    flip(ring / "supervised_counts.safetensors")
    with pytest.raises(ProblemsError) as error:
        RingReader(ring, 1).supervised_counts()
    assert [problem.kind for problem in error.value.problems] == ["ring.counts"]
    with open_writer(ring, ring_plan(SAMPLES), SAMPLES, 0):
        pass
    assert torch.equal(RingReader(ring, 1).supervised_counts(), whole)


def test_more_released_shards_than_there_are_is_no_end(ring: Path) -> None:
    (ring / "reader.json").write_text(json.dumps({"released": 13, "finished": False, "run": ""}))
    with pytest.raises(ProblemsError) as error, open_writer(ring, ring_plan(SAMPLES), SAMPLES, 0):
        pass
    assert [problem.kind for problem in error.value.problems] == ["ring.reader"]


def test_what_the_writer_waited_is_unknown_where_its_file_is_damaged(ring: Path) -> None:
    (ring / "writer.json").write_text("{")
    assert RingReader(ring, 1).writer_waited() is None


def test_a_fingerprint_that_is_gone_after_its_shard_is_said_by_both_sides(ring: Path) -> None:
    raw = (ring / "eagle3_fingerprint.json").read_bytes()
    (ring / "eagle3_fingerprint.json").unlink()
    (ring / "reader.json").write_text(json.dumps({"released": 1, "finished": False, "run": ""}))
    for opened in (lambda: RingReader(ring, 1), lambda: open_writer(ring, ring_plan(SAMPLES), SAMPLES, 0)):
        with pytest.raises(ProblemsError) as error:
            opened()  # type: ignore[no-untyped-call]
        assert [problem.kind for problem in error.value.problems] == ["ring.fingerprint"]
    (ring / "eagle3_fingerprint.json").write_bytes(raw)
    assert RingReader(ring, 1).fingerprint
