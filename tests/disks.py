"""A disk that is really full."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Within, `folder` is a disk of that size, as `mount` reads it; skips the test where none may be mounted."""
    folder.mkdir(exist_ok=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("may not mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)
