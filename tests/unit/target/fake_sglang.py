"""A server that answers as SGLang does, over real HTTP, for a tiny target that runs here."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import torch

from eagle3.wiring.diagnosis import POST_NORM, Boundary
from tests.unit.target.cases import make_engine
from tests.unit.target.fake_http import serving

States = dict[Boundary, torch.Tensor]


class FakeTarget:
    """Every boundary of a tiny target, and its head."""

    def __init__(self, folder: Path, num_hidden_layers: int, dtype: str = "float32") -> None:
        self._engine = make_engine(folder, range(-1, num_hidden_layers), dtype=dtype)
        self._lock = threading.Lock()

    def states(self, tokens: Sequence[int]) -> States:
        with self._lock:
            [capture] = self._engine.capture([tokens])
        parts = capture.aux_hidden_states.chunk(self._engine.wiring.num_aux, dim=-1)
        return {**dict(enumerate(parts)), POST_NORM: capture.last_hidden_states}

    def log_probabilities(self, states: States) -> torch.Tensor:
        head = self._engine.model.get_output_embeddings().weight
        logits: torch.Tensor = states[POST_NORM].to(head.dtype) @ head.T
        return logits.float().log_softmax(-1)


@dataclass
class FakeSglang:
    """What the server is and does.

    Attributes:
        target: what it serves.
        returned: the states that make up a row, in order.
        model_info, server_info: what it says of itself.
        vocab_size: its own.
        api_key: that it wants.
        change: of a request's rows before they are returned.
        delay: seconds before it answers, by the number of tokens.
        uses_extra_key: keeps prefixes apart by `extra_key`, as SGLang does.
        failing: of so many next requests the connection breaks.
        answers: so many are given, then every connection breaks; None: no end.
    """

    target: FakeTarget
    returned: Sequence[Boundary]
    model_info: dict[str, Any] = field(default_factory=lambda: {"model_path": "/models/tiny", "model_type": "llama"})
    server_info: dict[str, Any] = field(default_factory=dict)
    vocab_size: int = 512
    api_key: str | None = None
    change: Callable[[torch.Tensor, list[int]], torch.Tensor] = lambda rows, tokens: rows
    delay: Callable[[int], float] = lambda tokens: 0.0
    uses_extra_key: bool = True
    failing: int = 0
    answers: int | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    most_in_flight: int = 0

    def __post_init__(self) -> None:
        self._in_flight = 0
        self._prefixes: dict[str, set[tuple[int, ...]]] = {}
        self._lock = threading.Lock()

    def running(self) -> AbstractContextManager[str]:
        """Its URL."""
        return serving(_Handler, self)

    def breaks(self) -> bool:
        """Whether this request gets no answer."""
        with self._lock:
            if self.failing:
                self.failing -= 1
                return True
            if self.answers is not None:
                self.answers -= 1
                return self.answers < 0
            return False

    def generate(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        tokens = body["input_ids"]
        with self._lock:
            self.requests.append(body)
            self._in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
        try:
            time.sleep(self.delay(len(tokens)))
            biased = map(int, body["sampling_params"].get("logit_bias", {}))
            if max(biased, default=0) >= self.vocab_size:
                message = f"logit_bias must has keys in [0, {self.vocab_size - 1}], got 511."
                return 400, {"error": {"message": message}}
            states = self.target.states(tokens)
            rows = self.change(torch.cat([states[key] for key in self.returned], dim=-1), tokens)
            cached = self._cached(body)
            meta: dict[str, Any] = {"hidden_states": [rows[cached:].tolist()], "cached_tokens": cached}
            if body.get("return_logprob"):
                chosen = self.target.log_probabilities(states)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])
                values = [None, *chosen[:, 0].tolist()]
                meta["input_token_logprobs"] = [
                    [value, token, None] for value, token in zip(values, tokens, strict=True)
                ]
            return 200, {"text": "x", "meta_info": meta}
        finally:
            with self._lock:
                self._in_flight -= 1

    def _cached(self, body: dict[str, Any]) -> int:
        """Tokens in the prefix cache; the last one is always computed."""
        tokens = body["input_ids"]
        with self._lock:
            known = self._prefixes.setdefault(body.get("extra_key", "") if self.uses_extra_key else "", set())
            cached = max((size for size in range(len(tokens)) if tuple(tokens[:size]) in known), default=0)
            known.update(tuple(tokens[:size]) for size in range(1, len(tokens) + 1))
        return cached


class _Handler(BaseHTTPRequestHandler):
    fake: FakeSglang
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/model_info":
            self._answer(200, self.fake.model_info)
        elif self.path == "/server_info":
            self._answer(200, self.fake.server_info)
        else:
            self._answer(404, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = self.fake.generate(body)
        if self.fake.breaks():  # after the work: its prefix cache has the prompt
            self.close_connection = True
        else:
            self._answer(*answer)

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        if self.fake.api_key and self.headers.get("Authorization") != f"Bearer {self.fake.api_key}":
            status, body = 401, {"error": "Unauthorized"}
        content = json.dumps(body).replace("NaN", "null").encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass
