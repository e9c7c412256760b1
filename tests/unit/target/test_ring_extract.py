"""Extraction into a ring: the states of a store, each epoch anew, by every engine; what is refused beforehand."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
import torch

from eagle3.config import ExtractConfig
from eagle3.data.ring_format import load_ring
from eagle3.data.ring_reader import RingReader
from eagle3.data.ring_writer import RingWriter
from eagle3.data.store import StoredSample, StoreReader
from eagle3.errors import ProblemsError
from eagle3.target import stream_ring
from eagle3.target.engines.streamed import StreamedEngine
from eagle3.target.estimate import dry_run
from eagle3.target.extract import RingReport, run_extract, run_extract_ring
from eagle3.target.plan import make_plan
from eagle3.target.ring_extract import for_ring
from tests.unit.target.cases import extract_config, write_conversations

SAMPLES = 9
ENGINES = ("transformers", "streamed")


@pytest.fixture
def cfg(tiny_target: Callable[[str], Path], tmp_path: Path) -> Callable[..., ExtractConfig]:
    data = write_conversations(tmp_path / "data.jsonl", SAMPLES)

    def make(engine: str = "transformers", **values: object) -> ExtractConfig:
        defaults: dict[str, object] = {
            "output_indices": [1, 2],
            "engine": engine,
            "shard_max_samples": 2,
            "batch_tokens": 1,
            "stream": {"chunk_tokens": 100, "micro_tokens": 1},
            "ring": {"epochs": 2, "max_bytes": 120_000, "wait_seconds": 20},
        }
        output = Path(str(values.pop("output", tmp_path / "ring")))
        return extract_config(tiny_target("llama"), data, output, **{**defaults, **values})

    return make


class Writing:
    """A writer in a thread of its own; `report` waits for its end."""

    def __init__(self, cfg: ExtractConfig) -> None:
        pool = ThreadPoolExecutor(1)
        self._report = pool.submit(run_extract_ring, cfg)
        pool.shutdown(wait=False)

    def report(self) -> RingReport:
        return self._report.result()


def consume(folder: Path, first: int = 0) -> list[list[StoredSample]]:
    """What a trainer does that needs each shard alone: the samples of all shards, in order."""
    reader = RingReader(folder, 20)
    shards = []
    with reader.consuming(first, ""):
        for number in range(first, len(reader.ring.shards)):
            shard = reader.store([reader.wait_for(number, Event())])
            reader.verify(number)
            shards.append([shard.read(index) for index in range(len(shard))])
            reader.release(number + 1)
    return shards


def assert_equal(mine: StoredSample, theirs: StoredSample) -> None:
    assert mine.id == theirs.id
    for name in ("input_ids", "loss_mask", "aux_hidden_states", "last_hidden_states", "target_argmax"):
        assert torch.equal(getattr(mine, name), getattr(theirs, name)), (mine.id, name)


def kinds(error: pytest.ExceptionInfo[ProblemsError]) -> set[str]:
    return {problem.kind for problem in error.value.problems}


@pytest.mark.parametrize("engine", ENGINES)
def test_each_epoch_holds_each_sample_with_the_states_of_a_store(
    cfg: Callable[..., ExtractConfig], tmp_path: Path, engine: str
) -> None:
    writing = Writing(cfg(engine))
    shards = consume(tmp_path / "ring")
    report = writing.report()
    ring = load_ring(tmp_path / "ring")
    assert report.written == report.shards == len(shards) == len(ring.shards)
    run_extract(cfg(engine, ring=None, output=str(tmp_path / "store")))
    reader = StoreReader(tmp_path / "store")
    stored = {reader.samples[index].id: reader.read(index) for index in range(len(reader))}
    for epoch in range(2):
        read = [sample for number, shard in enumerate(shards) if ring.shards[number].epoch == epoch for sample in shard]
        assert sorted(sample.id for sample in read) == sorted(stored)
        for sample in read:
            assert_equal(sample, stored[sample.id])
    counts = sum(
        torch.bincount(sample.input_ids[sample.loss_mask], minlength=ring.contract.vocab_size)
        for sample in stored.values()
    )
    assert torch.equal(RingReader(tmp_path / "ring", 1).supervised_counts(), counts)
    units = [shard.unit for shard in ring.shards]
    assert (len(set(units)) < len(units)) == (engine == "streamed"), "a chunk's shards are made together"


@pytest.mark.parametrize("engine", ENGINES)
def test_a_writer_that_stops_anywhere_makes_the_same_shards(
    cfg: Callable[..., ExtractConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    packed = {"chunk_tokens": 100, "micro_tokens": 100}
    walks: list[int] = []
    walk = StreamedEngine.walk

    def counted(engine: StreamedEngine, batch: list[list[int]], *args: object) -> None:
        walks.append(len(batch))
        walk(engine, batch, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(StreamedEngine, "walk", counted)
    whole = Writing(cfg(engine, output=str(tmp_path / "whole"), stream=packed))
    expected = consume(tmp_path / "whole")
    whole.report()
    undisturbed, walks[:] = list(walks), []
    original = RingWriter.list_shards

    def stop(writer: RingWriter, checksums: dict[int, str], *args: object) -> None:
        if 1 in checksums:
            original(writer, {1: checksums[1]}, *args)  # type: ignore[arg-type]
            raise KeyboardInterrupt
        original(writer, checksums, *args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(RingWriter, "list_shards", stop)
        writing = Writing(cfg(engine, stream=packed))
        with pytest.raises(KeyboardInterrupt):
            writing.report()
    (tmp_path / "ring" / "shard-00009.safetensors.tmp").write_bytes(b"half")
    walks.clear()
    writing = Writing(cfg(engine, stream=packed))
    shards = consume(tmp_path / "ring")
    assert writing.report().written < len(shards)
    for mine, theirs in zip(shards, expected, strict=True):
        for one, two in zip(mine, theirs, strict=True):
            assert_equal(one, two)
    assert not list((tmp_path / "ring").glob("*.tmp"))
    assert walks == undisturbed, "a chunk that lacks a shard walks whole, so that its rows share calls as before"


def test_another_store_is_copied_into_a_ring_without_the_target(
    cfg: Callable[..., ExtractConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_extract(cfg(ring=None, output=str(tmp_path / "store")))
    monkeypatch.setattr("eagle3.target.extract.load_model", lambda *_: pytest.fail("the target ran"))
    writing = Writing(cfg(from_store=str(tmp_path / "store")))
    shards = consume(tmp_path / "ring")
    writing.report()
    reader = StoreReader(tmp_path / "store")
    stored = {reader.samples[index].id: reader.read(index) for index in range(len(reader))}
    assert sum(map(len, shards)) == 2 * len(stored)
    for sample in (sample for shard in shards for sample in shard):
        assert_equal(sample, stored[sample.id])


def test_what_cannot_be_is_refused_before_the_target_is_loaded(
    cfg: Callable[..., ExtractConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle3.target.extract.load_model", lambda *_: pytest.fail("the target was loaded"))
    monkeypatch.setattr(stream_ring, "make_engine", lambda *_: pytest.fail("the target was loaded"))
    small = {"ring": {"max_bytes": 1000}}
    for engine, what in zip(ENGINES, ("shard_max_bytes", "stream.chunk_tokens"), strict=True):
        with pytest.raises(ProblemsError, match=what) as error:
            run_extract_ring(cfg(engine, **small))
        assert kinds(error) == {"ring.too_small"}
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "0")
        patch.setenv("WORLD_SIZE", "2")
        with pytest.raises(ProblemsError) as error:
            run_extract_ring(cfg("streamed"))
        assert kinds(error) == {"ring.one_process"}
    with pytest.raises(ProblemsError) as error:
        run_extract_ring(cfg(ring={"max_bytes": 1 << 60}, shard_max_samples=2, free_disk_fraction=0.9999))
    assert kinds(error) == {"extract.disk"}
    (tmp_path / "ring").mkdir()
    (tmp_path / "ring" / "thesis.txt").write_text("mine")
    with pytest.raises(ProblemsError, match=r"holds thesis\.txt") as error:
        run_extract_ring(cfg())
    assert kinds(error) == {"ring.not_a_ring"}
    assert [path.name for path in (tmp_path / "ring").iterdir()] == ["thesis.txt"]


def test_a_ring_that_was_begun_with_something_else_is_refused_and_so_are_a_store_and_a_second_writer(
    cfg: Callable[..., ExtractConfig], tmp_path: Path
) -> None:
    with pytest.raises(ProblemsError) as error:  # no trainer comes
        run_extract_ring(cfg(ring={"max_bytes": 50_000, "wait_seconds": 0.1}))
    assert kinds(error) == {"ring.no_trainer"}
    ring = load_ring(tmp_path / "ring")
    assert 0 < held(tmp_path / "ring") <= 50_000
    other = {"max_bytes": 50_000, "epochs": 3, "seed": 1, "wait_seconds": 0.1}
    with pytest.raises(ProblemsError) as error:
        run_extract_ring(cfg(ring=other, output_indices=[1, 3]))
    messages = " ".join(problem.message for problem in error.value.problems)
    assert "settings.ring.epochs" in messages and "settings.ring.seed" in messages and "output" in messages
    assert load_ring(tmp_path / "ring") == ring
    with pytest.raises(ProblemsError) as error:
        run_extract(cfg(ring=None))
    assert kinds(error) == {"store.is_a_ring"}
    run_extract(cfg(ring=None, output=str(tmp_path / "store")))
    with pytest.raises(ProblemsError) as error:
        run_extract_ring(cfg(output=str(tmp_path / "store")))
    assert kinds(error) == {"ring.not_a_ring"}

    first = Writing(cfg(ring={"max_bytes": 50_000, "wait_seconds": 1}))
    while '"stopped"' in (tmp_path / "ring" / "writer.json").read_text():
        Event().wait(0.01)
    with pytest.raises(ProblemsError) as error:
        run_extract_ring(cfg(ring={"max_bytes": 50_000, "wait_seconds": 1}))
    assert kinds(error) == {"ring.locked"}
    with pytest.raises(ProblemsError):
        first.report()


def held(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("shard-*.safetensors"))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_dry_run_plans_the_ring(cfg: Callable[..., ExtractConfig], tmp_path: Path, engine: str) -> None:
    text = dry_run(cfg(engine)).render()
    assert re.search(r"ring: 9 samples, 236 tokens, 2 epoch\(s\), 1\d shards", text)
    assert ("chunks, each a pass over" in text) == (engine == "streamed")
    assert not (tmp_path / "ring").exists()
    bad = dry_run(cfg(engine, ring={"max_bytes": 1000}))
    assert [problem.kind for problem in bad.problems] == ["ring.too_small"]


def test_samples_with_nothing_to_learn_are_not_extracted(
    cfg: Callable[..., ExtractConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan(cfg())
    first, *others = plan.samples
    found = for_ring(replace(plan, samples=[replace(first, loss_mask=[0] * len(first.loss_mask)), *others]))
    assert list(found.samples) == others and found.settings["sample_count"] == SAMPLES - 1
    assert "1 of 9 samples have no supervised token: left out" in capsys.readouterr().err
    with pytest.raises(ProblemsError) as error:
        for_ring(replace(plan, samples=[replace(first, loss_mask=[0] * len(first.loss_mask))]))
    assert kinds(error) == {"train.nothing_supervised"}
