"""Tracing a server, against one that answers as SGLang does (the real one is in tests/serving)."""

from __future__ import annotations

import errno
import gzip
import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from eagle3.data.chat import load_tokenizer, render_prompt
from eagle3.errors import ProblemsError
from eagle3.serve.profile import CaptureOptions, capture, profile_captured, profile_json
from eagle3.serve.profile.capture import PLAIN, _ends
from eagle3.target.tiny import make_tiny_llama

from .cases import TraceBuilder

URL = "http://server:30000"


class FakeSglang:
    """Attributes:
    traces: ranks that write a trace, or none.
    half: the first time its trace is looked at it is not written to its end.
    """

    def __init__(self) -> None:
        self.info: dict[str, Any] = {
            "version": "0.5.16", "model_path": "m", "device": "cuda", "speculative_algorithm": "EAGLE3",
            "speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4,
            "tp_size": 1, "pp_size": 1, "dp_size": 1, "disable_cuda_graph": False, "disable_overlap_schedule": False,
        }  # fmt: skip
        self.renders = True
        self.names: list[str] = ["profile-TP-0.trace.json.gz"]
        self.half = False
        self.on_stop = False
        self.verifies: int | None = 5
        self.fails_at = 10**9
        self.fails_once_started = False
        self.started: list[dict[str, Any]] = []
        self.stopped = 0
        self.asked: list[dict[str, Any]] = []
        self.going = self.most = 0
        self._lock = threading.Lock()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        body = json.loads(request.content) if request.content else {}
        if path == "/server_info":
            return httpx.Response(200, json=self.info)
        if path == "/v1/tokenize":
            if not self.renders:
                return httpx.Response(400, json={"message": "no template"})
            return httpx.Response(200, json={"tokens": [len(body["messages"]), len(body["messages"][-1]["content"])]})
        if path == "/start_profile":
            self.started.append(body)
            if not self.on_stop:
                self.write(body)
            return httpx.Response(200, text="Start profiling.\n")
        if path == "/stop_profile":
            self.stopped += 1
            if self.on_stop:
                self.write(self.started[-1])
            return httpx.Response(200 if self.on_stop else 500, text="Internal Server Error")
        assert path == "/generate"
        return self.generate(body)

    def write(self, body: dict[str, Any]) -> None:
        for name in self.names:
            builder = TraceBuilder()
            builder.cycles(12)
            path = builder.write(Path(body["output_dir"]) / name)
            if self.half:
                data = path.read_bytes()
                path.write_bytes(data[:-9])
                threading.Timer(1.2, path.write_bytes, [data]).start()

    def generate(self, body: dict[str, Any]) -> httpx.Response:
        with self._lock:
            self.asked.append(body)
            self.going += 1
            self.most = max(self.most, self.going)
            if len(self.asked) > self.fails_at or (self.fails_once_started and self.started):
                self.going -= 1
                return httpx.Response(500, json={"error": {"message": "out of memory"}})

        def parts() -> Any:
            for tokens in (1, 4, 13):
                meta = {"completion_tokens": tokens}
                if tokens == 13 and self.verifies is not None:
                    meta["spec_verify_ct"] = self.verifies
                yield f"data: {json.dumps({'text': 'x', 'meta_info': meta})}\n\n".encode()
                time.sleep(0.005)
            yield b"data: [DONE]\n\n"
            with self._lock:
                self.going -= 1

        return httpx.Response(200, content=parts())


@pytest.fixture
def options(tmp_path: Path) -> CaptureOptions:
    prompts = tmp_path / "prompts.jsonl"
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    lines = [{"prompt": "four"}, {"messages": talk}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return CaptureOptions(URL, prompts, tmp_path / "out", concurrency=2, cycles=7, requests=5, timeout=20)


def take(server: FakeSglang, options: CaptureOptions) -> Any:
    return capture(options, httpx.MockTransport(server))


def refused(server: FakeSglang, options: CaptureOptions) -> str:
    with pytest.raises(ProblemsError) as error:
        take(server, options)
    [problem] = error.value.problems
    return problem.kind


def test_answers_are_measured_first_and_traced_then(options: CaptureOptions) -> None:
    server = FakeSglang()

    found = take(server, options)

    [request] = server.started
    assert request["num_steps"] == 10 and request["activities"] == ["CPU", "GPU"] and request["with_stack"] is False
    assert Path(request["output_dir"]).parent == options.output and Path(request["output_dir"]).is_absolute()
    assert [path.parent for path in found.traces] == [Path(request["output_dir"])]
    assert (found.measured.requests, found.measured.tokens, found.measured.verifies) == (5, 60, 25)
    assert found.measured.acceptance_length == pytest.approx(2.4)
    assert 0.5 < found.measured.cycle_ms < 50
    assert server.most == 2 and server.stopped == 0
    assert {tuple(body["input_ids"]) for body in server.asked} == {(1, 4), (1, 1)}, "the answer is not sent"
    assert all(body["sampling_params"] == {"temperature": 0, "max_new_tokens": 256} for body in server.asked)
    value = json.loads(profile_json(profile_captured(found)))
    assert value["point"]["steps"] == 3 and value["point"]["acceptance_length"] == pytest.approx(2.4)
    assert value["server"]["overlap"] is True and found.notes == []


def test_every_rank_is_waited_for_until_it_is_whole(options: CaptureOptions) -> None:
    server = FakeSglang()
    server.info.update(tp_size=2)
    server.names = ["profile-TP-0.trace.json.gz", "profile-TP-1.trace.json.gz"]
    server.half = True

    found = take(server, options)

    assert [path.name for path in found.traces] == server.names
    assert len(profile_captured(found).splits) == 2


def test_of_data_parallel_replicas_the_first_counts(options: CaptureOptions) -> None:
    server = FakeSglang()
    server.info.update(dp_size=2)
    server.names = ["profile-TP-0-DP-0.trace.json.gz", "profile-TP-0-DP-1.trace.json.gz"]
    found = take(server, options)
    assert [path.name for path in found.traces] == server.names[:1]
    assert any("replicas" in note for note in found.notes)


def test_prompts_that_cannot_be_rendered_go_as_text_and_it_says_so(options: CaptureOptions) -> None:
    server = FakeSglang()
    server.renders = False
    assert PLAIN in take(server, options).notes
    assert {body["text"] for body in server.asked} == {"four", "a"}


def test_prompts_may_be_rendered_by_the_targets_own_template(options: CaptureOptions, tmp_path: Path) -> None:
    server = FakeSglang()
    server.renders = False
    target = make_tiny_llama(tmp_path / "target")
    tokenizer = load_tokenizer(str(target))
    found = take(server, CaptureOptions(**{**vars(options), "target": str(target)}))
    assert PLAIN not in found.notes
    expected = [render_prompt(tokenizer, [{"role": "user", "content": text}]) for text in ("four", "a")]
    assert all(body["input_ids"] in expected for body in server.asked)
    with pytest.raises(ProblemsError, match=r"target\."):
        take(FakeSglang(), CaptureOptions(**{**vars(options), "target": str(tmp_path / "nothing")}))


def test_a_profiler_that_does_not_stop_by_itself_is_stopped(options: CaptureOptions) -> None:
    server = FakeSglang()
    server.on_stop = True
    found = take(server, CaptureOptions(**{**vars(options), "timeout": 1.0}))
    assert server.stopped == 1 and len(found.traces) == 1


def test_no_trace_is_an_error_with_its_place_and_the_profiler_is_not_left_on(options: CaptureOptions) -> None:
    server = FakeSglang()
    server.names = []
    with pytest.raises(ProblemsError, match=r"profile\.no_trace.* cycle takes .* ms at acceptance length 2\.400"):
        take(server, CaptureOptions(**{**vars(options), "timeout": 1.0}))
    assert server.stopped == 1


def test_a_request_that_fails_ends_it(options: CaptureOptions) -> None:
    server = FakeSglang()
    server.fails_at = 4
    assert refused(server, options) == "server.refused"
    assert server.started == []

    server = FakeSglang()
    server.fails_once_started, server.names = True, []
    assert refused(server, options) == "server.refused"
    assert server.stopped == len(server.started) == 1, "the profiler is not left on"


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"speculative_algorithm": None}, "profile.no_drafter"),
        ({"speculative_algorithm": "NGRAM"}, "profile.no_drafter"),
        ({"speculative_num_steps": None}, "profile.no_drafter"),
        ({"speculative_num_steps": 10**9}, "profile.no_drafter"),
        ({"speculative_num_draft_tokens": -1}, "profile.no_drafter"),
    ],
)
def test_a_server_without_a_drafter_is_refused(options: CaptureOptions, change: dict[str, Any], kind: str) -> None:
    server = FakeSglang()
    server.info.update(change)
    assert refused(server, options) == kind
    assert not options.output.exists() and server.asked == []


def test_other_servers_are_refused(options: CaptureOptions) -> None:
    server = FakeSglang()
    server.info = {"version": "1"}
    assert refused(server, options) == "server.not_sglang"
    server = FakeSglang()
    server.verifies = None
    assert refused(server, options) == "profile.no_verifies"


def test_an_output_that_cannot_be_written_is_told_before_anything_is_measured(options: CaptureOptions) -> None:
    options.output.write_text("a file")
    server = FakeSglang()
    assert refused(server, options).startswith("disk.") and server.asked == []

    options.output.unlink()
    server.fails_at = 1
    assert refused(server, options) == "server.refused"
    assert list(options.output.iterdir()) == [], "no empty folder is left"


def test_a_trace_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = tmp_path / "a.trace.json.gz"
    trace.write_bytes(b"\x1f\x8b")
    assert not _ends(trace)

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(gzip, "open", refuse)
    with pytest.raises(ProblemsError, match=r"file\.unreadable.*a\.trace\.json\.gz.*Permission denied"):
        _ends(trace)
