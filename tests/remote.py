"""A local S3, started once for all tests that need one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import fsspec
from moto.server import ThreadedMotoServer

BUCKET = "bucket"


@cache
def start_s3() -> str:
    """Starts the server, points this process's clients to it and makes the bucket; returns its address."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",
    }
    file_system().mkdir(BUCKET)
    return f"http://{host}:{port}"


def file_system() -> Any:
    return fsspec.filesystem("s3", use_listings_cache=False)


def upload(folder: Path, url: str) -> str:
    """Puts the files of a local store at a URL, plainly."""
    for path in sorted(folder.iterdir()):
        if path.suffix in {".json", ".safetensors"}:
            file_system().put_file(str(path), f"{url.removeprefix('s3://')}/{path.name}")
    return url


@contextmanager
def counting(monkeypatch_target: Any, name: str) -> Iterator[list[tuple[Any, ...]]]:
    """Records the arguments of every call of a method while the block runs."""
    calls: list[tuple[Any, ...]] = []
    real = getattr(monkeypatch_target, name)

    def recorded(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return real(*args, **kwargs)

    setattr(monkeypatch_target, name, recorded)
    try:
        yield calls
    finally:
        setattr(monkeypatch_target, name, real)
