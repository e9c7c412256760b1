"""About how many records a file holds, before they are read."""

from __future__ import annotations

from pathlib import Path

from eagle3.config import ConversationsConfig
from eagle3.files import is_url

_PLACES, _PLACE_BYTES = 64, 1 << 16


def expected_records(cfg: ConversationsConfig) -> int | None:
    """About how many records `read_records` will give; None where that shows only when they are read: a `.json` list, a
    data set, a URL.

    Lines are counted at a few places of the file, evenly apart.
    """
    if cfg.split is not None or is_url(cfg.path):
        return None
    path = Path(cfg.path)
    if path.suffix == ".parquet":
        import pyarrow.parquet

        found = int(pyarrow.parquet.read_metadata(path).num_rows)
    elif path.suffix == ".json":
        return None
    else:
        found = _lines(path)
    return found if cfg.limit is None else min(found, cfg.limit)


def _lines(path: Path) -> int:
    size, lines, read = path.stat().st_size, 0, 0
    with open(path, "rb") as file:
        for number in range(_PLACES):
            file.seek(number * size // _PLACES)
            data = file.read(min(_PLACE_BYTES, -(-size // _PLACES)))
            lines += data.count(b"\n")
            read += len(data)
    return max(1, round(lines * size / max(read, 1)))
