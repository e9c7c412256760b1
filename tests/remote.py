"""A local S3, started once a process, and a proxy before it whose requests are counted and fail as told."""

from __future__ import annotations

import http.client
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest
import s3fs
from moto.server import ThreadedMotoServer

from eagle3.data import remote_folder

BUCKET = "bucket"
DENIED = b'<?xml version="1.0"?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>'

Fault = Callable[[str, str], str | None]
"""(method, path) -> `drop` (no answer), `half` (the body ends early), `deny` (403), or None."""


@cache
def _start_s3() -> tuple[str, int]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    connection = http.client.HTTPConnection(host, port)
    connection.request("PUT", f"/{BUCKET}")
    assert connection.getresponse().status == 200
    return host, port


@contextmanager
def local_s3() -> Iterator[str]:
    """Points the clients of this process, and of those that it starts, to a local S3 with an empty bucket while the
    block runs, and makes them try each request once; yields its address.
    """
    host, port = _start_s3()
    address = f"http://{host}:{port}"
    with pytest.MonkeyPatch.context() as patch, settings(patch, address):
        patch.setattr(remote_folder, "_WAITS", ())
        yield address


@contextmanager
def settings(patch: pytest.MonkeyPatch, address: str) -> Iterator[None]:
    """The variables of an S3 client while the block runs; clients of another address are forgotten."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        patch.delenv(name)
    patch.setenv("AWS_ENDPOINT_URL", address)
    patch.setenv("AWS_ACCESS_KEY_ID", "test")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    patch.setenv("AWS_MAX_ATTEMPTS", "1")
    patch.setattr(s3fs.S3FileSystem, "retries", 1)
    patch.setenv("AWS_CONFIG_FILE", os.devnull)
    patch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    before = _pointed[-1]
    _point(address)
    try:
        yield
    finally:
        _point(before or address)


_pointed: list[str | None] = [None]
"""Where the clients that there are point to."""


def _point(address: str) -> None:
    if _pointed[-1] != address:
        forget_clients()
        _pointed[-1] = address


def forget_clients() -> None:
    """The next one reads the variables again."""
    s3fs.S3FileSystem.clear_instance_cache()


def file_system() -> Any:
    return fsspec.filesystem("s3", use_listings_cache=False)


def upload(folder: Path, url: str) -> str:
    """Puts the files of a local store at a URL, plainly."""
    for path in sorted(folder.iterdir()):
        if path.suffix in {".json", ".safetensors"}:
            file_system().put_file(str(path), f"{url.removeprefix('s3://')}/{path.name}")
    return url


class Proxy:
    """Before the local S3: `requests` lists (method, path, range); `fault` says which of them fail."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, str | None]] = []
        self.fault: Fault = lambda method, path: None
        proxy, upstream = self, _start_s3()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # head and body are two small packets, the second waits for nothing

            def forward(self) -> None:
                proxy.requests.append((self.command, self.path, self.headers.get("Range")))
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                fault = proxy.fault(self.command, self.path)
                if fault == "drop":
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                if fault == "deny":
                    self.answer(403, [], DENIED)
                    return
                connection = http.client.HTTPConnection(*upstream)
                headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
                connection.request(self.command, self.path, body, {**headers, "Host": f"{upstream[0]}:{upstream[1]}"})
                response = connection.getresponse()
                data = response.read()
                kept = [item for item in response.getheaders() if item[0].lower() not in _HOP]
                if self.command == "HEAD":
                    self.answer(response.status, response.getheaders(), b"", None)
                else:
                    self.answer(response.status, kept, data[: len(data) // 2] if fault == "half" else data, len(data))
                if fault == "half":
                    self.close_connection = True

            def answer(self, status: int, headers: list[tuple[str, str]], data: bytes, length: int | None = -1) -> None:
                self.send_response_only(status)
                for name, value in headers:
                    self.send_header(name, value)
                if length is not None:
                    self.send_header("Content-Length", str(len(data) if length < 0 else length))
                self.end_headers()
                self.wfile.write(b"" if self.command == "HEAD" else data)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = forward

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


_HOP = {"content-length", "transfer-encoding", "connection"}


@contextmanager
def proxied() -> Iterator[Proxy]:
    """As `local_s3`, through a proxy."""
    proxy = Proxy()
    try:
        with local_s3(), pytest.MonkeyPatch.context() as patch, settings(patch, proxy.address):
            yield proxy
    finally:
        proxy.close()
