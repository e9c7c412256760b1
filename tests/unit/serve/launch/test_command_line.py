"""`eagle3 serve launch` and `eagle3 serve wait` as commands."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import jsonschema
import pytest

from eagle3.serve.launch import free_port
from tests.unit.serve.launch.fakes import VERSION
from tests.unit.serve.wait.logs import DEATHS, GPU
from tests.unit.test_cli import run

SCHEMAS = Path(__file__).parents[4] / "docs/schemas"
Models = tuple[Path, Path]
Capture = pytest.CaptureFixture[str]


def checked(text: str, schema: str) -> dict[str, object]:
    value = json.loads(text)
    jsonschema.validate(value, json.loads((SCHEMAS / f"{schema}.schema.json").read_text(encoding="utf-8")))
    return dict(value)


def given(models: Models, *more: str) -> list[str]:
    target, draft = models
    return ["serve", "launch", "--target", str(target), "--checkpoint", str(draft), "--engine-version", VERSION, *more]


def test_launch_prints_the_command_and_passes_on_what_follows(models: Models, capsys: Capture) -> None:
    code, out, _ = run(capsys, *given(models, "steps=2", "--", "--random-seed", "1"))

    assert code == 0
    line = out.splitlines()[-1]
    assert shlex.split(line)[-2:] == ["--random-seed", "1"] and "--speculative-num-steps 2" in line
    assert all(note.startswith("# ") for note in out.splitlines()[:-1])


def test_launch_prints_json(models: Models, capsys: Capture) -> None:
    code, out, _ = run(capsys, *given(models, "--json"))

    assert code == 0 and checked(out, "launch")["engine_version"] == VERSION


def test_every_problem_is_told_at_once_and_nothing_is_printed(models: Models, capsys: Capture) -> None:
    code, out, err = run(capsys, *given(models, "tp=3", "nccl=[pcie,no_p2p]", "--", "--tp", "3"))

    assert (code, out) == (2, "")
    assert all(kind in err for kind in ("launch.tp", "launch.nccl", "launch.extra_args"))


@pytest.mark.parametrize("extra", [["--taget", "x"], ["--frobnicate"]])
def test_a_misspelled_option_is_not_passed_on(models: Models, capsys: Capture, extra: list[str]) -> None:
    code, _, err = run(capsys, *given(models, *extra))

    assert code == 2 and "No such option" in err


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        (["--run"], "launch.log"),
        (["--run", "--log", "x", "--engine", "vllm", "--engine-version", "0.33"], "launch.unsupported"),
    ],
)
def test_what_cannot_be_run_is_refused(models: Models, capsys: Capture, more: list[str], kind: str) -> None:
    code, _, err = run(capsys, *given(models, *more))

    assert code == 2 and kind in err


FAKE = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
port, target = (int(sys.argv[sys.argv.index(name) + 1]) if name == "--port" else sys.argv[sys.argv.index(name) + 1]
                for name in ("--port", "--model-path"))
about = {"/ready": {}, "/model_info": {"model_path": target}, "/server_info": {"version": "0.5.23"}}
asked = []
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        asked.append(self.path)
        self.send_response(200 if self.path in about else 404); self.end_headers()
        self.wfile.write(json.dumps(about.get(self.path)).encode())
    def log_message(self, *args): pass
server = HTTPServer(("127.0.0.1", port), Handler)
server.timeout = 5
while "/server_info" not in asked:
    server.handle_request()
print("asked for", *asked, flush=True)
sys.exit(0 if set(asked) <= set(about) else 3)
"""
"""Ends by itself, well, if it was asked nothing but what generates no token."""


def test_run_starts_waits_and_ends_with_the_server(models: Models, capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "fake.py").write_text(FAKE, encoding="utf-8")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && {{ echo {VERSION}; exit; }}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    more = [f"python={python}", f"launcher=[{tmp_path / 'fake.py'}]", f"port={free_port()}"]

    code, out, err = run(capsys, *given(models, *more, "--run", "--json", "--log", str(tmp_path / "log")))

    assert code == 0, err
    assert checked(out, "ready")["how"] == "/ready"
    assert str(python) in err and "runs until Ctrl-C" in err
    assert (tmp_path / "log").read_text().startswith("asked for /ready")


def test_run_says_why_the_server_died(models: Models, capsys: Capture, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && {{ echo {VERSION}; exit; }}\necho "{DEATHS["start.import"]}"\nexit 1\n'
    )
    python.chmod(0o755)
    more = [f"python={python}", f"port={free_port()}", "--run", "--log", str(tmp_path / "log")]

    code, _, err = run(capsys, *given(models, *more))

    assert code == 2 and "start.import" in err and "Traceback" not in err


def test_wait_prints_what_is_ready(capsys: Capture, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(GPU, encoding="utf-8")

    code, out, err = run(capsys, "serve", "wait", "--log", str(log))
    assert code == 0 and "CUDA graphs: verify on, draft on, draft_extend on" in out and err == ""
    code, out, _ = run(capsys, "serve", "wait", "--log", str(log), "--json")
    assert checked(out, "ready")["seconds"] == 0


def test_wait_says_what_died_and_what_is_still_loading(capsys: Capture, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(DEATHS["start.context"], encoding="utf-8")

    code, out, _ = run(capsys, "serve", "wait", "--log", str(log), "--json")
    assert code == 2 and checked(out, "problems")
    code, _, err = run(capsys, "serve", "wait", f"http://127.0.0.1:{free_port()}", "--timeout", "0")
    assert code == 2 and "start.timeout" in err and "not reached yet" in err
    assert run(capsys, "serve", "wait")[0] == 2
