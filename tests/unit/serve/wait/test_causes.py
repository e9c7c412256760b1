"""Each death is told by its cause."""

from __future__ import annotations

import pytest

from eagle3.serve.wait.causes import CAUSES, diagnose
from tests.unit.serve.wait.logs import CPU, DEATHS, GPU, LOADING
from tests.unit.serve.wait.test_start import read


@pytest.mark.parametrize("kind", DEATHS)
def test_a_death_is_told_by_its_cause(kind: str) -> None:
    start = read(DEATHS[kind])

    problems = diagnose(start.lines, "log", 1, "loading")

    assert [problem.kind for problem in problems] == [kind]
    assert all(problem.fix and "exit code 1" in problem.message for problem in problems)


def test_every_cause_has_a_log() -> None:
    assert {cause.kind for cause in CAUSES} - set(DEATHS) == {"start.assertion"}
    assert [problem.kind for problem in diagnose(["AssertionError"], "log", 1, "loading")] == ["start.assertion"]


@pytest.mark.parametrize(
    "kind", ["start.port_in_use", "start.context", "start.killed", "start.out_of_memory", "start.arguments"]
)
def test_a_log_that_will_never_be_ready_says_so(kind: str) -> None:
    assert read(DEATHS[kind]).fatal is not None


@pytest.mark.parametrize("log", [CPU, GPU, LOADING])
def test_a_healthy_log_holds_no_cause_and_nothing_fatal(log: str) -> None:
    assert read(log).fatal is None
    assert not [cause.kind for cause in CAUSES if any(cause.pattern.search(line) for line in read(log).lines)]


def test_out_of_memory_while_graphs_are_captured_names_both() -> None:
    log = GPU.split("[2026-11-30 10:10:55")[0] + (
        "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 1 GiB\nPossible solutions:\n"
    )

    (problem,) = diagnose(read(log).lines, "log", None, "capturing CUDA graphs")
    assert problem.kind == "start.out_of_memory"
    assert "while capturing CUDA graphs" in problem.message and "cuda_graph_max_batch" in problem.fix


@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [
        (-9, "start.killed", "SIGKILL"),
        (-15, "start.stopped", "SIGTERM"),
        (-11, "start.exited", "SIGSEGV"),
        (0, "start.exited", "exit code 0"),
        (7, "start.exited", "27/64"),
    ],
)
def test_without_a_word_in_the_log_the_exit_says_it(code: int, kind: str, said: str) -> None:
    (problem,) = diagnose(read(LOADING).lines, "log", code, "reading the target's weights")

    assert problem.kind == kind
    assert said in problem.message


def test_an_empty_log_is_said() -> None:
    (problem,) = diagnose([], "log", 1, "starting")

    assert problem.kind == "start.exited" and "empty" in problem.message
