"""`eagle3 data show` and `eagle3 data check`."""

from __future__ import annotations

import io
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from rich.console import Console

from eagle3.cli import main
from eagle3.data.chat import load_tokenizer, tokenizer_digest
from eagle3.data.show.find import Found, find_samples
from eagle3.data.show.page import samples_page
from eagle3.data.show.pieces import Piece, ShownSample, shown_sample
from eagle3.data.show.printable import printable_name
from eagle3.data.show.terminal import marked, print_samples
from eagle3.data.store import StoredSample
from eagle3.errors import ProblemsError
from eagle3.target.tiny import make_tiny_llama

from . import chat_cases
from .cases import AUX, HIDDEN, contract, kinds, target_head, writer
from .chat_cases import tokenizer

EVIL = "<script>alert('x')</script> [red]a&b[/red] \x1b[2J\u202e"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_llama(tmp_path_factory.mktemp("target")))


@pytest.fixture
def talks(tmp_path: Path) -> str:
    path = tmp_path / "data.jsonl"
    records = [
        {"id": f"c{number}", "source": "web", "instruction": f"Say {number}", "output": f"Grüße 🎉 {number}"}
        for number in range(4)
    ]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return str(path)


def the_store(folder: Path, target: str) -> str:
    tok = load_tokenizer(target)
    with writer(
        folder,
        contract=contract(vocab_size=len(tok), tokenizer_digest=tokenizer_digest(tok)),
        target_head={
            **{name: tensor.new_zeros(len(tok), *tensor.shape[1:]) for name, tensor in target_head().items()},
            "norm.weight": torch.ones(HIDDEN),
        },
    ) as store:
        for name in ("a", "b#1", "b#3"):
            ids = tok(f"Hi <|im_end|>{name} 🎉", add_special_tokens=False)["input_ids"]
            states = [torch.zeros(len(ids), width, dtype=torch.bfloat16) for width in (AUX * HIDDEN, HIDDEN)]
            mask = torch.arange(len(ids)) > 2
            store.write_shard(
                [StoredSample(name, torch.tensor(ids), mask, *states, torch.zeros(len(ids), dtype=torch.int32))]
            )
    return str(folder)


def text(found: Found, **console: object) -> str:
    out = io.StringIO()
    print_samples(found.samples, found.about, Console(file=out, highlight=False, soft_wrap=True, **console))
    return out.getvalue()


def test_each_token_is_a_piece_and_a_character_of_several_is_shown_once() -> None:
    tok = tokenizer(merges=[("H", "i")])
    ids = tok("Hi\n世é<|end|>").input_ids
    sample = shown_sample(tok, "a", ids, [False, True, *[True] * 5, False])
    assert [piece.text for piece in sample.pieces] == ["Hi", "\n", "世", "", "", "é", "", "<|end|>"]
    assert [piece.token for piece in sample.pieces] == ids
    assert marked(sample.pieces) == "Hi{+↵\n¦世¦·¦·¦é¦·+}<|end|>"
    assert sample.counts == "8 tokens, 6 supervised (75.0%)"


def test_a_broken_character_ends_with_the_sample() -> None:
    tok = tokenizer()
    ids = tok("a世").input_ids[:-1]
    assert [piece.text for piece in shown_sample(tok, "a", ids, [True] * 3).pieces] == ["a", "\ufffd", ""]


def test_conversations_are_shown_as_they_are_trained_on(talks: str, target: str) -> None:
    found = find_samples(talks, target=target, limit=2)
    assert [(sample.id, sample.source) for sample in found.samples] == [("c0", "web"), ("c1", "web")]
    first = found.samples[0]
    said = "".join(piece.text for piece in first.pieces if piece.supervised)
    assert said == "Grüße 🎉 0<|im_end|>"
    assert "2 of 2 conversations kept" in text(found)
    [only] = find_samples(talks, target=target, sample_id="c3").samples
    assert only.id == "c3"


def test_overrides_reach_the_rendering(talks: str, target: str) -> None:
    [sample] = find_samples(talks, ["max_length=32", "format=alpaca"], target=target, limit=1).samples
    assert len(sample.pieces) == 32
    with pytest.raises(ProblemsError) as error:
        find_samples(talks, ["format=sharegpt"], target=target)
    assert set(kinds(error.value)) == {"conversations.format"}


def test_a_split_conversation_is_found_by_its_id_and_by_a_samples(tmp_path: Path) -> None:
    tokenizer(chat_cases.REWRITES_HISTORY).save_pretrained(tmp_path / "tok")
    messages = [{"role": role, "content": role} for role in ("user", "assistant") * 2]
    (tmp_path / "a.jsonl").write_text(json.dumps({"id": "two", "messages": messages}) + "\n{broken\n")

    def ids(sample_id: str) -> list[str]:
        found = find_samples(str(tmp_path / "a.jsonl"), target=str(tmp_path / "tok"), sample_id=sample_id)
        return [sample.id for sample in found.samples]

    assert ids("two") == ["two#1", "two#3"]
    assert ids("two#3") == ["two#3"]
    for absent in ("two#2", "none"):
        with pytest.raises(ProblemsError) as error:
            ids(absent)
        assert kinds(error.value) == ["show.no_sample"]


def test_a_stores_samples(tmp_path: Path, target: str) -> None:
    store = the_store(tmp_path / "store", target)
    found = find_samples(store, target=target)
    assert [sample.id for sample in found.samples] == ["a", "b#1", "b#3"]
    assert "".join(piece.text for piece in found.samples[0].pieces) == "Hi <|im_end|>a 🎉"
    assert [sample.id for sample in find_samples(store, target=target, sample_id="b").samples] == ["b#1", "b#3"]
    for options, kind in (({"sample_id": "x"}, "show.no_sample"), ({"overrides": ["max_length=3"]}, "show.overrides")):
        with pytest.raises(ProblemsError) as error:
            find_samples(store, target=target, **options)
        assert kinds(error.value) == [kind]


def test_conversations_without_a_target_are_refused(talks: str) -> None:
    with pytest.raises(ProblemsError) as error:
        find_samples(talks)
    assert kinds(error.value) == ["show.no_target"]


def evil() -> Found:
    tok = tokenizer()
    ids = tok(EVIL).input_ids
    return Found([shown_sample(tok, EVIL, ids, [True] * len(ids), EVIL)], EVIL)


def test_a_terminal_shows_nothing_but_text() -> None:
    plain = text(evil())
    assert "<¦s¦c¦r¦i¦p¦t" in plain and "[¦r¦e¦d¦]" in plain and "[red]a&b[/red]" in plain
    assert "\x1b" not in plain and "\u202e" not in plain and "\\u001b" in plain
    markup = Found([ShownSample("x", None, [Piece("[red]", 1, False), Piece("[/red]", 2, True)])], "")
    assert "[red]{+[/red]+}" in text(markup)
    coloured = text(evil(), force_terminal=True, color_system="256")
    assert "\x1b[2J" not in coloured and "\u202e" not in coloured
    assert coloured.count("\x1b[30;48;5;40m") > 20  # every other supervised token


def test_neighbouring_tokens_differ_in_shade() -> None:
    pieces = [Piece(letter, number, number > 1) for number, letter in enumerate("abcd")]
    shown = text(Found([ShownSample("x", None, pieces)], ""), force_terminal=True, color_system="256")
    shades = [shown.split(letter)[0].rpartition("\x1b[")[2] for letter in ("a\x1b", "b\x1b", "c\x1b", "d\x1b")]
    assert len(set(shades)) == 4


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.spans: list[dict[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "span":
            self.spans.append(dict(attrs))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_page_holds_texts_as_texts_and_needs_nothing_else() -> None:
    page = Page()
    html = samples_page(evil().samples, EVIL)
    page.feed(html)
    assert "script" not in page.tags and "<script" not in html
    assert not {"img", "link", "iframe", "a"} & set(page.tags)
    assert "http:" not in html and "https:" not in html and "url(" not in html
    assert "<script>alert('x')</script> [red]a&b[/red] \\u001b" in page.text
    tokens = [span for span in page.spans if "title" in span]
    assert len(tokens) == len(evil().samples[0].pieces)
    assert tokens[0]["title"] == f"0: id {evil().samples[0].pieces[0].token}, supervised"


def test_the_command_writes_a_page_or_prints(
    talks: str, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "page.html"
    with pytest.raises(SystemExit) as stop:
        main(["data", "show", talks, "--target", target, "--limit", "1", "--html", str(out)])
    assert stop.value.code == 0 and "<h2>c0</h2>" in out.read_text()
    with pytest.raises(SystemExit):
        main(["data", "show", talks, "--target", target, "--limit", "1"])
    assert "sample c0: " in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main(["data", "show", talks, "--target", target, "--html", str(tmp_path)])
    assert stop.value.code == 2


def test_the_report_of_a_check_is_text_or_json(talks: str, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Path(talks).open("a") as handle:
        handle.write('{"id": "bad", "source": "book", "instruction": 3}\n')
    given = [f"target.path={target}", f"data.path={talks}"]
    with pytest.raises(SystemExit) as stop:
        main(["data", "check", *given])
    assert stop.value.code == 2 and "(id 'bad')" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["data", "check", *given, "data.skip_bad=true", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert stop.value.code == 0
    assert (found["total"], found["kept"], found["dropped"]) == (5, 4, {"conversations.content": 1})
    assert {item["source"]: item["kept"] for item in found["sources"]} == {"web": 4, "book": 0}


def test_a_name_of_a_report_takes_one_short_line() -> None:
    assert printable_name("a\nb\tc\x1b[31m\u202e") == "a\\nb\\tc\\u001b[31m\\u202e"
    assert printable_name("x" * 60) == "x" * 60
    assert printable_name("x" * 100_000) == "x" * 60 + "..."
