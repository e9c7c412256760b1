"""Samples on disk: the same ones come back, and memory does not grow with them."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
import tracemalloc
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from eagle3.config import ConversationsConfig
from eagle3.data import scratch
from eagle3.data.chat import TokenSample, prepare_samples, prepare_stream, workers
from eagle3.data.chat.sample_file import Each, SampleFile, chosen
from eagle3.data.conversations import Conversation, ConversationStream, load_conversations
from eagle3.data.record_count import expected_records
from eagle3.errors import ProblemsError
from eagle3.files import digest_json
from eagle3.target.identity import ConversationsDigest, conversations_digest

from .cases import kinds
from .chat_cases import talk, tokenizer

SAMPLES = [
    TokenSample("a", [1, 2, 3], [False, True, True], "web"),
    TokenSample("ü🎉", [2**32 - 1], [True]),
    TokenSample("long", list(range(300_000)), [place % 3 > 0 for place in range(300_000)], "web"),
    TokenSample("b", [7] * 9, [True] + [False] * 8, "book"),
]


def test_samples_come_back_as_they_were(tmp_path: Path) -> None:
    found = SampleFile(tmp_path / "not" / "there")
    for place, sample in enumerate(SAMPLES):
        found.add(sample)
        assert found[place] == sample and len(found) == place + 1
    assert list(found) == SAMPLES and found[-1] == SAMPLES[-1] and list(found[1:3]) == SAMPLES[1:3]
    assert list(chosen(found, [3, 0])) == [SAMPLES[3], SAMPLES[0]]
    assert list(Each(found, lambda sample: sample.id)) == ["a", "ü🎉", "long", "b"]
    assert not list(tmp_path.iterdir())
    with pytest.raises(IndexError):
        found[4]


def test_a_full_disk_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = SampleFile(tmp_path)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(ProblemsError) as error:
        found.add(SAMPLES[2])
    assert kinds(error.value) == ["disk.full"]


def test_a_disk_that_will_be_full_is_found_before_a_byte_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third of the file went by when the buffer is full, so all of it needs three times as much."""
    monkeypatch.setattr(scratch, "_BUFFER", 3000)
    config = ConversationsConfig(path=str(write(tmp_path / "data.jsonl", 30)))
    sample = TokenSample("a", [1] * 73, [True] * 73)  # 303 bytes: ten of them fill the buffer

    def fill(free: int) -> SampleFile:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=1 << 40, free=free))
        stream = ConversationStream(config)
        found = SampleFile(tmp_path, stream.share)
        for _ in stream:
            found.add(sample)
        return found

    assert list(fill(10_000)) == [sample] * 30
    monkeypatch.setattr(os, "pwrite", lambda *_: pytest.fail("wrote to a disk that will be full"))
    with pytest.raises(ProblemsError, match=r"needs about 0\.01 MiB, 0\.01 MiB are free") as error:
        fill(9000)
    assert kinds(error.value) == ["chat.scratch"]


@pytest.mark.parametrize("ending", ["jsonl", "csv", "txt", "parquet"])
def test_the_number_of_records_is_about_known(tmp_path: Path, ending: str) -> None:
    path, records = tmp_path / f"data.{ending}", [{"id": str(n), "prompt": "x" * (n % 700)} for n in range(9000)]
    if ending == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    else:
        path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    config = ConversationsConfig(path=str(path))
    assert expected_records(config) == pytest.approx(9000, rel=0.05)
    assert expected_records(config.model_copy(update={"limit": 5})) == 5
    assert expected_records(config.model_copy(update={"split": "train"})) is None


def test_short_writes_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, place: real(file, data[:70_001], place))
    found = SampleFile(tmp_path)
    for sample in SAMPLES:
        found.add(sample)
    assert list(found) == SAMPLES


def test_a_folder_that_may_not_be_written_to_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = SampleFile(Path("/proc"))
    found.add(SAMPLES[0])
    assert list(found) == SAMPLES[:1]


def test_the_digest_of_conversations_that_go_by_is_that_of_their_list() -> None:
    given = [talk("Hi", "Ünder", id="a"), Conversation("b", [{"role": "user", "content": "x"}], [{"n": 1}], None, "s")]
    for some in (given, given[:1], []):
        digest = ConversationsDigest()
        assert list(digest.passing(some)) == some
        assert digest.value() == conversations_digest(some) == digest_json([asdict(item) for item in some])


def write(path: Path, count: int) -> Path:
    turns = [{"role": "user", "content": "Hello? " * 12}, {"role": "assistant", "content": "Yes, yes. " * 12}]
    with open(path, "w") as file:
        for number in range(count):
            file.write(json.dumps({"id": f"c{number}", "messages": turns}) + "\n")
    return path


def peak(path: Path, cache: Path | None = None) -> int:
    """Bytes that going from the records to samples on the disk takes at its highest."""
    tok, samples = tokenizer(), SampleFile(path.parent)
    tracemalloc.start()
    prepare_stream(tok, ConversationStream(ConversationsConfig(path=str(path))), samples.add, 500, cache=cache)
    found = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return found


def test_memory_does_not_grow_with_the_number_of_conversations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation of 240 tokens takes 4 kB of Python objects when it is rendered; what stays is a few digests."""
    monkeypatch.setattr(scratch, "_BUFFER", 1 << 14)
    few, many = (peak(write(tmp_path / f"{count}.jsonl", count)) for count in (500, 3500))
    assert many - few < 400 * 3000


def test_a_bad_record_stops_rendering_but_not_the_search_for_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "data.jsonl", 300)
    lines = path.read_text().splitlines()
    lines[100], lines[250] = '{"id": "c99"', lines[3]
    path.write_text("\n".join(lines))
    seen: list[str] = []
    real = workers._rendering
    monkeypatch.setattr(workers, "_rendering", lambda *given: (seen.append(given[1].id), real(*given))[1])
    with pytest.raises(ProblemsError, match="2 bad records") as error:
        prepare_samples(tokenizer(), ConversationStream(ConversationsConfig(path=str(path))), 500)
    assert kinds(error.value) == ["conversations.not_json", "conversations.duplicate_id"]
    assert f"{path}:251: id 'c3' is that of {path}:4 too" in str(error.value).replace(": [", ":")
    assert len(seen) <= 128
    with pytest.raises(ProblemsError, match="2 bad records"):
        load_conversations(ConversationsConfig(path=str(path)))
    with pytest.raises(ProblemsError, match="2 bad records"):
        prepare_samples(tokenizer(None), ConversationStream(ConversationsConfig(path=str(path))), 500)
