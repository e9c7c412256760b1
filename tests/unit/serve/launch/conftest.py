"""Models that several tests look at and none changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.serve.launch.cases import make_models


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(target, draft)."""
    return make_models(tmp_path_factory.mktemp("launch"))
