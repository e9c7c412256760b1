"""Waiting for a server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx

from eagle3.serve.launch.process import ServerProcess
from eagle3.serve.wait.ready import Progress, Ready


def wait_until_ready(
    url: str | None,
    *,
    log: str | Path | None = None,
    process: ServerProcess | None = None,
    version: str | None = None,
    timeout: float | None = None,
    passive_health: bool | None = None,
    api_key: str | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    poll_seconds: float = 1.0,
    transport: httpx.BaseTransport | None = None,
) -> Ready:
    """Waits until a server takes requests; see `eagle3.serve.wait.watch.Watch` for how.

    Raises:
        ProblemsError: it died (kinds `server.*`, with the cause from its log), or cannot be waited for.
    """
    raise NotImplementedError
