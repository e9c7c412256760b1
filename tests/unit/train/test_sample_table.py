"""What the sample table says of held-out samples is what serving would do with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from eagle3.config import TrainConfig
from eagle3.data.chat import tokenizer_digest
from eagle3.data.open_reader import open_reader
from eagle3.data.store import StoredSample
from eagle3.evaluate import shown as module
from eagle3.evaluate.shown import Round, Shown
from eagle3.files import write_json_atomic
from eagle3.train import sample_table
from eagle3.train.sample_table import COLUMNS, columns, render
from eagle3.train.tracking import read_log
from eagle3.train.trainer import run_training
from tests.stores import (
    HIDDEN,
    TARGET_CONFIG,
    VOCAB,
    random_contract,
    random_sample,
    train_config,
    write_random_store,
)


def config_for(folder: Path, **values: object) -> TrainConfig:
    store = folder / "store"
    settings: dict[str, object] = {"epochs": 30, "batch_size": 3, "eval_every": 40, "eval_dataset": str(store)}
    return train_config(store, folder / "run", **{**settings, **values})


def own_answer(sample: StoredSample) -> StoredSample:
    """The sample with the greedy tokens of `write_random_store`'s head, at seed 0, as its text."""
    generator = torch.Generator().manual_seed(0)
    _, head = (torch.randn(VOCAB, HIDDEN, generator=generator) for _ in range(2))
    greedy = (sample.last_hidden_states @ head.T).argmax(-1)
    return replace(sample, input_ids=torch.cat([sample.input_ids[:1], greedy[:-1].int()]))


def test_rounds_spell_the_answer_and_come_to_the_evaluations_acceptance_length(tmp_path: Path) -> None:
    """The drafter is evaluated on what it learns by heart, so that some drafts are accepted and some are not."""
    answers = [(16, (2, 16)), (12, (1, 12)), (9, (4, 9)), (14, (3, 14))]
    reader = open_reader(str(write_random_store(tmp_path / "store", answers, change=own_answer)))
    run_training(config_for(tmp_path, tracking={"log_every": 1, "samples": 6}))
    tables = read_log(tmp_path / "run" / "samples.jsonl")
    evals = [record for record in read_log(tmp_path / "run" / "log.jsonl") if record["kind"] == "eval"]
    assert [table["step"] for table in tables] == [record["step"] for record in evals] == [0, 40, 60]
    samples = {sample.id: reader.read(index) for index, sample in enumerate(reader.samples)}
    for table, record in zip(tables, evals, strict=True):
        assert {row["sample"] for row in table["samples"]} == set(samples)
        committed = rounds = 0
        for row in table["samples"]:
            sample = samples[row["sample"]]
            answer = [row["first"]]
            for item in row["rounds"]:
                assert item["missed"] is None or item["missed"] != item["own"]
                answer += item["accepted"] + ([] if item["own"] is None else [item["own"]])
            assert row["prompt"] + answer == sample.input_ids.tolist()
            committed, rounds = committed + len(answer) - 1, rounds + len(row["rounds"])
        assert committed / rounds == pytest.approx(record["acceptance_length"])
    last = [item for row in tables[-1]["samples"] for item in row["rounds"]]
    assert any(len(item["accepted"]) == 3 for item in last) and any(item["missed"] is not None for item in last)


def test_long_prompts_and_answers_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROMPT_TOKENS", 2)
    monkeypatch.setattr(module, "ANSWER_TOKENS", 5)
    write_random_store(tmp_path / "store", [(14, (4, 14)), (6, (0, 6)), (9, (8, 9))])
    run_training(config_for(tmp_path, epochs=1, tracking={"log_every": 1, "samples": 3}))
    rows = read_log(tmp_path / "run" / "samples.jsonl")[0]["samples"]
    assert [row["sample"] for row in rows] == ["s00", "s01"], "an answer of one token has no round"
    for row, prompt, answer in zip(rows, (2, 1), (5, 4), strict=True):
        assert len(row["prompt"]) == prompt
        assert 1 + sum(len(item["accepted"]) + (item["own"] is not None) for item in row["rounds"]) == answer


def test_none_are_shown_where_none_are_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_random_store(tmp_path / "store", count=6)
    run_training(config_for(tmp_path, epochs=1, tracking={"samples": 0}))
    assert read_log(tmp_path / "run" / "samples.jsonl") == [] and not (tmp_path / "run" / "samples.md").exists()
    assert "token ids" not in capsys.readouterr().err


def test_without_a_tokenizer_it_says_once_that_ids_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_random_store(tmp_path / "store", count=6)
    run_training(config_for(tmp_path, epochs=2, eval_every=1))
    said = capsys.readouterr().err
    assert said.count("samples are shown as token ids: random is no folder here, and not in the hub's cache") == 1
    row = read_log(tmp_path / "run" / "samples.jsonl")[0]["samples"][0]
    assert row["prompt_text"].split() == [str(token) for token in row["prompt"]]


@pytest.fixture
def target(tmp_path: Path) -> tuple[Path, str]:
    """A target's folder, and the digest of its tokenizer: token 7 is `w7`, or a mark that Markdown would take."""
    words = {f"w{number} " if number else "<|end|>\n": number for number in range(VOCAB)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w1 ")))
    tokenizer.save_pretrained(tmp_path / "target")
    write_json_atomic(tmp_path / "target" / "config.json", {**TARGET_CONFIG, "architectures": ["LlamaForCausalLM"]})
    return tmp_path / "target", tokenizer_digest(tokenizer)


def test_the_targets_tokenizer_gives_text(
    tmp_path: Path, target: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, digest = target
    monkeypatch.setattr(sample_table, "recorded_target", lambda _: str(folder))
    write_random_store(tmp_path / "store", count=6, contract=replace(random_contract(), tokenizer_digest=digest))
    run_training(config_for(tmp_path, epochs=1))
    rows = read_log(tmp_path / "run" / "samples.jsonl")[-1]["samples"]
    for row in rows:
        spelled = [("<|end|>\n" if token == 0 else f"w{token} ") for token in row["prompt"]]
        assert row["prompt_text"].split() == "".join(spelled).split()
    assert rows[0]["answer_text"] in columns(5, rows)[0] and len(columns(5, rows)[0]) == len(COLUMNS)
    assert "token ids" not in capsys.readouterr().err
    assert f"## {rows[0]['sample']}: " in (tmp_path / "run" / "samples.md").read_text()


def test_another_tokenizer_is_not_used(
    tmp_path: Path, target: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sample_table, "recorded_target", lambda _: str(target[0]))
    write_random_store(tmp_path / "store", count=6)
    run_training(config_for(tmp_path, epochs=1))
    assert f"as token ids: the tokenizer in {target[0]} is not the dataset's" in capsys.readouterr().err


def test_marks_in_a_text_are_left_alone() -> None:
    shown = Shown("s", [1], 2, [Round([3], 4, 5), Round([6], None, None)])
    assert shown.length == 1.5
    texts = {"prompt_text": "# a\n<b>", "answer_text": "x⟦y⟧z", "round_texts": ["1 accepted: ⟦y\n⟧z, not 'q'"]}
    row = {"sample": "s", "acceptance_length": 1.5, **texts}
    text = render(3, [row])
    assert text.splitlines()[4:] == [
        "## s: 1.50 tokens a round", "", "    prompt ends:", "    # a", "    <b>", "    ", "    answer:", "    x⟦y⟧z",
        "    ", "    rounds:", "      1 1 accepted: ⟦y ⟧z, not 'q'",
    ]  # fmt: skip


def test_what_was_missed_is_the_draft_after_the_accepted_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    drafts = torch.full((2, 1, 6), -1)
    drafts[:, 0, 0], drafts[:, 0, 2] = torch.tensor([2, 7]), torch.tensor([4, 5])
    monkeypatch.setattr(module, "draft_tokens", lambda *_: drafts)
    sample = replace(random_sample("s", 6, (1, 6), 0), input_ids=torch.tensor([9, 1, 2, 3, 4, 5], dtype=torch.int32))
    found = module.show(torch.nn.Linear(1, 1), sample, None, 2, 16)  # type: ignore[arg-type]
    assert found == Shown("s", [9], 1, [Round([2], 7, 3), Round([4, 5], None, None)])
