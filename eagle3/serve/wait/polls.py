"""Who else asks a starting server, and makes it generate tokens by asking.

`/health` and `/health_generate` run a prefill and one decoding step (`sglang/srt/entrypoints/http_server.py`,
`health_generate`), unless `SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0` makes `/health` passive; up to the end of the
warm-up they answer 503 and generate nothing. Only what the access log shows can be seen here.
"""

from __future__ import annotations

from collections import Counter

from eagle3.serve.wait.lines import Access

_HEALTH = ("/health", "/health_generate")
_GENERATING = frozenset(
    {"/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat", "/encode"}
)


class Polls:
    """Counts requests before the server was ready.

    Attributes:
        passive_health: `/health` generates nothing, and our own waiting may use it.
    """

    def __init__(self, passive_health: bool) -> None:
        self.passive_health = passive_health
        self._refused: Counter[str] = Counter()
        self._generated: Counter[str] = Counter()
        self._clients: dict[str, None] = {}

    def add(self, access: Access) -> None:
        """A request that came before the server was ready."""
        if access.path in _HEALTH and not (access.path == "/health" and self.passive_health):
            (self._refused if access.status == 503 else self._generated)[access.path] += 1
            self._clients[access.client] = None
        elif access.path in _GENERATING and access.method == "POST":
            self._generated[access.path] += 1
            self._clients[access.client] = None

    def warnings(self) -> list[str]:
        """What to tell a person; the server's own warm-up is one request."""
        generated = self._generated.copy()
        own = next((path for path in generated if path in _GENERATING), None)
        if own is not None:
            generated[own] -= 1
        generated = +generated
        found = []
        if generated:
            found.append(
                f"{_counted(generated)} while it was starting, from {', '.join(self._clients)}: each made it generate, "
                "which delays capture and warm-up; poll /ready, or /health with "
                "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0"
            )
        if self._refused:
            found.append(
                f"{_counted(self._refused)} while it was starting, from {', '.join(self._clients)}: answered 503 until "
                "now, from now on each makes it generate a token and counts into its acceptance; poll /ready, or "
                "/health with SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0"
            )
        return found


def _counted(paths: Counter[str]) -> str:
    return ", ".join(f"{count} x {path}" for path, count in paths.items())
