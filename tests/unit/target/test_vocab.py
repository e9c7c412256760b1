"""`eagle3 vocab`: counted from conversations and from stores, shown, made and edited."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from eagle3.cli import main
from eagle3.data.chat import load_tokenizer, tokenizer_digest
from eagle3.data.vocab_file import read_vocab
from eagle3.errors import ProblemsError
from eagle3.target.extract import run_extract
from eagle3.target.vocab import count_conversations, count_dataset
from tests.unit.target.cases import extract_config

TinyTarget = Callable[[str], Path]


def conversations(path: Path) -> Path:
    records = [
        {"id": f"{source}{number}", "source": source, "instruction": "Say it.", "output": text * (number + 1)}
        for source, text in (("web", "aaab"), ("book", "zzy"))
        for number in range(3)
    ]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(list(args))
    return int(stop.value.code or 0)


def test_conversations_and_their_store_count_the_same(tiny_target: TinyTarget, tmp_path: Path) -> None:
    target = tiny_target("llama")
    cfg = extract_config(target, conversations(tmp_path / "data.jsonl"), tmp_path / "store", output_indices=[1, 4])
    before = count_conversations(cfg)
    run_extract(cfg)
    after = count_dataset(str(tmp_path / "store"))
    assert before.counts.total.equal(after.counts.total)
    assert (before.forced, before.tokenizer_digest) == (after.forced, after.tokenizer_digest)
    assert set(before.counts.by_source) == set(after.counts.by_source) == {"web", "book"}
    assert all(counted.equal(after.counts.by_source[name]) for name, counted in before.counts.by_source.items())
    assert before.report().to_dict() == after.report().to_dict()
    tokenizer = load_tokenizer(str(target))
    assert set(before.forced) == set(tokenizer.added_tokens_decoder)
    assert before.tokenizer_digest == tokenizer_digest(tokenizer)
    assert before.counts.total[tokenizer.convert_tokens_to_ids("<|im_end|>")] == 6
    with pytest.raises(ProblemsError):
        count_dataset(str(tmp_path / "absent"))


def test_forced_added_and_removed_tokens(tiny_target: TinyTarget, tmp_path: Path) -> None:
    data = conversations(tmp_path / "data.jsonl")
    counted = count_conversations(extract_config(tiny_target("llama"), data, tmp_path / "store", output_indices=[1]))
    plain = counted.choose(20)
    assert set(counted.forced) <= set(plain.vocab.ids.tolist()) and len(plain.vocab) == 20
    assert plain.counted["share"] == 1.0
    most = int(counted.counts.total.argmax())
    changed = counted.choose(20, add=[300], remove=[most])
    assert 300 in changed.vocab.ids and most not in changed.vocab.ids and len(changed.vocab) == 20
    assert changed.counted["share"] < 1.0
    for wrong in ({"add": [-1]}, {"add": [5], "remove": [5]}, {"remove": range(500)}):
        with pytest.raises(ProblemsError, match=r"vocab\.ids"):
            counted.choose(20, **wrong)


def test_the_commands(tiny_target: TinyTarget, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = conversations(tmp_path / "data.jsonl")
    given = [f"target.path={tiny_target('llama')}", f"data.path={data}", "output=o", "output_indices=[1]"]
    made, edited = tmp_path / "vocab.json", tmp_path / "edited.json"
    assert run("vocab", "show", *given, "--sample", "4", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["samples"], found["of"], found["left_out"]) == (4, 6, [8000, 16000, 32000, 64000])
    assert run("vocab", "make", str(made), *given, "--size", "30", "--add", "300,301") == 0
    assert {300, 301} <= set(read_vocab(made).vocab.ids.tolist())
    assert run("vocab", "edit", str(made), str(edited), "--remove", "300", "--add", "302") == 0
    assert read_vocab(made).vocab.ids.tolist() != read_vocab(edited).vocab.ids.tolist()
    capsys.readouterr()
    assert run("vocab", "show", "--file", str(edited)) == 0
    assert read_vocab(edited).vocab.digest in capsys.readouterr().out
    assert run("vocab", "edit", str(made), str(edited), "--add", "many") == 2
    assert run("vocab", "show") == 2
