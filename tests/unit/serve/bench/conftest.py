from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from eagle3.config import BenchConfig, build_config
from eagle3.target.tiny import make_tiny_llama


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture
def start() -> Iterator[Callable[..., str]]:
    """`start(fake, port=0)`: its URL."""
    with ExitStack() as stack:
        yield lambda fake, port=0: stack.enter_context(fake.running(port))


@pytest.fixture
def make(tiny: Path, tmp_path: Path) -> Callable[..., BenchConfig]:
    """`make(url, ..., baseline_url=, load keys)`: a config whose prompts are `records`."""

    def config(
        *urls: str, records: Sequence[dict[str, Any]] | None = None, name: str = "bench", top: Any = None, **load: Any
    ) -> BenchConfig:
        prompts = tmp_path / "prompts.jsonl"
        if records is None:
            records = [{"id": f"p{number}", "prompt": f"Question {number}?"} for number in range(8)]
        prompts.write_text("".join(json.dumps(record) + "\n" for record in records))
        values = {
            "target": {"path": str(tiny)},
            "urls": list(urls),
            "load": {
                "sets": {"mine": str(prompts)},
                "max_new_tokens": 64,
                "timeout_seconds": 30.0,
                "warmup": 1,
                **load,
            },
            "output": str(tmp_path / name),
            **(top or {}),
        }
        return build_config(BenchConfig, values, "test")

    return config
