"""A server that answers as an SGLang of some version does while it starts, and counts what it is asked."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field

import httpx

GENERATING = {"/health", "/health_generate", "/generate", "/v1/completions", "/v1/chat/completions"}


@dataclass
class FakeServer:
    """As a transport of httpx: `transport`.

    Attributes:
        answers: to `/ready` (or `/health`), one after the other; the last one stays. None: nobody listens, "reset": the
            connection breaks, "slow": no answer in time.
        has_ready: `/ready` is there.
        passive_health: `/health` generates nothing.
        model, version: what it says of itself; None: it has no such endpoint.
        asked: how often each path was asked.
        generated: tokens.
    """

    answers: list[int | str | None]
    has_ready: bool = True
    passive_health: bool = False
    model: str | None = "target"
    version: str | None = "0.5.23"
    asked: Counter[str] = field(default_factory=Counter)
    generated: int = 0

    @property
    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self._answer)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.asked[path] += 1
        state = self.answers[0] if len(self.answers) == 1 else self._next(path)
        if state is None:
            raise httpx.ConnectError("Connection refused")
        if state == "reset":
            raise httpx.ReadError("Connection reset by peer")
        if state == "slow":
            raise httpx.ReadTimeout("timed out")
        if path in GENERATING and not (path == "/health" and self.passive_health) and state != 503:
            self.generated += 1
        if (path == "/ready" and self.has_ready) or path in ("/health", "/health_generate"):
            return httpx.Response(int(state))
        about = {"/model_info": {"model_path": self.model}, "/server_info": {"version": self.version}}
        if path in about and None not in about[path].values():
            return httpx.Response(200, content=json.dumps(about[path]))
        return httpx.Response(404)

    def _next(self, path: str) -> int | str | None:
        return self.answers.pop(0) if path in ("/ready", "/health") else self.answers[0]
