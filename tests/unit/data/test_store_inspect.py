"""What `eagle3 data inspect` says of a store."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle3.cli import data as cli_data
from eagle3.cli import main
from eagle3.data.chat import load_tokenizer, tokenizer_digest
from eagle3.data.store import StoredSample
from eagle3.data.store_inspect import inspect_store, marked, render_inspection, sample_parts
from eagle3.errors import ProblemsError
from eagle3.target.tiny import make_tiny_llama

from .cases import AUX, HIDDEN, contract, kinds, make_store, sample, target_head, writer

TEXT = ("<|im_start|>user\nWas heißt naïve?\x1b[2J<|im_end|>\n", "Ünbefangen.<|im_end|>", "\n")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("target"))


@pytest.fixture
def folder(tmp_path: Path, target: Path) -> Path:
    """One sample whose middle part is supervised."""
    tokenizer = load_tokenizer(str(target))
    ids, mask = [], []
    for number, text in enumerate(TEXT):
        part = tokenizer.encode(text, add_special_tokens=False)
        ids += part
        mask += [number == 1] * len(part)
    states = [torch.zeros(len(ids), width, dtype=torch.bfloat16) for width in (AUX * HIDDEN, HIDDEN)]
    head = {name: tensor.new_zeros(len(tokenizer), *tensor.shape[1:]) for name, tensor in target_head().items()}
    head["norm.weight"] = torch.ones(HIDDEN)
    of = contract(vocab_size=len(tokenizer), tokenizer_digest=tokenizer_digest(tokenizer))
    with writer(tmp_path / "store", contract=of, target_head=head) as store:
        store.write_shard(
            [
                StoredSample(
                    "only", torch.tensor(ids), torch.tensor(mask), *states, torch.zeros(len(ids), dtype=torch.int32)
                )
            ]
        )
    return tmp_path / "store"


def test_counts_bytes_and_histograms_are_the_manifests(tmp_path: Path) -> None:
    folder = make_store(tmp_path / "store", samples=6)  # 3 to 8 tokens, two of them supervised
    found = inspect_store(folder)
    size = sum(path.stat().st_size for path in folder.glob("shard-*"))
    assert found["counts"] == {"shards": 3, "samples": 6, "tokens": 33, "supervised": 12}
    assert found["bytes"]["shards"] == size and found["bytes"]["per_token"] == size / 33
    assert found["bytes"]["target_head"] == (folder / "target_head.safetensors").stat().st_size
    assert found["lengths"] == [
        {"from": 2, "below": 4, "samples": 1},
        {"from": 4, "below": 8, "samples": 4},
        {"from": 8, "below": 16, "samples": 1},
    ]
    by_tenth = [bucket["samples"] for bucket in found["loss_fractions"]]
    assert by_tenth == [0, 0, 2, 1, 1, 1, 1, 0, 0, 0]  # 2/8, 2/7 | 2/6 | 2/5 | 2/4 | 2/3
    assert json.loads(json.dumps(found))["contract"] == contract().to_dict()


def test_samples_and_tokens_are_counted_by_source(tmp_path: Path) -> None:
    samples = [sample(f"s{number}", tokens=4 + number) for number in range(4)]
    named = [replace(item, source=source) for item, source in zip(samples, ("b", None, "a\x1b", "b"), strict=True)]
    with writer(tmp_path / "store") as store:
        store.write_shard(named)
    found = inspect_store(tmp_path / "store")
    supervised = [int(item.loss_mask.sum()) for item in samples]
    assert found["sources"] == [
        {"source": "a\x1b", "samples": 1, "tokens": 6, "supervised": supervised[2]},
        {"source": "b", "samples": 2, "tokens": 11, "supervised": supervised[0] + supervised[3]},
        {"source": None, "samples": 1, "tokens": 5, "supervised": supervised[1]},
    ]
    text = render_inspection(found)
    assert "samples by source" in text and "no source" in text and "\x1b" not in text


def test_a_store_without_sources_says_nothing_of_them(folder: Path) -> None:
    found = inspect_store(folder)
    assert [row["source"] for row in found["sources"]] == [None]
    assert "by source" not in render_inspection(found)


def test_the_contract_is_said_in_words_and_in_each_engines_numbers(tmp_path: Path) -> None:
    text = render_inspection(inspect_store(make_store(tmp_path / "store")))
    for said in (
        "tiny (llama, 8 layers, hidden size 4, vocabulary 20)",
        "the outputs of layers 1, 3, 4 (output indices 1, 3, 4; layers count from 0)",
        "after the final norm (post_norm)",
        "stored as bfloat16",
        "6 samples in 3 shards: 33 tokens, of which 12 supervised (36.4%)",
        "store_dtype: bfloat16",
    ):
        assert said in text
    rows = {line.split()[0]: line for line in text.splitlines() if line.startswith("  ") and "[" in line}
    assert "[1, 3, 4]" in rows["SGLang"] and "[2, 4, 5]" in rows["vLLM"]


def test_a_store_that_was_only_begun_can_be_inspected(tmp_path: Path) -> None:
    writer(tmp_path / "store").close()
    found = inspect_store(tmp_path / "store")
    assert found["counts"]["samples"] == 0 and found["bytes"]["per_token"] is None
    assert "0 samples in 0 shards" in render_inspection(found)


def test_a_samples_text_is_cut_where_supervision_begins_and_ends(folder: Path, target: Path) -> None:
    name, parts = sample_parts(folder, target=str(target))
    assert name == "only"
    assert parts == [(TEXT[0].replace("\x1b", "\\u001b"), False), (TEXT[1], True), (TEXT[2], False)]
    assert marked(parts).endswith("{+Ünbefangen.<|im_end|>+}\n")


def test_other_samples_and_other_tokenizers_are_refused(folder: Path, target: Path, tmp_path: Path) -> None:
    with pytest.raises(ProblemsError, match="'nobody'") as error:
        sample_parts(folder, "nobody", str(target))
    assert kinds(error.value) == ["inspect.no_sample"]
    other = make_store(tmp_path / "other")
    with pytest.raises(ProblemsError) as error:
        sample_parts(other, target=str(target))
    assert kinds(error.value) == ["inspect.other_tokenizer"]


@pytest.mark.parametrize("terminal", [True, False])
def test_the_command_highlights_on_a_terminal_and_marks_elsewhere(
    folder: Path, target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    screen = io.StringIO()
    real = cli_data.Console
    monkeypatch.setattr(cli_data, "Console", lambda **kwargs: real(file=screen, force_terminal=terminal, **kwargs))
    with pytest.raises(SystemExit):
        main(["data", "inspect", str(folder), "--sample", "only", "--target", str(target)])
    assert "1 samples in 1 shards" in capsys.readouterr().out
    shown = screen.getvalue()
    assert ("\x1b[1;32mÜnbefangen.<|im_end|>\x1b[0m" in shown) == terminal
    assert ("{+Ünbefangen.<|im_end|>+}" in shown) != terminal
    assert "\\u001b[2J" in shown and "\x1b[2J" not in shown


def test_as_json_it_is_one_document(folder: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["data", "inspect", str(folder), "--target", str(target), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [part["supervised"] for part in found["sample"]["parts"]] == [False, True, False]
    assert {"store", "contract", "layers", "settings", "counts", "bytes", "lengths", "loss_fractions"} < found.keys()
