"""Runs a fake server over real HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler], fake: object, port: int = 0) -> Iterator[str]:
    """The URL of a server whose handlers find what it is in `fake`; it does not wait for those that hang."""
    server = ThreadingHTTPServer(("127.0.0.1", port), type("Handler", (handler,), {"fake": fake}))
    server.daemon_threads = True
    server.block_on_close = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
