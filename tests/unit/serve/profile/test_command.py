"""`eagle3 serve profile` as a user meets it, with traces that are there."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from eagle3.cli import main

from .cases import TraceBuilder

SCHEMAS = Path(__file__).parents[4] / "docs/schemas"


def run(capsys: pytest.CaptureFixture[str], *args: str | Path) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main([str(item) for item in ("serve", "profile", *args)])
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    builder = TraceBuilder()
    builder.cycles(12)
    return builder.write(tmp_path / "x-TP-0.trace.json.gz")


def test_a_table_json_and_a_picture(capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path) -> None:
    code, out, _ = run(capsys, "--trace", trace, "--steps", "3", "--plot", tmp_path / "p.svg")
    assert code == 0
    assert "communication 0.100 10.0% 0.100 0.100 to 0.100 in verify 0.100 10.0%" in " ".join(out.split())
    assert f"trace kept: {trace}" in " ".join(out.split())
    assert "<svg" in (tmp_path / "p.svg").read_text(encoding="utf-8")

    code, out, _ = run(capsys, "--trace", trace, "--json")
    value = json.loads(out)
    jsonschema.validate(value, json.loads((SCHEMAS / "profile.schema.json").read_text(encoding="utf-8")))
    assert sum(part["share"] for part in value["parts"]) == pytest.approx(1)


@pytest.mark.parametrize(
    ("args", "kinds"),
    [
        ((), ["profile.options"] * 3),
        (("--server", "http://127.0.0.1:1"), ["profile.options"] * 2),
        (("--trace", "x", "--server", "u", "--prompts", "p", "--output", "o"), ["profile.options"] * 3),
        (("--trace", "/nowhere"), ["file.missing"]),
        (("--trace", "/nowhere", "--plot", "x.gif"), ["profile.plot"]),
    ],
)
def test_bad_input_is_listed_and_nothing_is_written(
    capsys: pytest.CaptureFixture[str], args: tuple[str, ...], kinds: list[str]
) -> None:
    code, out, _ = run(capsys, *args, "--json")
    assert code == 2
    value = json.loads(out)
    jsonschema.validate(value, json.loads((SCHEMAS / "problems.schema.json").read_text(encoding="utf-8")))
    assert [problem["kind"] for problem in value["problems"]] == kinds


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "Hi"}\n', encoding="utf-8")
    args = ("--server", "http://127.0.0.1:1", "--prompts", prompts, "--output", tmp_path / "out")
    code, _, err = run(capsys, *args)
    assert code == 2 and "server.down" in err and "Traceback" not in err
    assert not (tmp_path / "out").exists()
