"""Waiting for servers that come up, die, never come up, or are somebody else's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from eagle3.errors import Problem, ProblemsError
from eagle3.serve.launch import LaunchCommand, start_server
from eagle3.serve.wait import Progress, Ready, wait_until_ready
from eagle3.serve.wait import wait as wait_module
from tests.unit.serve.launch.fakes import fake_command
from tests.unit.serve.wait.fake_server import FakeServer
from tests.unit.serve.wait.logs import CPU, DEATHS, GPU, LOADING

URL = "http://localhost:30000"


@dataclass
class FakeProcess:
    command: LaunchCommand
    log: Path
    code: int | None = None

    def poll(self) -> int | None:
        return self.code


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_module, "SETTLE_SECONDS", 0.05)
    monkeypatch.setattr(wait_module, "QUIET_SECONDS", 0.2)


def wait(url: str | None = URL, server: FakeServer | None = None, **values: Any) -> Ready:
    transport = None if server is None else server.transport
    return wait_until_ready(url, transport=transport, poll_seconds=0.01, **{"timeout": 5, **values})


def refused(*args: Any, **values: Any) -> Problem:
    with pytest.raises(ProblemsError) as caught:
        wait(*args, **values)
    (problem,) = caught.value.problems
    return problem


def written(folder: Path, text: str) -> Path:
    path = folder / "serve.log"
    path.write_bytes(text.encode())
    return path


def test_a_server_by_its_url() -> None:
    server = FakeServer([None, None, "reset", "slow", 503, 502, 503, 200])

    ready = wait(server=server, version="0.5.23")

    assert (ready.how, ready.url, ready.served, ready.version) == ("/ready", URL, "target", "0.5.23")
    assert server.asked["/ready"] == 8
    assert server.generated == 0


@pytest.mark.parametrize("version", ["0.5.16", None])
def test_an_old_server_by_its_log(tmp_path: Path, version: str | None) -> None:
    """It has no `/ready`, and its `/health` generates: it is not asked."""
    server = FakeServer([200], has_ready=False, version="0.5.16")
    log = written(tmp_path, LOADING)

    def later(progress: Progress) -> None:
        assert progress.phase == "weights"
        log.write_text(GPU, encoding="utf-8")

    ready = wait(server=server, log=log, version=version, on_progress=later)

    assert (ready.how, ready.version) == ("log", "0.5.16")
    assert ready.graphs.verify and not ready.warnings
    assert server.generated == 0 and not {"/health", "/health_generate"} & set(server.asked)


def test_an_old_server_whose_health_is_passive() -> None:
    server = FakeServer([None, 503, 503, 200], has_ready=False, passive_health=True, version="0.5.16")

    assert wait(server=server, passive_health=True, version="0.5.16").how == "/health"
    assert server.generated == 0 and "/ready" not in server.asked


def test_an_old_server_that_can_only_be_asked_by_disturbing_it_is_refused() -> None:
    server = FakeServer([200], has_ready=False)

    assert refused(server=server).kind == "start.no_passive_endpoint"
    assert server.generated == 0


def test_a_log_alone(tmp_path: Path) -> None:
    ready = wait(None, log=written(tmp_path, GPU))

    assert (ready.how, ready.url) == ("log", None)
    assert ready.phases["graphs"] == 149.0


def test_a_log_that_is_not_there_yet_is_rotated_and_holds_garbage(tmp_path: Path) -> None:
    path, notes = tmp_path / "serve.log", []

    def act(progress: Progress) -> None:
        notes.append(progress.note)
        if len(notes) == 2:
            written(tmp_path, LOADING)
        if len(notes) == 4:
            path.rename(tmp_path / "serve.log.1")
        if len(notes) == 6:
            path.write_bytes(b"\xff\x00" + GPU.split("TP0] Memory pool end")[1].encode())

    assert wait(None, log=path, on_progress=act).how == "log"
    assert notes[0] == "the log is not there yet" and "the log is not there yet" not in notes[3:]


@pytest.mark.parametrize("kind", [kind for kind in DEATHS if kind not in ("start.import", "start.missing_file")])
def test_fault_23_a_server_that_dies_while_it_loads_is_told_with_its_cause(tmp_path: Path, kind: str) -> None:
    """Also where its process lives on: SGLang's does when its port is taken."""
    command = fake_command(tmp_path)
    process = FakeProcess(command, written(tmp_path, DEATHS[kind]))

    problem = refused(command.url, FakeServer([None]), process=process)

    assert problem.kind == kind
    assert problem.where == str(process.log)


@pytest.mark.parametrize("kind", DEATHS)
def test_a_death_is_seen_in_the_log_alone(tmp_path: Path, kind: str) -> None:
    assert refused(None, log=written(tmp_path, DEATHS[kind])).kind == kind


def test_a_process_that_ended_is_dead_at_once_and_its_last_words_are_read(tmp_path: Path) -> None:
    command = fake_command(tmp_path, script="import sys; sys.exit('ModuleNotFoundError: No module named sglang')")

    with start_server(command, tmp_path / "log", check=False) as process:
        problem = refused(command.url, process=process, timeout=30)

    assert problem.kind == "start.import" and "exit code 1" in problem.message


def test_the_phase_in_which_it_died_is_said(tmp_path: Path) -> None:
    process = FakeProcess(fake_command(tmp_path), written(tmp_path, LOADING), code=-9)

    problem = refused(URL, FakeServer([None]), process=process)
    assert problem.kind == "start.killed" and "reading the target's weights" in problem.message


def test_loading_is_not_dead_however_long_it_takes(tmp_path: Path) -> None:
    """No time-out by itself; one that was asked for says what it was doing."""
    seen: list[Progress] = []
    server = FakeServer([None] * 40 + [200])
    wait(server=server, log=written(tmp_path, LOADING), on_progress=seen.append, timeout=None)
    assert len(seen) == 40 and all(progress.total == 64 for progress in seen)

    problem = refused(server=FakeServer([None]), log=written(tmp_path, LOADING), timeout=0.3)
    assert problem.kind == "start.timeout" and "27/64" in problem.message


def test_a_server_that_was_there_and_is_gone() -> None:
    assert refused(server=FakeServer([503, 503, None])).kind == "start.gone"


def test_a_server_that_was_never_there_is_not_called_dead() -> None:
    notes: list[str] = []
    problem = refused(server=FakeServer([None]), timeout=0.5, on_progress=lambda progress: notes.append(progress.note))

    assert problem.kind == "start.timeout"
    assert "nobody can tell loading from dead" in notes[0]


def test_a_log_of_a_server_elsewhere(tmp_path: Path) -> None:
    problem = refused(server=FakeServer([None]), log=written(tmp_path, CPU))

    assert problem.kind == "start.other_address" and "127.0.0.1:36771" in problem.message


def test_somebody_elses_server_on_our_port_is_not_taken_for_ours(tmp_path: Path) -> None:
    command = fake_command(tmp_path)
    process = FakeProcess(command, written(tmp_path, LOADING))

    problem = refused(command.url, FakeServer([200], model="another"), process=process)
    assert problem.kind == "start.other_target"
    assert refused(server=FakeServer([200], model=None)).kind == "start.not_sglang"
    assert refused(server=FakeServer([404], has_ready=False, model=None)).kind == "start.not_sglang"


def test_another_version_than_said_is_refused() -> None:
    assert refused(server=FakeServer([200], version="0.5.22"), version="0.5.23").kind == "start.other_version"
    assert wait(server=FakeServer([200], version="0.5.23+cu129"), version="0.5.23").how == "/ready"


def test_a_key_is_asked_for() -> None:
    assert refused(server=FakeServer([401])).kind == "start.unauthorized"


@pytest.mark.parametrize("url", ["localhost:30000", "ftp://x", "http://", "http://a b", ""])
def test_what_is_no_address_is_refused(url: str) -> None:
    assert refused(url).kind == "start.url"


def test_nothing_to_wait_for_and_a_log_that_cannot_be_read(tmp_path: Path) -> None:
    assert refused(None).kind == "start.what"
    assert refused(None, log=tmp_path).kind == "start.log"


def test_graphs_that_are_off_and_polls_are_warned_of(tmp_path: Path) -> None:
    poll = '[2026-11-30 10:11:22] INFO:     10.0.0.7:4711 - "GET /health HTTP/1.1" 503 Service Unavailable\n'
    lines = [line for line in GPU.splitlines(keepends=True) if "draft decode" not in line]
    log = written(tmp_path, "".join(lines).replace("[2026-11-30 10:11:25]", poll + "[2026-11-30 10:11:25]"))

    ready = wait(server=FakeServer([200]), log=log)

    polls, graphs = ready.warnings
    assert "1 x /health" in polls
    assert "CUDA graphs are off for draft:" in graphs
    command = replace(fake_command(tmp_path), cuda_graphs=False)
    asked = wait(command.url, FakeServer([200]), process=FakeProcess(command, log))
    assert "as its command asks for" in asked.warnings[-1]
    assert "draft off" in ready.render() and '"draft": false' in ready.render(as_json=True)
