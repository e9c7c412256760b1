"""A server that answers as SGLang or as an OpenAI-compatible one does, over real HTTP, with faults as asked for.

Its answers are made of the prompt's ids alone, so that any of several servers gives the same one.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any, Literal

from tests.unit.target.fake_http import serving

EOS = 511
Fault = str | None


def answer_ids(prompt: list[int], limit: int) -> list[int]:
    """Some ordinary tokens and the end token; as many as fit."""
    start = sum(prompt) % 97
    return [*(300 + (start + place * 7) % 97 for place in range(2 + sum(prompt) % 4)), EOS][:limit]


@dataclass
class FakeAnswers:
    """What the server is and does.

    Attributes:
        kind: which routes it has: `sglang`, `completions` (and chat), `chat`.
        name: of the model that it serves.
        fault: of the n-th request for an answer (from 0), given its body. `hang`, `cut`, `drop`, `json`, `ids`,
            `empty`, `endless` (no end token), `abort`, or a status with or without seconds, as `429:0.3`.
        fields: put into what is said of the model.
        count: prompt tokens that chat makes of messages, given the right number.
        gives_ids: OpenAI routes return token ids if asked.
        api_key: that it wants.
        tokens: that it makes of any text; None: it has no /tokenize; "fails": it answers 500 there and hangs up.
        delay: seconds before an answer.
    """

    kind: str = "sglang"
    name: str = "tiny"
    fault: Callable[[int, Mapping[str, Any]], Fault] = lambda number, body: None
    fields: dict[str, Any] = field(default_factory=dict)
    count: Callable[[int], int] = lambda right: right
    gives_ids: bool = True
    api_key: str | None = None
    tokens: list[int] | Literal["fails"] | None = None
    vocab_size: int = 512
    delay: float = 0.0
    requests: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    most_in_flight: int = 0
    render: Callable[[list[Any]], list[int]] = lambda messages: [1] * 9

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._in_flight = 0
        self.asked_who = threading.Event()

    def running(self, port: int = 0) -> AbstractContextManager[str]:
        """Its URL."""
        return serving(_Handler, self, port)

    @contextmanager
    def counted(self, body: dict[str, Any]) -> Iterator[Fault]:
        with self._lock:
            number = len(self.requests)
            self.requests.append(body)
            self.times.append(time.monotonic())
            self._in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
        try:
            time.sleep(self.delay)
            yield self.fault(number, body)
        finally:
            with self._lock:
                self._in_flight -= 1


class _Handler(BaseHTTPRequestHandler):
    fake: FakeAnswers
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        fake = self.fake
        if fake.api_key and self.headers.get("Authorization") != f"Bearer {fake.api_key}":
            return self._send(401, {"error": "Unauthorized"})
        if self.path == "/model_info" and fake.kind == "sglang":
            fake.asked_who.set()
            return self._send(200, {"model_path": f"/models/{fake.name}", "model_type": "llama", **fake.fields})
        if self.path == "/v1/models" and fake.kind != "sglang":
            return self._send(200, {"data": [{"id": fake.name, **fake.fields}]})
        return self._send(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        fake = self.fake
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if fake.api_key and self.headers.get("Authorization") != f"Bearer {fake.api_key}":
            return self._send(401, {"error": "Unauthorized"})
        if self.path == "/tokenize" and fake.tokens == "fails":
            self.close_connection = True
            return self._send(500, {})
        if self.path == "/tokenize" and fake.tokens is not None:
            return self._send(200, {"tokens": fake.tokens, "count": len(fake.tokens)})
        routes = {"sglang": ("/generate",), "chat": ("/v1/chat/completions",)}
        if self.path not in routes.get(fake.kind, ("/v1/completions", "/v1/chat/completions")):
            return self._send(404, {"detail": "Not Found"})
        bias = [int(key) for key in body.get("sampling_params", {}).get("logit_bias", {})]
        if bias:  # the probe of its vocabulary
            refused = max(bias) >= fake.vocab_size
            message = {"error": {"message": f"logit_bias must has keys in [0, {fake.vocab_size - 1}]"}}
            return self._send(400, message) if refused else self._send(200, {"text": "x", "output_ids": [1]})
        with fake.counted(body) as fault:
            return self._answer(body, fault)

    def _answer(self, body: dict[str, Any], fault: Fault) -> None:
        if fault == "hang":
            time.sleep(3)
        if fault == "drop":
            self.close_connection = True
            return None
        if fault and fault[0].isdigit():
            status, _, seconds = fault.partition(":")
            headers = {"Retry-After": seconds} if seconds else {}
            return self._send(int(status), {"error": {"message": "fault"}}, headers)
        reply = self._reply(body, fault)
        content = json.dumps(reply).encode()
        if fault == "json":
            content = content[: len(content) // 2]
        if fault == "cut":
            self.close_connection = True
            return self._raw(200, content[:10], len(content))
        return self._raw(200, content, len(content))

    def _reply(self, body: dict[str, Any], fault: Fault) -> dict[str, Any]:
        fake = self.fake
        chat = self.path.endswith("chat/completions")
        prompt = body.get("input_ids") or body.get("prompt") or fake.render(body.get("messages", []))
        limit = body["sampling_params"]["max_new_tokens"] if "sampling_params" in body else body["max_tokens"]
        ids = answer_ids(prompt, limit)
        finish = "stop" if ids[-1] == EOS else "length"
        if fault == "ids":
            ids = [fake.vocab_size, *ids[1:]]
        if fault == "endless":
            ids, finish = ids[:1], "stop"
        if fault == "empty":
            ids = []
        if fault == "abort":
            finish = "abort"
        if fake.kind == "sglang":
            meta = {"finish_reason": {"type": finish}, "prompt_tokens": len(prompt), "completion_tokens": len(ids)}
            return {"text": "text", "output_ids": ids, "meta_info": meta}
        text = "" if fault == "empty" else "text of the server"
        said: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        if fake.gives_ids and body.get("return_token_ids"):
            said["token_ids"] = ids
        count = fake.count(len(prompt)) if chat else len(prompt)
        usage = {"prompt_tokens": count, "completion_tokens": len(ids)}
        return {"choices": [{"index": 0, "finish_reason": finish, **said}], "usage": usage}

    def _send(self, status: int, body: Any, headers: Mapping[str, str] | None = None) -> None:
        content = json.dumps(body).encode()
        self._raw(status, content, len(content), headers)

    def _raw(self, status: int, content: bytes, length: int, headers: Mapping[str, str] | None = None) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(length))
            for key, value in (headers or {}).items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(content)
        except (BrokenPipeError, ConnectionResetError):  # the client has gone, as after a time-out
            self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass
