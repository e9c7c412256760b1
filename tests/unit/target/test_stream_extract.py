"""The streamed extraction around its engine: whoever does what and whatever is killed, it is the same store."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from eagle3.config import ExtractConfig
from eagle3.data import shard_file
from eagle3.data.store import StoreReader, verify
from eagle3.data.store_format import load_manifest
from eagle3.data.store_joint import JointStore
from eagle3.errors import ProblemsError, problem_error
from eagle3.files import read_json_object
from eagle3.target import engine_choice, extract, stream_extract, stream_plan
from eagle3.target.stream_plan import StreamPlan
from tests.children import in_a_child
from tests.stores import rewrite_manifest
from tests.unit.target.stream_cases import CHUNKS, Fake, as_process, content, stream_config

TinyTarget = Callable[[str], Path]


@pytest.fixture
def cfg(tiny_target: TinyTarget, tmp_path: Path) -> ExtractConfig:
    return stream_config(tiny_target("llama"), tmp_path, "store")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    return Fake(monkeypatch)


@pytest.fixture
def whole(cfg: ExtractConfig, fake: Fake) -> dict[str, bytes]:
    """What one process makes without a stop."""
    other = cfg.model_copy(update={"output": f"{cfg.output}-whole"})
    report = fake.run(other)
    assert (report.samples, report.extracted, report.lacking) == (20, 20, [])
    assert len(fake.walks) == CHUNKS
    assert verify(Path(other.output), deep=True) == []
    fake.walks.clear()
    return content(other.output)


def kinds(error: pytest.ExceptionInfo[ProblemsError]) -> list[str]:
    return [problem.kind for problem in error.value.problems]


def test_samples_are_stored_in_the_order_of_the_data_with_their_states(cfg: ExtractConfig, fake: Fake) -> None:
    fake.run(cfg)
    reader = StoreReader(cfg.output)
    assert [sample.id for sample in reader.samples] == [f"c{number}" for number in range(20)]
    for sample in map(reader.read, range(20)):
        for slot, layer in enumerate((1, 3, 5)):
            expected = sample.input_ids[:, None] + layer * torch.arange(reader.contract.hidden_size)
            hidden = reader.contract.hidden_size
            assert (sample.aux_hidden_states[:, slot * hidden : (slot + 1) * hidden] == expected).all()
        supervised = sample.input_ids[sample.loss_mask]
        assert (sample.last_hidden_states == supervised[:, None] + 100 * torch.arange(hidden)).all()
    assert reader.fingerprint is not None and set(reader.fingerprint.states) == {-1, 0, 1, 2, 3, 4, 5, 6}


@pytest.mark.parametrize("order", [[0, 1], [1, 0], [0, 1, 2], [2, 1, 0]])
def test_any_number_of_processes_in_any_order_make_the_same_store(
    cfg: ExtractConfig, fake: Fake, whole: dict[str, bytes], order: list[int]
) -> None:
    reports = [fake.run(cfg, index, len(order)) for index in order]
    shares = {2: [11, 9], 3: [8, 6, 6]}[len(order)]
    assert [report.extracted for report in reports] == [shares[index] for index in order]
    assert len(fake.walks) == CHUNKS
    assert content(cfg.output) == whole


def test_each_process_says_what_the_others_still_lack(cfg: ExtractConfig, fake: Fake) -> None:
    report = fake.run(cfg, 1, 3)
    assert [line.split(",")[0] for line in report.lacking] == ["process 0: 3 chunks", "process 2: 2 chunks"]
    assert "not complete yet" in report.render()
    assert report.samples == report.extracted == 6
    fake.run(cfg, 2, 3)
    assert fake.run(cfg, 0, 3).lacking == []


def test_a_process_without_a_share_ends_at_once(cfg: ExtractConfig, fake: Fake) -> None:
    report = fake.run(cfg, 8, 9)
    assert (report.samples, report.extracted, len(report.lacking)) == (0, 0, CHUNKS)
    assert fake.walks == [] and not Path(cfg.output).exists()


@pytest.mark.parametrize("put", [0, 1, 13, 40])
@pytest.mark.parametrize("walk", [1, 2, CHUNKS])
def test_a_stop_in_a_walk_loses_that_chunk_and_no_other(
    cfg: ExtractConfig, fake: Fake, whole: dict[str, bytes], walk: int, put: int
) -> None:
    def stop(walked: int, puts: int) -> None:
        if (walked, puts) == (walk, put % (7 if walk == CHUNKS else 28)):
            raise KeyboardInterrupt

    fake.before_put = stop
    with pytest.raises(KeyboardInterrupt):
        fake.run(cfg)
    assert not list(Path(cfg.output).glob("*.tmp"))
    fake.before_put = lambda walk, put: None
    fake.walks.clear()
    report = fake.run(cfg)
    assert len(fake.walks) == CHUNKS - (walk - 1)
    assert report.samples == 20
    assert content(cfg.output) == whole


@pytest.mark.parametrize("count", [1, 3])
def test_kills_at_random_moments_leave_the_same_store(
    cfg: ExtractConfig, fake: Fake, whole: dict[str, bytes], count: int
) -> None:
    """Every process is killed, again and again, until all are done; while others go on."""
    generator = random.Random(count)
    fake.slowly()
    left, kills = set(range(count)), 0
    while left:
        children = {index: in_a_child(lambda: fake.run(cfg, index, count)) for index in sorted(left)}  # noqa: B023
        for index, child in children.items():
            time.sleep(generator.uniform(0.02, 0.4) * (1 + kills / 20))  # a slow machine ends too
            os.kill(child, signal.SIGKILL)
            code = os.waitpid(child, 0)[1]
            assert code in (0, signal.SIGKILL)
            kills += code != 0
            if code == 0:
                left.remove(index)
        assert kills < 60
    assert kills
    assert content(cfg.output) == whole
    assert fake.walks == []
    fake.run(cfg)
    assert fake.walks == []


def test_a_kill_before_a_chunk_is_listed_does_not_lose_it(
    cfg: ExtractConfig, fake: Fake, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the second chunk walks, the first is still being listed: that the process dies then costs the second."""
    commit = JointStore.commit

    def die(store: JointStore, *args: object) -> None:
        if not load_manifest(store.folder).shards:
            commit(store, *args)  # type: ignore[arg-type]
        else:
            os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(JointStore, "commit", die)
        child = in_a_child(lambda: fake.run(cfg))
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert len(load_manifest(Path(cfg.output)).shards) == 2
    assert len(list(Path(cfg.output).glob("shard-*.safetensors"))) >= 4
    fake.run(cfg)
    assert len(fake.walks) <= CHUNKS - 2
    assert content(cfg.output) == whole


def test_the_chunk_with_the_fingerprint_is_listed_before_the_next_one_walks(
    cfg: ExtractConfig, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The neighbours' numbers are in no file: with a kill in between, that chunk would be lost beside the next."""
    commit, walked = JointStore.commit, []

    def slow(store: JointStore, *args: object) -> None:
        time.sleep(0.1)
        walked.append(len(fake.walks))
        commit(store, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(JointStore, "commit", slow)
    fake.run(cfg)
    assert walked[0] == 1 and walked[1] > 2


def test_an_unlisted_shard_that_does_not_fit_is_written_again(
    cfg: ExtractConfig, fake: Fake, whole: dict[str, bytes]
) -> None:
    fake.run(cfg, 0, 2)
    (Path(cfg.output) / "shard-00002.safetensors").write_bytes(whole["shard-00003.safetensors"])
    fake.run(cfg, 1, 2)
    assert content(cfg.output) == whole


def test_of_a_chunk_that_is_half_there_only_the_missing_shards_are_written(
    cfg: ExtractConfig, fake: Fake, whole: dict[str, bytes]
) -> None:
    fake.run(cfg)
    fake.walks.clear()
    lost, kept = (Path(cfg.output) / f"shard-0000{number}.safetensors" for number in (3, 2))
    lost.unlink()
    before = kept.stat()
    report = fake.run(cfg)
    assert len(fake.walks) == 1 and report.extracted == 1
    assert (kept.stat().st_ino, kept.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert content(cfg.output) == whole


def test_fault_08_a_damaged_shard_is_extracted_again(
    cfg: ExtractConfig, fake: Fake, whole: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    fake.run(cfg)
    fake.walks.clear()
    shard = Path(cfg.output) / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert fake.run(cfg).extracted == 2
    assert "redone: [store.shard_truncated]" in capsys.readouterr().err
    assert len(fake.walks) == 1
    assert content(cfg.output) == whole


def test_a_complete_store_needs_no_engine(cfg: ExtractConfig, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.run(cfg)
    monkeypatch.setattr(stream_extract, "make_engine", lambda *_: pytest.fail("made an engine"))
    assert fake.run(cfg, 1, 5).extracted == 0


def test_a_process_whose_share_is_there_needs_no_engine(
    cfg: ExtractConfig, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.run(cfg, 0, 2)
    monkeypatch.setattr(stream_extract, "make_engine", lambda *_: pytest.fail("made an engine"))
    assert len(fake.run(cfg, 0, 2).lacking) == 1


def test_the_store_keeps_the_sizes_that_it_was_begun_with(
    cfg: ExtractConfig, fake: Fake, whole: dict[str, bytes]
) -> None:
    fake.run(cfg, 0, 2)
    settings = load_manifest(Path(cfg.output)).settings
    assert settings["stream"] == {
        "chunk_tokens": 100,
        "micro_tokens": 16,
        "shard_max_bytes": cfg.shard_max_bytes,
        "shard_max_samples": 2,
    }
    left_open = cfg.stream.model_copy(update={"chunk_tokens": None, "micro_tokens": None})
    fake.run(cfg.model_copy(update={"stream": left_open}), 1, 2)
    assert content(cfg.output) == whole


@pytest.mark.parametrize(("key", "value"), [("chunk_tokens", 90), ("micro_tokens", 8), ("shard_max_samples", 3)])
def test_another_size_is_refused_like_any_other_setting(cfg: ExtractConfig, fake: Fake, key: str, value: int) -> None:
    fake.run(cfg, 0, 2)
    if key in stream_plan.SIZES:
        other = cfg.model_copy(update={"stream": cfg.stream.model_copy(update={key: value})})
    else:
        other = cfg.model_copy(update={key: value})
    with pytest.raises(ProblemsError, match=rf"settings\.stream\.{key}: it was begun with") as error:
        fake.run(other, 1, 2)
    assert kinds(error) == ["store.other_settings"]


def test_the_engine_is_that_of_the_store_where_it_is_left_open(
    cfg: ExtractConfig, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.run(cfg, 0, 2)
    assert load_manifest(Path(cfg.output)).settings["engine"] == "streamed"
    auto = cfg.model_copy(update={"engine": "auto"})
    monkeypatch.setattr(extract, "load_model", lambda *_: pytest.fail("held the whole target"))
    assert fake.run(auto, 1, 2).lacking == []
    with pytest.raises(ProblemsError, match=r"settings\.engine: it was begun with 'streamed'"):
        fake.run(cfg.model_copy(update={"engine": "transformers"}))


def test_a_target_that_does_not_fit_is_streamed(
    cfg: ExtractConfig, fake: Fake, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_choice.psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 20))
    monkeypatch.setattr(stream_plan, "plan_memory", lambda skeleton, section, *_: SimpleNamespace(
        sizes=SimpleNamespace(chunk_tokens=section.chunk_tokens, micro_tokens=section.micro_tokens), lines=list
    ))  # fmt: skip
    fake.run(cfg.model_copy(update={"engine": "auto"}))
    assert content(cfg.output) == whole


def test_two_that_begin_at_once_with_other_sizes_take_those_of_the_first(
    cfg: ExtractConfig, fake: Fake, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second has planned chunks of its own when it finds that the first has begun the store meanwhile."""
    left_open = cfg.stream.model_copy(update={"chunk_tokens": None, "micro_tokens": 8})
    second = cfg.model_copy(update={"stream": left_open.model_copy(update={"micro_tokens": None})})
    plan_memory = stream_plan.plan_memory
    checks: list[int] = []

    def other_memory(skeleton: object, section: object, *args: object) -> object:
        plan = plan_memory(skeleton, section, *args)  # type: ignore[arg-type]
        if section.chunk_tokens is not None:  # type: ignore[attr-defined]
            return plan
        return SimpleNamespace(
            sizes=SimpleNamespace(chunk_tokens=30, micro_tokens=8), lines=lambda: ["of another machine"]
        )

    def first_begins(stream: StreamPlan, engine: object) -> None:
        if not checks:
            checks.append(stream.memory.sizes.chunk_tokens)
            fake.run(cfg, 1, 2)

    monkeypatch.setattr(stream_plan, "plan_memory", other_memory)
    monkeypatch.setattr(stream_extract, "check_engine", first_begins)
    fake.run(second, 0, 2)
    assert checks == [30]
    assert content(cfg.output) == whole


def test_a_second_process_of_the_same_number_is_refused_by_name(cfg: ExtractConfig, fake: Fake) -> None:
    refused: list[list[str]] = []

    def second(walk: int, put: int) -> None:
        if (walk, put) == (2, 0):
            with pytest.raises(ProblemsError) as error:
                fake.run(cfg)
            refused.append(kinds(error))

    fake.before_put = second
    fake.run(cfg)
    assert refused == [["store.same_process"]]


def test_a_full_disk_is_one_error_before_the_walk(
    cfg: ExtractConfig, fake: Fake, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, opened = os.posix_fallocate, []

    def full(descriptor: int, begin: int, size: int) -> None:
        opened.append(size)
        if len(opened) == 4:  # the second shard of the second chunk
            raise OSError(28, os.strerror(28))
        real(descriptor, begin, size)

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(ProblemsError, match="No space left on device") as error:
            fake.run(cfg)
    assert kinds(error) == ["disk.full"] and len(fake.walks) == 1
    assert not list(Path(cfg.output).glob("*.tmp"))
    fake.run(cfg)
    assert content(cfg.output) == whole


@pytest.mark.parametrize("micro", [16, 128])
def test_a_disk_that_fails_in_the_walk_stops_it_with_one_error(
    cfg: ExtractConfig, fake: Fake, monkeypatch: pytest.MonkeyPatch, micro: int
) -> None:
    """Output index 1 is the first to be stored, the third of nine that pass."""
    puts: list[int] = []

    def full(shard: object, *args: object) -> None:
        raise problem_error("disk", "disk.full", "cannot write: No space left on device", "free space")

    def slowly(walk: int, put: int) -> None:
        puts.append(put)
        time.sleep(0.02)

    fake.before_put = slowly
    monkeypatch.setattr(shard_file.ShardFile, "write", full)
    section = cfg.stream.model_copy(update={"micro_tokens": micro})
    with pytest.raises(ProblemsError, match="No space left on device") as error:
        fake.run(cfg.model_copy(update={"stream": section}))
    assert kinds(error) == ["disk.full"]
    pieces = -(-fake.walks[0] // micro)
    assert puts[-1] < 6 * pieces, "the walk went on"
    assert not list(Path(cfg.output).glob("shard-*"))


def test_a_failure_of_the_listing_stops_the_next_walk(
    cfg: ExtractConfig, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = stream_extract.shard_entry

    def failing(path: Path, samples: object) -> object:
        if path.name == "shard-00002.safetensors":
            raise OSError(5, os.strerror(5))
        return entry(path, samples)  # type: ignore[arg-type]

    puts: list[int] = []

    def slowly(walk: int, put: int) -> None:
        puts.append(put)
        time.sleep(0.005)

    fake.before_put = slowly
    monkeypatch.setattr(stream_extract, "shard_entry", failing)
    with pytest.raises(OSError, match="Input/output error"):
        fake.run(cfg)
    assert len(fake.walks) == 3 and puts[-1] < 20, "the third walk went on"
    assert not list(Path(cfg.output).glob("*.tmp"))


def test_a_failure_of_the_last_listing_is_raised(
    cfg: ExtractConfig, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = JointStore.commit

    def failing(store: JointStore, shards: object, fingerprint: object = None) -> None:
        if len(load_manifest(store.folder).shards) == 12:
            raise OSError(5, os.strerror(5))
        commit(store, shards, fingerprint)  # type: ignore[arg-type]

    monkeypatch.setattr(JointStore, "commit", failing)
    with pytest.raises(OSError, match="Input/output error"):
        fake.run(cfg)
    assert len(fake.walks) == CHUNKS


def test_an_engine_that_drops_rows_is_refused_and_nothing_is_listed(
    cfg: ExtractConfig, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dropping:
        def __init__(self, sink: object) -> None:
            self.keys = sink.keys  # type: ignore[attr-defined]
            self._sink = sink

        def put(self, key: object, begin: int, states: object) -> None:
            if key != 3:
                self._sink.put(key, begin, states)  # type: ignore[attr-defined]

    engine_of = stream_extract.make_engine

    def broken(stream: StreamPlan) -> object:
        engine = engine_of(stream)
        walk = engine.walk
        engine.walk = lambda batch, sink, advance: walk(batch, Dropping(sink), advance)  # type: ignore[assignment]
        return engine

    monkeypatch.setattr(stream_extract, "make_engine", broken)
    with pytest.raises(ProblemsError, match="output index 3 has 0 rows") as error:
        fake.run(cfg)
    assert kinds(error) == ["capture.rows"]
    assert not list(Path(cfg.output).glob("shard-*"))


def test_a_failed_self_check_writes_nothing(cfg: ExtractConfig, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise problem_error("c0", "selfcheck.streamed", "differs", "report this")

    monkeypatch.setattr(stream_extract, "check_engine", failing)
    with pytest.raises(ProblemsError, match=r"selfcheck\.streamed"):
        fake.run(cfg)
    assert not Path(cfg.output).exists()


def test_progress_counts_whole_tokens(cfg: ExtractConfig, fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.run(cfg)
    assert "extract: 536/536 tokens" in capsys.readouterr().err


def test_a_store_of_another_engine_is_refused_by_name(cfg: ExtractConfig, fake: Fake) -> None:
    fake.run(cfg, 0, 2)
    path = Path(cfg.output) / "manifest.json"
    manifest = read_json_object(path, "manifest")
    del manifest["settings"]["stream"]
    manifest["settings"]["engine"] = "transformers"
    rewrite_manifest(path, manifest)
    with pytest.raises(ProblemsError) as error:
        fake.run(cfg, 1, 2)
    assert {"store.other_settings"} == set(kinds(error))
    assert "settings.engine" in str(error.value)
    assert as_process(cfg, 0, 1).engine == "streamed"


@pytest.mark.parametrize("stored", [None, [], "x", {"chunk_tokens": "a"}, {"chunk_tokens": -1, "micro_tokens": 16}])
def test_sizes_of_a_store_that_are_none_are_refused(cfg: ExtractConfig, fake: Fake, stored: object) -> None:
    fake.run(cfg, 0, 2)
    path = Path(cfg.output) / "manifest.json"
    manifest = read_json_object(path, "manifest")
    rewrite_manifest(path, {**manifest, "settings": {**manifest["settings"], "stream": stored}})
    left_open = cfg.stream.model_copy(update={"chunk_tokens": None, "micro_tokens": None})

    with pytest.raises(ProblemsError, match=r"settings\.stream") as error:
        fake.run(cfg.model_copy(update={"stream": left_open}), 1, 2)

    assert set(kinds(error)) == {"store.other_settings"}


def test_a_shard_that_no_chunk_would_write_is_refused(cfg: ExtractConfig, fake: Fake) -> None:
    fake.run(cfg)
    (Path(cfg.output) / "shard-00099.safetensors").write_bytes(b"x")

    with pytest.raises(ProblemsError, match="shard-00099") as error:
        fake.run(cfg)

    assert kinds(error) == ["store.foreign_shard"]
