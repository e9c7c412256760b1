"""Builds a store of the shards, or of some samples of them, of other stores.

The manifest lists the shards only when all are there: a reader refuses what a kill leaves, and the same command goes on
with it. A shard that is taken whole keeps its bytes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagle3.data.store import StoreReader
from eagle3.data.store_check import check_shard
from eagle3.data.store_fingerprint import make_fingerprint
from eagle3.data.store_folder import check_output, check_resume, plain_json, remove_temporary_files
from eagle3.data.store_format import (
    LOCK_FILE,
    MANIFEST_FILE,
    FileInfo,
    Manifest,
    SampleInfo,
    ShardInfo,
    load_manifest,
    save_manifest,
    shard_name,
)
from eagle3.data.store_layout import StoreLayout
from eagle3.data.store_sample import shard_bytes, shard_content
from eagle3.data.store_verify import check_file
from eagle3.data.tensor_file import write_tensor_file_atomic
from eagle3.errors import problem_error, raise_problems
from eagle3.files import existing_folder, only_writer, readable, sha256_file, write_atomic
from eagle3.progress import progress
from eagle3.wiring.fingerprint_file import Fingerprint

_CHUNK_BYTES = 1 << 22
_DAMAGED = "see `eagle3 data repair`"


@dataclass(frozen=True)
class Source:
    """A store that is read."""

    reader: StoreReader
    manifest: Manifest

    @classmethod
    def open(cls, folder: Path) -> Source:
        """Checks sizes and headers, as `StoreReader` does."""
        reader = StoreReader(folder)
        return cls(reader, load_manifest(folder))

    @property
    def folder(self) -> Path:
        return self.reader.folder

    def pieces(self, chosen: Sequence[bool]) -> list[Piece]:
        """The chosen samples (manifest order), shard by shard; shards without any are left out."""
        pieces, first = [], 0
        for shard in self.manifest.shards:
            places = tuple(place for place in range(len(shard.samples)) if chosen[first + place])
            if places:
                pieces.append(Piece(self, shard, first, places))
            first += len(shard.samples)
        return pieces


@dataclass(frozen=True)
class Piece:
    """Samples of one shard of a store, which become a shard of another.

    Attributes:
        first: index in the store of the shard's first sample.
        places: of the samples in the shard, ascending, at least one.
    """

    source: Source
    shard: ShardInfo
    first: int
    places: tuple[int, ...]

    @property
    def whole(self) -> bool:
        return len(self.places) == len(self.shard.samples)

    @property
    def path(self) -> Path:
        return self.source.folder / self.shard.file

    @property
    def samples(self) -> tuple[SampleInfo, ...]:
        return tuple(self.shard.samples[place] for place in self.places)

    @property
    def tokens(self) -> int:
        return sum(sample.tokens for sample in self.samples)

    @property
    def bytes(self) -> int:
        """Size of the shard that it becomes."""
        if self.whole:
            return self.shard.bytes
        return shard_bytes(self.samples, self.source.manifest.layout)


@dataclass(frozen=True)
class BuildReport:
    """What became of a store's shards.

    Attributes:
        done: how many shards were linked, copied, written or there already, by that word.
    """

    folder: Path
    samples: int
    tokens: int
    done: Counter[str]

    def render(self) -> str:
        done = ", ".join(f"{count:,} {word}" for word, count in sorted(self.done.items()))
        return (
            f"{self.folder}: {self.samples:,} samples, {self.tokens:,} tokens in {self.done.total():,} shards: {done}"
        )


def build_store(
    out: Path, pieces: Sequence[Piece], settings: dict[str, Any], provenance: dict[str, Any], link: bool
) -> BuildReport:
    """Makes the store `out` of these pieces, in order, or goes on with it.

    Args:
        pieces: at least one, of sources of equal contracts and target heads; those of the first are taken.
        settings: of the store; they must tell these pieces from any others.
        link: take whole shards as hard links where the file system allows it.

    Raises:
        ProblemsError: `out` is something else; a source's shard is damaged; another process writes there; the disk
            refuses.
    """
    raise_problems(check_output(out))
    source = pieces[0].source.manifest
    with only_writer(out, LOCK_FILE):
        remove_temporary_files(out)
        if not (out / MANIFEST_FILE).exists():
            _copy(pieces[0].source.folder, out, source.target_head, source.target_head.file)
            begun = replace(
                source, settings=plain_json(settings), shards=(), fingerprint=None, provenance=plain_json(provenance)
            )
            save_manifest(out, begun)
        manifest = check_resume(out, source.layout, settings)
        done: Counter[str] = Counter()
        shards = []
        with progress(out.name, sum(piece.tokens for piece in pieces), "tokens") as advance:
            for number, piece in enumerate(pieces):
                shard, word = _take(piece, out, shard_name(number), link)
                shards.append(shard)
                done[word] += 1
                advance(piece.tokens)
        if not manifest.shards:
            finished = replace(manifest, shards=tuple(shards), fingerprint=_fingerprint(pieces[0]))
            save_manifest(out, finished)
    reader = StoreReader(out)
    return BuildReport(out, len(reader), sum(sample.tokens for sample in reader.samples), done)


def check_room(out: Path, pieces: Sequence[Sequence[Piece]], link: bool) -> None:
    """Refuses to begin what the disk cannot hold.

    Args:
        out: folder of the new store, or of the new stores.
        pieces: of each store.

    Raises:
        ProblemsError: kind `store.no_room`.
    """
    there = 0 if link or not out.is_dir() else sum(path.stat().st_size for path in out.rglob("*.safetensors"))
    needed = -there
    for store in pieces:
        needed += store[0].source.manifest.target_head.bytes
        needed += sum(piece.bytes for piece in store if not (link and piece.whole))
    free = shutil.disk_usage(existing_folder(out)).free
    if needed > free:
        message = f"needs {needed:,} bytes more, {free:,} are free"
        fix = "free space or choose another folder; --link copies no shard within one file system"
        raise problem_error(str(out), "store.no_room", message, fix)


def _take(piece: Piece, out: Path, name: str, link: bool) -> tuple[ShardInfo, str]:
    """Makes one shard, if it is not there; its entry, and how it came about."""
    path, layout = out / name, piece.source.manifest.layout
    if (
        path.is_file()
    ):  # under its final name, so it was whole; the size and the list of samples say that it is this one
        checksum = piece.shard.sha256 if piece.whole else sha256_file(path)
        shard = ShardInfo(name, piece.bytes, checksum, piece.samples)
        if not check_shard(out, shard, layout):
            return shard, "there already"
    if not piece.whole:
        return _write(piece, path, layout), "written"
    shard = replace(piece.shard, file=name)
    if link and _linked(piece.path, path):
        return shard, "linked"
    _copy(piece.source.folder, out, piece.shard, name)
    return shard, "copied"


def _write(piece: Piece, path: Path, layout: StoreLayout) -> ShardInfo:
    # A new checksum would make damage look whole: so the old one is checked first.
    raise_problems(check_file(piece.source.folder, piece.shard, layout), f"cannot take samples of {piece.path}")
    samples = [piece.source.reader.read(piece.first + place) for place in piece.places]
    checksum = write_tensor_file_atomic(path, *shard_content(samples, layout))
    return ShardInfo(path.name, path.stat().st_size, checksum, piece.samples)


def _copy(folder: Path, out: Path, file: FileInfo, name: str) -> None:
    """Copies a file of a store; refuses one whose bytes are not those that its manifest names."""
    path = folder / file.file

    def copy(temporary: Path) -> None:
        digest = hashlib.sha256()
        with readable(path):
            source = open(path, "rb")  # noqa: SIM115 (closed below)
        with source, open(temporary, "wb") as target:
            while chunk := _read(source.fileno(), path):
                digest.update(chunk)
                target.write(chunk)
        if f"sha256:{digest.hexdigest()}" != file.sha256:
            message = "its checksum is not the manifest's"
            raise problem_error(str(path), "store.checksum", message, _DAMAGED)

    write_atomic(out / name, copy)


def _read(descriptor: int, path: Path) -> bytes:
    with readable(path):
        return os.read(descriptor, _CHUNK_BYTES)


def _linked(source: Path, path: Path) -> bool:
    """Whether the file system could make a second name for this file."""
    path.unlink(missing_ok=True)
    try:
        os.link(source, path)
    except OSError:  # another file system, or one without links: the shard is copied, which names what is wrong
        return False
    return True


def _fingerprint(first: Piece) -> Fingerprint:
    """The fingerprint of a store that begins with this piece; its source's, if it holds that sample."""
    known = first.source.manifest.fingerprint
    if known is not None and known.sample in {sample.id for sample in first.samples}:
        return known
    samples = [first.source.reader.read(first.first + place) for place in first.places]
    return make_fingerprint(samples, first.source.manifest.layout)
