from __future__ import annotations

import json

import pytest

from eagle3.errors import Problem, ProblemsError
from eagle3.wiring.report import exit_code, explain, render_explain, render_json, render_text

PROBLEMS = [Problem("config.json", "wiring.one_early", "one early", "write [3]"), Problem("x", "y.z", "m", "f")]


def test_the_exit_code_is_0_or_2() -> None:
    assert exit_code([]) == 0
    assert exit_code(PROBLEMS) == 2


def test_the_text_names_every_problem_and_its_fix() -> None:
    text = render_text(PROBLEMS)

    assert text.startswith("2 problems\n")
    for problem in PROBLEMS:
        for part in (problem.where, problem.kind, problem.message, problem.fix):
            assert part in text
    assert render_text([], "fine") == "fine"


def test_the_json_holds_every_field() -> None:
    report = json.loads(render_json(PROBLEMS, checkpoint="draft"))

    assert report["ok"] is False
    assert report["checkpoint"] == "draft"
    assert [Problem(**problem) for problem in report["problems"]] == PROBLEMS
    assert json.loads(render_json([])) == {"format": "eagle3-problems", "format_version": 1, "ok": True, "problems": []}


def test_the_json_keeps_letters_of_other_scripts() -> None:
    assert "\u7ebf" in render_json([Problem("\u7ebf", "a.b", "m", "f")])


def test_explain_tells_what_every_engine_calls_kimis_layers() -> None:
    rows = {(row.engine, row.first, row.last): row.ids for row in explain("kimi-k2.5", "2,30,58")}

    assert rows == {
        ("sglang", "0", "0.5.9"): None,
        ("sglang", "0.5.10", "0.5.12.post1"): (2, 30, 58),
        ("sglang", "0.5.13", "0.5.23"): (3, 31, 59),
        ("vllm", "0.33.0", "0.33.0"): (3, 31, 59),
        ("tensorrt_llm", "", ""): None,
        ("speculators", "0.9.0", "0.9.0"): (3, 31, 59),
        ("transformers", "5.24.0", "5.24.0"): (3, 31, 59),
    }


def test_explain_says_why_where_an_engine_cannot() -> None:
    notes = {(row.engine, row.first): row.note for row in explain("llama-3.1-8b", [-1, 2, 31])}

    assert "embedding" in notes["sglang", "0.4.9"]
    assert "embedding" not in notes["sglang", "0.5.22"]
    assert "last layer" in notes["sglang", "0.5.22"]
    assert notes["vllm", "0.33.0"] == ""


def test_explain_as_text_and_as_json() -> None:
    rows = explain("kimi-k2.5", [2, 30, 58])
    lines = render_explain(rows).splitlines()

    assert lines[0].split() == ["engine", "versions", "key", "ids"]
    assert any(line.startswith("SGLang") and "0.5.13 to 0.5.23" in line and "[3, 31, 59]" in line for line in lines)
    assert len(lines) == len(rows) + 1
    assert any("TensorRT-LLM" in line and "unknown: its release wheels" in line for line in lines)
    assert [row["ids"] for row in json.loads(render_explain(rows, as_json=True))][1:3] == [[2, 30, 58], [3, 31, 59]]


def test_explain_names_the_source_of_every_row_and_the_day() -> None:
    rows = explain("kimi-k2.5", [2, 30, 58])
    lines = render_explain(rows, sources=True).splitlines()

    read = [row for row in rows if row.source]
    assert [line.strip() for line in lines if line.startswith("    ")] == [
        f"read in {row.source} on {row.read}" for row in read
    ]
    assert any("deepseek_v2.py, set_eagle3_layers_to_capture on 2026-11-29" in line for line in lines)
    assert [row["read"] for row in json.loads(render_explain(rows, as_json=True))] == [row.read for row in rows]


def test_explain_refuses_layers_that_the_target_has_not() -> None:
    with pytest.raises(ProblemsError, match=r"layers\.out_of_range"):
        explain("kimi-k2.5", [2, 30, 61])
    with pytest.raises(ProblemsError, match=r"target\.unknown"):
        explain("kimi-k9", [2])
