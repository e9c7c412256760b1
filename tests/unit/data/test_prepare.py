"""Samples of many conversations: splitting, the report, several processes, the cache."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
from transformers import dynamic_module_utils

from eagle3.data.chat import load_tokenizer, prepare_samples, workers
from eagle3.data.chat.render import render
from eagle3.data.conversations import Conversation
from eagle3.errors import ProblemsError
from tests.disks import small_disk

from . import chat_cases
from .cases import kinds
from .chat_cases import supervised, talk, tokenizer

REWRITES = chat_cases.REWRITES_HISTORY
MANY = [talk("Hi", f"Hello {number}.", id=str(number), source=f"s{number % 2}") for number in range(130)]
BAD = [talk("<|end|>", "x", id="bad", source="s0"), Conversation("first", [{"role": "assistant", "content": "x"}])]


@pytest.mark.parametrize("name", ["GENERATION", "GENERATION_WITHOUT_END", "GENERATION_WITH_HEADER", "CHATML"])
@pytest.mark.parametrize("answer", ["世", "世a", "a世", "🎉", "a👩‍👩‍👧", "é", "日本語🎉"])
def test_spans_begin_and_end_with_all_bytes_of_a_character(name: str, answer: str) -> None:
    tok = tokenizer(getattr(chat_cases, name))
    rendered = render(tok, talk("世", answer, "🎉", answer))
    assert supervised(tok, rendered) == [f"{answer}<|end|>"] * 2
    assert sum(rendered.loss_mask) == 2 * (len(answer.encode()) + 1)


def test_fault_02_answers_of_a_rewriting_template_are_split_and_counted() -> None:
    conversations = [talk("Hi", "Hello.", "And?", "Bye", id="two"), talk("Hi", "Ho", id="one")]
    samples, report = prepare_samples(tokenizer(REWRITES), conversations, 500)
    assert [sample.id for sample in samples] == ["two#1", "two#3", "one"]
    assert (report.kept, report.split, report.samples) == (2, 1, 3)
    assert "1 of them split, a sample for each answer: 3 samples in all" in str(report)
    with pytest.raises(ProblemsError) as error:
        prepare_samples(tokenizer(REWRITES), conversations, 500, split_turns="never")
    assert kinds(error.value) == ["chat.history_rewritten"]


def test_a_template_that_rewrites_nothing_splits_nothing_unless_told_to() -> None:
    conversation = talk("Hi", "Hello.", "And?", "Bye", id="a")
    for split, names in (("auto", ["a"]), ("never", ["a"]), ("always", ["a#1", "a#3"])):
        samples, _ = prepare_samples(tokenizer(), [conversation], 500, split_turns=split)
        assert [sample.id for sample in samples] == names
    tok = tokenizer()
    samples, _ = prepare_samples(tok, [conversation], 500, split_turns="always")
    assert [supervised(tok, sample) for sample in samples] == [["Hello.<|end|>"], ["Bye<|end|>"]]


def test_a_split_answer_beyond_the_longest_length_is_dropped_alone() -> None:
    conversation = talk("Hi", "Hello.", "a" * 100, "Bye", id="two")
    samples, report = prepare_samples(tokenizer(REWRITES), [conversation], 60)
    assert [sample.id for sample in samples] == ["two#1"]
    assert (report.kept, report.dropped) == (1, {"no supervised token in the sample of an answer": 1})


def test_a_split_samples_name_is_not_given_twice() -> None:
    conversations = [talk("Hi", "Ho", id="two#1"), talk("Hi", "Hello.", "And?", "Bye", id="two")]
    with pytest.raises(ProblemsError, match="'two#1' is there already") as error:
        prepare_samples(tokenizer(REWRITES), conversations, 500)
    assert kinds(error.value) == ["chat.duplicate_id"]


def test_the_report_counts_by_reason_and_source() -> None:
    samples, report = prepare_samples(tokenizer(), [*MANY[:3], *BAD], 500, skip_bad=True)
    assert [sample.source for sample in samples] == ["s0", "s1", "s0"]
    found = json.loads(json.dumps(report.to_dict()))
    assert found["dropped"] == {"chat.control_token": 1, "chat.assistant_first": 1}
    assert found["sources"] == [
        {"source": "s0", "kept": 2, "dropped": {"chat.control_token": 1}},
        {"source": "s1", "kept": 1, "dropped": {}},
        {"source": None, "kept": 0, "dropped": {"chat.assistant_first": 1}},
    ]
    assert "  s0: 2 kept; dropped: 1 chat.control_token" in str(report)
    report.take_out(samples[0], "extract.too_long")
    assert (report.kept, report.kept_of["s0"]) == (2, 1)
    assert report.dropped["extract.too_long"] == 1


def test_several_processes_render_the_same_in_the_same_order() -> None:
    tok = tokenizer()
    alone = prepare_samples(tok, [*MANY, *BAD], 500, skip_bad=True, workers=1)
    both = prepare_samples(tok, [*MANY, *BAD], 500, skip_bad=True, workers=2)
    assert both[0] == alone[0]
    assert both[1].to_dict() == alone[1].to_dict()


OWN_CODE = """
from transformers import PreTrainedTokenizer


class Bytes(PreTrainedTokenizer):
    vocab_size = 256

    def get_vocab(self):
        return {f"b{byte}": byte for byte in range(256)} | dict(self.added_tokens_encoder)

    def _tokenize(self, text, **_):
        return [f"b{byte}" for byte in text.encode()]

    def _convert_token_to_id(self, token):
        return int(token[1:])

    def _convert_id_to_token(self, index):
        return f"b{index}"

    def convert_tokens_to_string(self, tokens):
        return bytes(int(token[1:]) for token in tokens).decode(errors="replace")
"""


def test_a_tokenizer_with_its_own_code_renders_in_several_processes_and_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kimi's is one: slow, and of a class that no package has."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "tok").mkdir()
    (tmp_path / "tok" / "tokenization_own.py").write_text(OWN_CODE)
    config = {"auto_map": {"AutoTokenizer": ["tokenization_own.Bytes", None]}, "tokenizer_class": "Bytes"}
    marks = {"eos_token": "<|end|>", "additional_special_tokens": ["<|start|>"], "chat_template": chat_cases.CHATML}
    (tmp_path / "tok" / "tokenizer_config.json").write_text(json.dumps({**config, **marks}))
    with pytest.raises(ProblemsError, match="trust_remote_code"):
        load_tokenizer(str(tmp_path / "tok"))
    tok = load_tokenizer(str(tmp_path / "tok"), trust_remote_code=True)
    assert not tok.is_fast
    alone = prepare_samples(tok, MANY, 500, workers=1)[0]
    assert prepare_samples(tok, MANY, 500, workers=2, cache=tmp_path / "cache")[0] == alone
    assert prepare_samples(tok, MANY, 500, workers=1, cache=tmp_path / "cache")[0] == alone
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".parquet"]


def test_a_process_that_dies_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pool:
        def __init__(self, *_: Any) -> None:
            raise BrokenProcessPool("killed")

    monkeypatch.setattr(workers, "ProcessPoolExecutor", Pool)
    with pytest.raises(ProblemsError) as error:
        prepare_samples(tokenizer(), MANY, 500, workers=2)
    assert kinds(error.value) == ["chat.worker_died"]


@pytest.fixture
def rendered_ids(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Ids of the conversations that were rendered, and not taken from the cache."""
    seen: list[str] = []
    real = workers._rendering

    def spy(renderer: Any, conversation: Conversation, split: Any) -> Any:
        seen.append(conversation.id)
        return real(renderer, conversation, split)

    monkeypatch.setattr(workers, "_rendering", spy)
    yield seen


def test_what_was_rendered_is_kept_in_the_folder_given(tmp_path: Path, rendered_ids: list[str]) -> None:
    tok = tokenizer(REWRITES)
    conversations = [*MANY[:2], *BAD, talk("Hi", "Hello.", "And?", "Bye", id="two")]
    first = prepare_samples(tok, conversations, 500, skip_bad=True, cache=tmp_path / "cache")
    assert len(rendered_ids) == 5
    again = prepare_samples(tok, conversations, 400, skip_bad=True, cache=tmp_path / "cache")
    assert len(rendered_ids) == 5
    assert [sample.id for sample in again[0]] == [sample.id for sample in first[0]]
    whole = prepare_samples(tok, conversations, 500, skip_bad=True, cache=tmp_path / "cache")
    assert whole[0] == first[0] and whole[1].to_dict() == first[1].to_dict()
    with pytest.raises(ProblemsError) as error:
        prepare_samples(tok, conversations, 500, cache=tmp_path / "cache")
    assert kinds(error.value) == ["chat.control_token", "chat.assistant_first"]
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".parquet"]


def test_fault_11_the_cache_knows_content_and_never_a_name(tmp_path: Path, rendered_ids: list[str]) -> None:
    """Other data, another template, tokenizer, argument or way to split: rendered anew; the same elsewhere: not."""
    tok = tokenizer()

    def count(*conversations: Conversation, tok: Any = tok, **options: Any) -> int:
        before = len(rendered_ids)
        prepare_samples(tok, conversations, 500, cache=tmp_path, **options)
        return len(rendered_ids) - before

    one = talk("Hi", "ll")
    assert count(one) == 1
    tok.name_or_path = "elsewhere"
    tok("text", truncation=True, max_length=1)  # leaves its mark in the backend's state
    assert count(one) == 0
    assert count(talk("Hi", "lm")) == 1
    assert count(one, template_kwargs={"thinking": True}) == 1
    assert count(one, split_turns="always") == 1
    assert count(one, tok=tokenizer(chat_cases.GENERATION)) == 1
    merged = tokenizer(merges=[("l", "l")])
    assert count(one, tok=merged) == 1
    assert len(merged("ll").input_ids) == 1
    assert count(one) == 0


def test_a_damaged_cache_file_is_named_and_never_read_otherwise(tmp_path: Path) -> None:
    """One byte at a time: it is refused, or what was there."""
    whole, _ = prepare_samples(tokenizer(), MANY, 500, cache=tmp_path)
    [path] = tmp_path.iterdir()
    data, refused = path.read_bytes(), 0
    for place in range(4, len(data), len(data) // 60):
        path.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        try:
            assert prepare_samples(tokenizer(), MANY, 500, cache=tmp_path)[0] == whole
        except ProblemsError as error:
            assert kinds(error) == ["chat.cache"] and path.name in str(error)
            refused += 1
    assert refused > 20


def test_a_missing_template_is_one_problem() -> None:
    with pytest.raises(ProblemsError) as error:
        prepare_samples(tokenizer(None), MANY, 500, skip_bad=True)
    assert kinds(error.value) == ["chat.no_template"]


def test_conversations_that_cannot_be_rendered_are_counted_once_each() -> None:
    two_faults = talk("<|end|>", "<|end|>", id="both")
    with pytest.raises(ProblemsError, match="1 of 2 conversations cannot be rendered") as error:
        prepare_samples(tokenizer(), [two_faults, talk("a" * 600, "x", id="long")], 500)
    assert kinds(error.value) == ["chat.control_token"] * 2


def test_two_bos_are_refused() -> None:
    tok = tokenizer("{{ bos_token }}{{ bos_token }}" + chat_cases.CHATML)
    with pytest.raises(ProblemsError) as error:
        render(tok, talk("Hi", "Ho"))
    assert kinds(error.value) == ["chat.two_bos"]


def test_a_folder_in_place_of_a_cache_file_is_no_empty_cache(tmp_path: Path) -> None:
    prepare_samples(tokenizer(), MANY, 500, cache=tmp_path)
    [path] = tmp_path.iterdir()
    path.unlink()
    path.mkdir()
    with pytest.raises(ProblemsError) as error:
        prepare_samples(tokenizer(), MANY, 500, cache=tmp_path)
    assert kinds(error.value) == ["chat.cache"]


def test_a_cache_that_cannot_be_written_is_one_error_and_leaves_nothing(
    tmp_path: Path, rendered_ids: list[str]
) -> None:
    (tmp_path / "file").touch()
    for folder, kind in ((tmp_path / "file", "disk.not_a_folder"), (Path("s3:/bucket/cache"), "remote.not_here")):
        with pytest.raises(ProblemsError) as error:
            prepare_samples(tokenizer(), MANY, 500, cache=folder)
        assert kinds(error.value) == [kind]
    assert rendered_ids == []  # nothing was rendered in vain
    with small_disk(tmp_path / "small", "8k") as disk:
        (disk / "full").write_bytes(b"0" * 8192)
        with pytest.raises(ProblemsError) as error:
            prepare_samples(tokenizer(), MANY, 500, cache=disk)
        assert kinds(error.value) == ["disk.full"]
        assert [path.name for path in disk.iterdir()] == ["full"]
