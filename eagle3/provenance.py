"""What made an artifact: command line, versions, time. Standard library only; written beside every artifact."""

from __future__ import annotations

import platform
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from eagle3 import __version__

_PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "datasets")


def provenance() -> dict[str, Any]:
    """JSON values that name this process: command, eagle3, Python and package versions, UTC time."""
    return {
        "command": shlex.join(sys.argv),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "eagle3": __version__,
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name)) is not None},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
