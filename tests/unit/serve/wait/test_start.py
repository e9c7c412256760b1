"""A start, read from its log."""

from __future__ import annotations

from dataclasses import replace

import pytest

from eagle3.serve.wait.ready import Graphs, Progress
from eagle3.serve.wait.start import Start
from tests.unit.serve.wait.logs import CPU, GPU, LOADING, OLD


def read(log: str, passive_health: bool = False) -> Start:
    start = Start(passive_health)
    for line in log.replace("\r", "\n").splitlines():
        start.feed(line)
    return start


def phases_seen(log: str) -> list[Progress]:
    start, seen = Start(False), []
    for line in log.replace("\r", "\n").splitlines():
        start.feed(line)
        if not seen or seen[-1] != start.progress:
            seen.append(start.progress)
    return seen


@pytest.mark.parametrize("log", [CPU, GPU, OLD])
def test_a_start_goes_through_its_phases_in_order(log: str) -> None:
    start = read(log)

    assert start.ready and start.fatal is None
    names = list(dict.fromkeys(progress.phase for progress in phases_seen(log)))
    graphs = [] if log is CPU else ["graphs"]
    drafter_late = ["starting", "weights", "kv_cache", "graphs", "warm_up", "ready"]
    expected = ["starting", "weights", "draft_weights", "kv_cache", *graphs, "warm_up", "ready"]
    assert names == (drafter_late if log is OLD else expected), (
        "an old release loads the drafter after the target's graphs"
    )
    assert not start.polls.warnings()


def test_shards_and_graphs_are_counted_with_the_time_left() -> None:
    seen = phases_seen(GPU)

    assert Progress("weights", 27, 64, 252.0) in seen
    assert Progress("graphs", 3, 12, 90.0, note="verify") in seen
    assert str(Progress("weights", 27, 64, 252.0)) == "reading the target's weights 27/64, 252 s left of it"
    assert read(LOADING).progress == Progress("weights", 27, 64, 252.0)


def test_a_bar_is_read_before_its_line_ends() -> None:
    start = read(LOADING)
    start.peek("Loading safetensors checkpoint shards:  50% Completed | 32/64 [03:40<03:40,  6.9s/it]")

    assert start.progress == Progress("weights", 32, 64, 220.0)


def test_seconds_of_each_phase_are_the_servers_own() -> None:
    assert read(GPU).phases == {
        "starting": 20.0,
        "weights": 500.0,
        "draft_weights": 10.0,
        "kv_cache": 1.0,
        "graphs": 149.0,
        "warm_up": 10.0,
    }


def without(log: str, *words: str) -> str:
    return "\n".join(line for line in log.splitlines() if not any(word in line for word in words))


ALL = Graphs(verify=True, draft=True, draft_extend=True)


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (GPU, ALL),
        (OLD, ALL),
        (CPU, Graphs()),
        (LOADING, Graphs()),
        (without(GPU, "Capture draft decode"), replace(ALL, draft=False)),
        (without(GPU, "Capture draft decode").replace("num_steps': 3", "num_steps': 1"), replace(ALL, draft=None)),
        (without(GPU, "Capture target verify"), replace(ALL, verify=False)),
        (without(GPU, "Captur"), Graphs(verify=False, draft=False, draft_extend=False)),
        (without(OLD, "Capture cuda graph"), replace(ALL, verify=False)),
        (without(GPU, "Captur").replace("'EAGLE3'", "None"), Graphs(decode=False)),
        (without(OLD, "draft", "Eagle3").replace("'EAGLE3'", "None"), Graphs(decode=True)),
        (GPU.replace("target verify", "target decode").replace("'EAGLE3'", "None"), Graphs(decode=True)),
        (without(GPU, "server_args="), Graphs()),
    ],
)
def test_which_graphs_were_captured(log: str, expected: Graphs) -> None:
    assert read(log).graphs == expected


def test_the_newer_releases_summary_counts_too() -> None:
    summary = (
        "[2026-11-30 10:11:19] Engine startup timings (s): load_weight=495.00, cuda_graph={prefill=0.00, decode=0.00, "
        "target_verify=124.00, draft_prefill=0.00, draft_decode=0.00, draft_extend=10.00}, tokenizer_e2e=700.00\n"
    )
    begun, over = without(GPU, "Captur").split("[2026-11-30 10:11:20] INFO:     Started")

    assert read(begun + "\n" + summary + "[2026-11-30 10:11:20] INFO:     Started" + over).graphs == replace(
        ALL, draft=False
    )


def polled(path: str, status: str, times: int, log: str = GPU) -> str:
    line = f'[2026-11-30 10:11:22] INFO:     10.0.0.7:4711 - "GET {path} HTTP/1.1" {status}\n'
    before, after = log.split("[2026-11-30 10:11:25]")
    return before + line * times + "[2026-11-30 10:11:25]" + after


def test_the_incident_a_readiness_loop_that_generates_is_named() -> None:
    """A loop polled an endpoint that made the server run a prefill, every 10 s while it started."""
    (warning,) = read(polled("/health_generate", "200 OK", 3)).polls.warnings()
    assert "3 x /health_generate" in warning and "10.0.0.7" in warning and "made it generate" in warning

    (warning,) = read(polled("/health", "503 Service Unavailable", 2)).polls.warnings()
    assert "2 x /health" in warning and "from now on each makes it generate" in warning

    (warning,) = read(polled("/health", "200 OK", 1)).polls.warnings()
    assert "made it generate" in warning


@pytest.mark.parametrize("path", ["/ready", "/model_info", "/metrics", "/v1/models"])
def test_passive_polls_are_no_fault(path: str) -> None:
    assert read(polled(path, "200 OK", 5)).polls.warnings() == []


def test_passive_health_is_no_fault_but_the_other_one_is() -> None:
    assert read(polled("/health", "200 OK", 5), passive_health=True).polls.warnings() == []
    assert len(read(polled("/health_generate", "200 OK", 5), passive_health=True).polls.warnings()) == 1


def test_requests_after_it_was_ready_are_no_fault() -> None:
    line = '[2026-11-30 10:12:00] INFO:     10.0.0.7:4711 - "GET /health HTTP/1.1" 200 OK\n'

    assert read(GPU + line * 3).polls.warnings() == []


def test_its_own_warm_up_is_one_request_and_a_second_is_somebodys() -> None:
    line = '[2026-11-30 10:11:22] INFO:     10.0.0.7:4711 - "POST /generate HTTP/1.1" 200 OK\n'
    before, after = GPU.split("[2026-11-30 10:11:25]")

    assert read(GPU).polls.warnings() == []
    assert len(read(before + line + "[2026-11-30 10:11:25]" + after).polls.warnings()) == 1


def test_another_start_in_the_same_log_begins_anew() -> None:
    start = read(GPU + LOADING)

    assert not start.ready
    assert start.progress == Progress("weights", 27, 64, 252.0)
    assert start.graphs == Graphs()


def test_garbage_changes_nothing() -> None:
    garbage = "\x00\x01[2026-99-99 99:99:99] 7/0 [a<b\n\ufffd\ufffd | 9/4 [??<??]\n[\n" + "x" * 100_000 + "\n"

    assert read(garbage + GPU.replace("\n[", "\n" + garbage + "[")).ready
