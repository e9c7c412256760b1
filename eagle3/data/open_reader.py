"""Opens a hidden-state store wherever it lies."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from eagle3.config import CacheSection
from eagle3.data.piece_cache import PieceCache
from eagle3.data.store import StoreReader
from eagle3.errors import ProblemsError, problem_error
from eagle3.files import is_url, refuse_url
from eagle3.wiring.contract import WiringContract


def open_reader(
    place: Path | str,
    cache: CacheSection | None = None,
    expected: WiringContract | None = None,
    allow_incomplete: bool = False,
) -> StoreReader:
    """A reader of the store in a folder or at a URL.

    Args:
        place: folder or URL.
        cache: what a store at a URL is read through.
        expected, allow_incomplete: see `StoreReader`.

    Raises:
        ProblemsError: what `StoreReader` or `RemoteStoreReader` raises; kind `cache.missing`.
    """
    if not is_url(place):
        return StoreReader(place, expected, allow_incomplete)
    from eagle3.data.remote_folder import RemoteFolder
    from eagle3.data.remote_store import RemoteStoreReader

    if cache is None:
        fix = "give cache.folder (or --cache), a folder on a local disk; see docs/remote-stores.md"
        raise problem_error(str(place), "cache.missing", "a store at a URL is read through a local cache", fix)
    remote = RemoteFolder(str(place))
    return RemoteStoreReader(remote, open_cache(cache, remote.url), expected, allow_incomplete)


def open_cache(cache: CacheSection, store: str) -> PieceCache:
    """This process's part of a cache folder.

    Args:
        store: what it is opened for, named in problems.

    Raises:
        ProblemsError: see `PieceCache`; kind `remote.not_here`, the folder is a URL.
    """
    refuse_url(cache.folder, f"the cache of {store}", "give a folder on a local disk")
    rank = Path(cache.folder) / f"rank-{int(os.environ.get('RANK', '0')):05d}"
    try:
        return PieceCache.shared(rank, cache.max_bytes, cache.threads)
    except ProblemsError as error:
        raise ProblemsError(
            [replace(item, where=store, message=f"its cache {item.where}: {item.message}") for item in error.problems]
        ) from error
