"""A server is ended with all that it started, however its starter ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from eagle3.errors import ProblemsError
from eagle3.serve.launch import ServerProcess, free_port, start_server
from eagle3.serve.launch import process as process_module
from eagle3.serve.launch.installed import check_installed
from eagle3.serve.launch.ports import port_fault
from tests.unit.serve.launch.fakes import VERSION, fake_command

ROOT = Path(__file__).parents[4]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return not Path(f"/proc/{pid}/stat").read_text().split(") ")[1].startswith("Z")


def until(condition: Callable[[], bool], seconds: float = 40) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def pids(folder: Path) -> list[int]:
    """The server's and its child's, once it listens."""
    until(lambda: (folder / "pids").exists() and (folder / "pids").read_text().endswith("\n"))
    return [int(pid) for pid in (folder / "pids").read_text().split()]


def start(folder: Path, how: str = "polite", grace: float = 5.0) -> ServerProcess:
    return start_server(fake_command(folder, how=how), folder / "log", grace=grace, check=False)


@pytest.mark.parametrize(("how", "code"), [("polite", -signal.SIGTERM), ("stubborn", -signal.SIGKILL)])
def test_stopping_ends_the_whole_group_and_frees_the_port(tmp_path: Path, how: str, code: int) -> None:
    with start(tmp_path, how, grace=0.5) as server:
        running = pids(tmp_path)
        assert all(map(alive, running)) and server.poll() is None
        assert port_fault("127.0.0.1", server.command.port) is not None
        assert server.stop() == code
        assert server.stop() == code, "the second time does nothing"

    until(lambda: not any(map(alive, running)))  # its child ignores SIGTERM
    assert port_fault("127.0.0.1", server.command.port) is None
    assert (tmp_path / "log").read_text() == "listening\n"


def test_an_exception_ends_it_too(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), start(tmp_path):
        running = pids(tmp_path)
        raise KeyboardInterrupt

    until(lambda: not any(map(alive, running)))


STARTER = """
    import sys, time
    from pathlib import Path
    from eagle3.serve.launch import start_server
    from tests.unit.serve.launch.fakes import fake_command
    folder = Path(sys.argv[1])
    with start_server(fake_command(folder), folder / "log", grace=1.0, check=False):
        time.sleep(600)
"""


def test_whatever_ends_its_starter_ends_it(tmp_path: Path) -> None:
    codes = {signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGINT: -signal.SIGINT, signal.SIGKILL: -signal.SIGKILL}
    starters = {}
    for number in codes:
        folder = tmp_path / number.name
        folder.mkdir()
        starters[number] = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(STARTER), str(folder)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.DEVNULL,
        )
    running = [pid for number in codes for pid in pids(tmp_path / number.name)]
    assert all(map(alive, running))

    for number, starter in starters.items():
        starter.send_signal(number)

    assert {number: starter.wait(30) for number, starter in starters.items()} == codes
    until(lambda: not any(map(alive, running)))


def test_a_server_that_dies_alone_says_with_what(tmp_path: Path) -> None:
    command = fake_command(tmp_path, script="import sys; print('x', file=sys.stderr); sys.exit(3)")

    with start_server(command, tmp_path / "log", check=False) as server:
        until(lambda: server.poll() is not None)
        assert server.poll() == 3

    assert (tmp_path / "log").read_text() == "x\n"


def test_a_port_in_use_is_named_and_nothing_is_started(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        command = fake_command(tmp_path, port=other.getsockname()[1])

        with pytest.raises(ProblemsError) as caught:
            start_server(command, tmp_path / "log", check=False)

    assert [problem.kind for problem in caught.value.problems] == ["launch.port_in_use"]
    assert not (tmp_path / "log").exists()


def test_a_port_that_stays_taken_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "PORT_SECONDS", 0.3)
    server = start(tmp_path)
    running = pids(tmp_path)
    monkeypatch.setattr(process_module, "wait_until_free", lambda *_: "Address already in use")

    with pytest.raises(ProblemsError) as caught:
        server.stop()

    assert caught.value.problems[0].kind == "launch.port_held"
    until(lambda: not any(map(alive, running)))


def test_what_this_machine_lacks_is_named_all_at_once(tmp_path: Path) -> None:
    command = replace(fake_command(tmp_path), target=str(tmp_path / "no" / "target"))

    with pytest.raises(ProblemsError) as caught:
        start_server(replace(command, argv=("/no/python",), python="/no/python"), tmp_path / "log")

    assert [problem.kind for problem in caught.value.problems] == ["launch.python", "launch.target"]


def python_with(folder: Path, answer: str, code: int = 0) -> str:
    script = folder / "python"
    script.write_text(f"#!/bin/sh\necho '{answer}'\nexit {code}\n")
    script.chmod(0o755)
    return str(script)


@pytest.mark.parametrize(
    ("answer", "code", "expected"),
    [
        (VERSION, 0, []),
        (f"{VERSION}+cu129", 0, []),
        ("0.5.16", 0, ["launch.other_version"]),
        ("", 0, ["launch.python"]),
        ("", 1, ["launch.python"]),
    ],
)
def test_another_version_than_the_command_is_for_is_refused(
    tmp_path: Path, answer: str, code: int, expected: list[str]
) -> None:
    command = replace(fake_command(tmp_path), python=python_with(tmp_path, answer, code))

    assert [problem.kind for problem in check_installed(command)] == expected


def test_the_asked_python_is_really_asked(tmp_path: Path) -> None:
    """This one has httpx, and no sglang."""
    command = fake_command(tmp_path)

    (problem,) = check_installed(command)
    assert problem.message == "has no sglang"
    (problem,) = check_installed(replace(command, engine="httpx"))
    assert problem.kind == "launch.other_version"


def test_a_free_port_can_be_taken() -> None:
    assert port_fault("127.0.0.1", free_port()) is None
