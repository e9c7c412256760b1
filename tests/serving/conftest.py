"""Fixtures that run the real SGLang; see `sglang_venv.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.serving.sglang_venv import run_script, running_server

EngineScript = Callable[..., Any]
ServerStarter = Callable[..., str]


@pytest.fixture
def engine(tmp_path: Path) -> EngineScript:
    """`engine(script, request)`: what a script of `scripts/` replies, run under SGLang."""

    def run(script: str, request: Any, timeout: float = 240) -> Any:
        return run_script(script, request, tmp_path, timeout)

    return run


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerStarter]:
    """`server("--model-path", target, ...)`: the URL of a real server, which ends with the test."""
    with ExitStack() as running:

        def start(*arguments: str | Path, timeout: float = 240) -> str:
            log_file = tmp_path / "server.log"
            return running.enter_context(running_server([str(item) for item in arguments], log_file, timeout))

        yield start
