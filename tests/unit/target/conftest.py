from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from eagle3.target import tiny


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a tiny target by name (`llama`, `qwen3`, `deepseek_v3`, `kimi`), made once."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = getattr(tiny, f"make_tiny_{name}")(tmp_path_factory.mktemp(name))
        return made[name]

    return folder
