"""A server that streams as SGLang does and speculates with what it is told to accept, over real HTTP; with faults."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.unit.target.fake_answers import EOS
from tests.unit.target.fake_http import serving


def answer(prompt: list[int], limit: int, length: int = 12) -> list[int]:
    """Some ordinary tokens, then the end token; how many depends on the prompt."""
    ids = [300 + (sum(prompt) + place * 7) % 97 for place in range(length + sum(prompt) % 5)]
    return [*ids, EOS][:limit]


def rounds(prompt: list[int], count: int, pattern: tuple[int, ...]) -> list[int]:
    """Accepted drafts of each round of an answer of `count` tokens, the last one as it came."""
    found, left, place = [], count - 1, sum(prompt) % len(pattern)
    while left > 0:
        found.append(pattern[place % len(pattern)])
        left -= found[-1] + 1
        place += 1
    return found


@dataclass
class FakeSpec:
    """What the server is and does.

    Attributes:
        steps: draft steps; 0: it has no drafter.
        pattern: accepted drafts of each round, over and over.
        fault: of the n-th measured request (from 0): a status, `cut`, `json`, `abort`, `error`, `meta`, `ids`,
            `exit` (its process).
        without: keys that its `meta_info` lacks.
        rename: keys that are called otherwise, as older releases do.
        pieces: sends the new tokens only, as `--incremental-streaming-output` does.
        merged: rounds that come in one piece.
        delay: seconds a round.
        metrics: has `/metrics`.
        foreign: requests of others that its counters have, added at each look.
    """

    steps: int = 3
    topk: int = 1
    pattern: tuple[int, ...] = (2, 0, 3, 1)
    fault: Callable[[int], str | None] = lambda number: None
    without: frozenset[str] = frozenset()
    rename: Mapping[str, str] = field(default_factory=dict)
    pieces: bool = False
    merged: int = 1
    delay: float = 0.0
    metrics: bool = False
    foreign: int = 0
    info: dict[str, Any] = field(default_factory=dict)
    length: int = 12
    seed: int = 7
    flushes: bool = True
    model: str = "/models/tiny"
    change: Callable[[list[int]], list[int]] = lambda ids: ids
    requests: list[dict[str, Any]] = field(default_factory=list)
    flushed: int = 0
    most_in_flight: int = 0

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.in_flight = 0
        self.answered = 0
        self.tokens = 0
        self.verifies = 0
        self.measured = 0

    def running(self, port: int = 0) -> AbstractContextManager[str]:
        """Its URL."""
        return serving(_Handler, self, port)

    def server_info(self) -> dict[str, Any]:
        drafter = {
            "speculative_algorithm": "EAGLE3",
            "speculative_num_steps": self.steps,
            "speculative_eagle_topk": self.topk,
            "speculative_num_draft_tokens": self.steps + 1 if self.topk == 1 else 8,
        }
        own = drafter if self.steps else {"speculative_algorithm": None}
        return {"version": "0.5.23", "random_seed": self.seed, "internal_states": [{}], **own, **self.info}

    def page(self) -> str:
        with self.lock:
            self.answered += self.foreign
            lines = [
                f'sglang:num_requests_total{{model="tiny"}} {float(self.answered)}',
                f'sglang:generation_tokens_total{{model="tiny"}} {float(self.tokens)}',
                f'sglang:spec_verify_calls_total{{model="tiny"}} {float(self.verifies)}',
            ]
        return "# HELP x y\n" + "\n".join(lines) + "\n"


class _Handler(BaseHTTPRequestHandler):
    fake: FakeSpec
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        fake = self.fake
        if self.path == "/model_info":
            return self._send(200, {"model_path": fake.model, "model_type": "llama"})
        if self.path == "/server_info":
            return self._send(200, fake.server_info())
        if self.path == "/metrics" and fake.metrics:
            return self._raw(200, fake.page().encode())
        if self.path == "/ready":
            return self._send(200, {})
        if self.path == "/v1/loads":
            return self._send(200, {"loads": [{"num_running_reqs": fake.in_flight, "num_waiting_reqs": 0}]})
        return self._send(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        fake = self.fake
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")
        if self.path == "/flush_cache":
            if not fake.flushes:
                return self._send(404, {})
            fake.flushed += 1
            return self._raw(200, b"Cache flushed.")
        if self.path != "/generate":
            return self._send(404, {"detail": "Not Found"})
        if "logit_bias" in body["sampling_params"]:
            return self._send(200, {"text": "x", "output_ids": [1]})
        warm = body["sampling_params"]["max_new_tokens"] == 32
        with fake.lock:
            fake.requests.append(body)
            fault = None if warm else fake.fault(fake.measured)
            fake.measured += not warm
            if fault == "exit":
                print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", flush=True)
                os._exit(1)
            fake.in_flight += 1
            fake.most_in_flight = max(fake.most_in_flight, fake.in_flight)
        try:
            self._stream(body, fault, warm)
        finally:
            with fake.lock:
                fake.in_flight -= 1
        return None

    def _stream(self, body: dict[str, Any], fault: str | None, warm: bool) -> None:
        fake = self.fake
        if fault and fault.isdigit():
            return self._send(int(fault), {"error": {"message": "fault"}})
        prompt = body["input_ids"]
        ids = fake.change(answer(prompt, body["sampling_params"]["max_new_tokens"], fake.length))
        accepted = rounds(prompt, len(ids), fake.pattern) if fake.steps else [0] * (len(ids) - 1)
        ends, count = [1], 1
        for item in accepted:
            count = min(count + item + 1, len(ids))
            ends.append(count)
        histogram = [accepted.count(item) for item in range(max(accepted, default=0) + 1)]
        finish = {"type": "abort"} if fault == "abort" else {"type": "stop" if ids[-1] == EOS else "length"}
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        sent = [*ends[:1], *ends[1:-1][:: fake.merged], *ends[1:][-1:]]
        before = 0
        for place, end in enumerate(sent):
            last = place == len(sent) - 1
            if fault == "cut" and (place == 2 or last):
                return None
            if fault == "json" and last:
                return self._piece('{"text": "x", "output')
            if fault == "error" and last:
                return self._piece(json.dumps({"error": {"message": "out of memory"}}))
            meta = {"prompt_tokens": len(prompt), "completion_tokens": end, "cached_tokens": 0}
            meta["finish_reason"] = finish if last else None
            if last and fake.steps and accepted:
                meta |= {
                    "spec_verify_ct": len(accepted),
                    "spec_accept_length": len(ids) / len(accepted),
                    "spec_num_correct_drafts": sum(accepted),
                    "spec_correct_drafts_histogram": histogram,
                }
                meta |= {"spec_verify_ct": 1000} if fault == "meta" else {}
            meta = {fake.rename.get(key, key): value for key, value in meta.items() if key not in fake.without}
            shown = ids[before:end] if fake.pieces else ids[:end]
            if fault == "ids" and last:
                shown = shown[:-1]
            time.sleep(0 if warm else fake.delay * (place > 0))
            self._piece(json.dumps({"text": "t", "output_ids": shown, "meta_info": meta}))
            before = end
        with fake.lock:
            fake.answered += 1
            fake.tokens += len(ids)
            fake.verifies += len(accepted) if fake.steps else 0
        return self._piece("[DONE]")

    def _piece(self, text: str) -> None:
        self.wfile.write(f"data: {text}\n\n".encode())
        self.wfile.flush()

    def _send(self, status: int, body: Any) -> None:
        self._raw(status, json.dumps(body).encode())

    def _raw(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass
