"""Stores of format version 2, of which no writer is left."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from eagle3.data.store import StoreReader
from eagle3.data.store_format import ShardInfo, load_manifest, save_manifest
from eagle3.data.store_sample import shard_content
from eagle3.data.tensor_file import write_tensor_file


def as_version_2(folder: Path, out: Path) -> Path:
    """The store as an older eagle3 wrote it: without greedy tokens."""
    reader, manifest = StoreReader(folder), load_manifest(folder)
    layout = replace(manifest.layout, version=2)
    out.mkdir()
    shutil.copy(folder / manifest.target_head.file, out)
    shards, first = [], 0
    for shard in manifest.shards:
        samples = [reader.read(first + place) for place in range(len(shard.samples))]
        path = out / shard.file
        checksum = write_tensor_file(path, *shard_content(samples, layout))
        shards.append(ShardInfo(path.name, path.stat().st_size, checksum, shard.samples))
        first += len(samples)
    save_manifest(out, replace(manifest, layout=layout, shards=tuple(shards)))
    return out
