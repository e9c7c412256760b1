"""Where stores at a URL are read through."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from eagle3.config.base import PathText, PositiveInt, Section


class CacheSection(Section):
    """Where a store in an object store is read through, see docs/remote-stores.md."""

    folder: PathText
    """Local folder of its own; each process uses a folder `rank-N` in it."""
    max_bytes: PositiveInt = 100 << 30
    """Most bytes that each process keeps there."""
    threads: Annotated[int, Field(gt=0, le=256, strict=True)] = 16
    """Samples that are fetched at a time, before they are read."""
