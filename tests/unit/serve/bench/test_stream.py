"""What a server may send in place of an answer, and files of passes that somebody changed; no network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle3.errors import ProblemsError
from eagle3.serve.bench.measured import Pass, Request, kept_meta, read_pass, write_pass
from eagle3.serve.bench.stream import _OpenAi
from eagle3.target.answer_servers.api import FaultyReplyError

PASS = Pass("key", 2, 0, 1.0, 2.0, 1.5, "7", (
    Request("m/p0", "m", 0, "d", 3, 0.1, (0.1, 0.2), (1, 2), "stop", (4, 5, 6), "t", {"spec_verify_ct": 1}),
))  # fmt: skip


def test_figures_that_json_cannot_hold_are_kept_as_text_and_lose_no_pass(tmp_path: Path) -> None:
    meta = kept_meta({"spec_verify_ct": float("nan"), "spec_x": [float("-inf"), 1.5], "e2e_latency": 3.0})
    assert meta == {"spec_verify_ct": "nan", "spec_x": ["-inf", 1.5]}
    write_pass(tmp_path / "pass.json", PASS)
    assert read_pass(tmp_path / "pass.json", "key", (2, 0)) == PASS


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("concurrency",), "x"),
        (("instance",), [1]),
        (("other",), 1),
        (("requests", 0, "at"), [0.1]),
        (("requests", 0, "at"), []),
        (("requests", 0, "tokens", 1), 0),
        (("requests", 0, "meta"), "x"),
        (("requests", 0, "set_name"), None),
        (("requests", 0, "ids"), ["x"]),
        (("failures",), 3),
    ],
)
def test_a_pass_that_was_edited_is_named_with_its_place(tmp_path: Path, place: tuple[Any, ...], value: Any) -> None:
    path = tmp_path / "pass.json"
    write_pass(path, PASS)
    edited = inner = json.loads(path.read_text())
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    path.write_text(json.dumps(edited))
    with pytest.raises(ProblemsError, match=rf"(?s)bench.output.*{place[0]}.*remove this file"):
        read_pass(path, "key", (2, 0))


def test_a_pass_under_another_ones_name_is_refused(tmp_path: Path) -> None:
    write_pass(tmp_path / "pass.json", PASS)
    with pytest.raises(ProblemsError, match="is pass 1 at concurrency 2, expected 1 at 8"):
        read_pass(tmp_path / "pass.json", "key", (8, 0))


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ({"choices": {"text": "a"}}, "choices"),
        ({"choices": ["a"]}, "choices"),
        ({"choices": [{"text": 5}], "usage": {"completion_tokens": 9}}, "text"),
        ({"choices": [{"text": "a"}], "usage": {"completion_tokens": 2}}, "counts 2 tokens, 5"),
    ],
)
def test_pieces_of_other_types_are_a_faulty_answer(event: dict[str, Any], said: str) -> None:
    read = _OpenAi()
    assert read.take({"choices": [{"text": "a"}], "usage": {"completion_tokens": 5}}) == 5
    with pytest.raises(FaultyReplyError, match=said):
        read.take(event)
