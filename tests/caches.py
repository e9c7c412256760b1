"""What a cache of remote stores takes, looked at while others work in it."""

from __future__ import annotations

from pathlib import Path

from eagle3.data.piece_cache import LOCK_FILE
from eagle3.files import TEMPORARY_SUFFIX

BLOCK = 4096


def used(folder: Path) -> int:
    """Bytes of all files in whole blocks, half-written ones included; one that gets its name meanwhile counts once."""
    sizes: dict[str, int] = {}
    for path in folder.rglob("*"):
        try:
            if path.is_file() and path.name != LOCK_FILE:
                sizes[str(path).removesuffix(TEMPORARY_SUFFIX)] = -(-path.stat().st_size // BLOCK) * BLOCK
        except FileNotFoundError:  # it was removed, or got its name, meanwhile
            continue
    return sum(sizes.values())
