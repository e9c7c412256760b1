"""A Hugging Face hub of one dataset repository, with commits: as much of its HTTP interface as reading takes."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import fsspec.config
import pytest
from huggingface_hub import HfFileSystem

REPOSITORY = "datasets/me/states"


class Hub:
    """`commits` lists the files of each commit, by path; the last one is what `main` is."""

    def __init__(self) -> None:
        self.commits: list[dict[str, bytes]] = [{}]
        self.ranges: list[tuple[str, str | None]] = []
        self.private = False
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # head and body are two small packets, the second waits for nothing

            def do_GET(self) -> None:
                path = unquote(urlsplit(self.path).path).strip("/")
                if hub.private:
                    self.answer(403, b"{}")
                elif path.startswith(f"api/{REPOSITORY}"):
                    rest = path.removeprefix(f"api/{REPOSITORY}").strip("/").split("/", 2)
                    number = hub.number(rest[1] if len(rest) > 1 else "main")
                    if rest[0] == "tree":
                        self.answer(200, json.dumps(hub.tree(number, rest[2] if len(rest) > 2 else "")).encode())
                    else:
                        self.answer(200, json.dumps({"id": "me/states", "sha": hub.sha(number)}).encode())
                elif path.startswith(f"{REPOSITORY}/resolve/"):
                    revision, name = path.removeprefix(f"{REPOSITORY}/resolve/").split("/", 1)
                    content = hub.commits[hub.number(revision)].get(name)
                    hub.ranges.append((name, self.headers.get("Range")))
                    if content is None:
                        self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
                    elif (wanted := self.headers.get("Range")) is not None:
                        begin, end = map(int, wanted.removeprefix("bytes=").split("-"))
                        part = content[begin : end + 1]
                        self.answer(206, part, {"Content-Range": f"bytes {begin}-{end}/{len(content)}"})
                    else:
                        self.answer(200, content)
                else:
                    self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})

            def answer(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
                self.send_response_only(status)
                for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def sha(self, number: int) -> str:
        return hashlib.sha1(str(number).encode(), usedforsecurity=False).hexdigest()

    def number(self, revision: str) -> int:
        known = {self.sha(number): number for number in range(len(self.commits))}
        return known.get(revision, len(self.commits) - 1)

    def tree(self, number: int, folder: str) -> list[dict[str, object]]:
        return [
            {
                "type": "file",
                "path": name,
                "size": len(data),
                "oid": hashlib.sha1(data, usedforsecurity=False).hexdigest(),
            }
            for name, data in self.commits[number].items()
            if name.rpartition("/")[0] == folder
        ]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def local_hub() -> Iterator[Hub]:
    """`hf://` means this hub while the block runs."""
    hub = Hub()
    HfFileSystem.clear_instance_cache()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(fsspec.config.conf, "hf", {"endpoint": hub.address, "token": False})
            yield hub
    finally:
        HfFileSystem.clear_instance_cache()
        hub.close()
