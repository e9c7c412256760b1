"""One exchange with a server that may be anything: it ends in time, however slowly the bytes come."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx

MOST_BYTES = 64 << 20


def fetch(client: httpx.Client, method: str, path: str, seconds: float, **request: Any) -> httpx.Response:
    """The whole reply.

    Args:
        seconds: until all of it must have come.
        request: as `httpx.Client.request` takes it.

    Raises:
        httpx.HTTPError: there is none; `httpx.ReadTimeout` also where it comes too slowly or does not end.
    """
    deadline = time.monotonic() + seconds
    data = bytearray()
    with client.stream(method, path, **request) as reply:
        for chunk in reply.iter_bytes():
            data += chunk
            if time.monotonic() > deadline or len(data) > MOST_BYTES:
                raise httpx.ReadTimeout(f"the answer does not end: {len(data):,} bytes so far")
    headers = [(name, value) for name, value in reply.headers.items() if name != "content-encoding"]
    return httpx.Response(reply.status_code, headers=headers, content=bytes(data))


def json_of(text: str) -> Any:
    """The value; the text itself where it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
