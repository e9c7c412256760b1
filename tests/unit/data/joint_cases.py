"""Parts of a store that several processes write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from eagle3.data.chat import TokenSample
from eagle3.data.shard_file import ShardFile, shard_entry
from eagle3.data.store import StoredSample
from eagle3.data.store_fingerprint import make_fingerprint
from eagle3.data.store_format import shard_name
from eagle3.data.store_joint import JointStore

from .cases import HIDDEN, contract, layout, sample, target_head

SETTINGS = {"data": {"max_length": 64}, "stream": {"chunk_tokens": 8}}


def joint(folder: Path, index: int = 0, count: int = 1, **changes: Any) -> JointStore:
    values: dict[str, Any] = {
        "contract": contract(),
        "settings": lambda begun: SETTINGS,
        "target_config": {"model_type": "llama", "rms_norm_eps": 1e-6},
        "target_head": target_head(),
        "provenance": {},
        "index": index,
        "count": count,
    }
    return JointStore(folder, **{**values, **changes})


def shard_samples(number: int) -> list[StoredSample]:
    return [sample(f"s{at}", tokens=3 + at, start=at) for at in (2 * number, 2 * number + 1)]


def write(store: JointStore, number: int) -> None:
    """Writes and lists shard `number`, which holds two samples."""
    samples = shard_samples(number)
    plain = [TokenSample(item.id, item.input_ids.tolist(), item.loss_mask.tolist()) for item in samples]
    file = ShardFile(store.folder / shard_name(number), plain, layout())
    slots = torch.cat([item.aux_hidden_states for item in samples]).split(HIDDEN, dim=1)
    for index, rows in zip(contract().output_indices, slots, strict=True):
        file.put(index, 0, rows)
    file.put("last", 0, torch.cat([item.last_hidden_states for item in samples]))
    for place, item in enumerate(samples):
        assert item.supervised_argmax is not None
        file.write_argmax(place, item.supervised_argmax)
    file.close()
    store.commit([shard_entry(file.path, plain)], None if number else make_fingerprint(samples, layout()))


def write_share(folder: Path, index: int, count: int, shards: int) -> None:
    """What one process does: its shards that are not listed yet."""
    with joint(folder, index, count) as store:
        listed = {shard.file for shard in store.manifest().shards}
        for number in range(index, shards, count):
            if shard_name(number) not in listed:
                write(store, number)


def content(folder: Path) -> Mapping[str, bytes]:
    """Every file's bytes, but for the locks'."""
    return {path.name: path.read_bytes() for path in files(folder)}


def files(folder: Path) -> Iterable[Path]:
    return [path for path in sorted(folder.iterdir()) if path.suffix != ".lock"]
