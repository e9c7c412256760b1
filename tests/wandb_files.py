"""What Weights & Biases wrote offline, read back."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HEADER, _BLOCK, _RECORD_HEADER = 7, 1 << 15, 7
_FULL, _LAST = 1, 4


def wandb_history(folder: Path) -> list[dict[str, Any]]:
    """The values of each `log` of a run, in order.

    Args:
        folder: of one start: `offline-run-*`.
    """
    found = []
    for record in _records(folder):
        if record.WhichOneof("record_type") == "history":
            found.append(
                {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            )
    return found


def wandb_config(folder: Path) -> dict[str, Any]:
    """The config as the last update left it."""
    found: dict[str, Any] = {}
    for record in _records(folder):
        if record.WhichOneof("record_type") == "config":
            found |= {item.key: json.loads(item.value_json) for item in record.config.update if item.key}
    return found


def wandb_metrics(folder: Path) -> dict[str, str]:
    """For each defined metric, by name or pattern, what it is drawn over."""
    metrics = [item.metric for item in _records(folder) if item.WhichOneof("record_type") == "metric"]
    return {metric.name or metric.glob_name: metric.step_metric for metric in metrics}


def _records(folder: Path) -> Iterator[Any]:
    """The records of the one `.wandb` file, as far as it goes: LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("*.wandb")
    data, at, parts = path.read_bytes(), _HEADER, b""
    while at + _RECORD_HEADER <= len(data):
        if _BLOCK - at % _BLOCK < _RECORD_HEADER:
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        at += _RECORD_HEADER
        if kind == 0 or at + length > len(data):
            return
        parts += data[at : at + length]
        at += length
        if kind in (_FULL, _LAST):
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record
