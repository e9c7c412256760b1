"""A hidden-state store in an object store, read through a local cache.

The cache holds, for each sample that was fetched, a shard of that sample alone, and for each shard a table of its
samples' tokens, so that everything behind reads as from a local store.

Legend: T tokens of a shard, t of a sample.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Lock

import torch

from eagle3.data.open_shard import OpenShard
from eagle3.data.piece_cache import Piece, PieceCache
from eagle3.data.remote_files import (
    PUSH_ELSEWHERE,
    at_url,
    check_listing,
    check_unchanged,
    copy_bytes,
    fetch_whole,
    read_remote_manifest,
)
from eagle3.data.remote_folder import RemoteFolder
from eagle3.data.store import Place, StoreReader
from eagle3.data.store_check import INCOMPLETE, check_header, check_target_head, check_whole
from eagle3.data.store_format import (
    MANIFEST_FILE,
    Manifest,
    ShardInfo,
    sample_rows,
)
from eagle3.data.store_layout import goes_with_last
from eagle3.data.store_sample import StoredSample, header_metadata
from eagle3.data.tensor_file import file_header
from eagle3.errors import Problem, ProblemsError, problem_error, raise_problems
from eagle3.wiring.contract import WiringContract
from eagle3.wiring.fingerprint_check import check_stored_fingerprint
from eagle3.wiring.safetensors_header import Header, TensorInfo, parse_header, read_header

_DISK = ("disk.", "store.unreadable")
_TOKEN_TENSORS = ("input_ids", "loss_mask")
_FIRST_BYTES = 64 << 10
_LENGTH_BYTES = 8
_HEADER_BYTES = 8 << 10


class RemoteStoreReader(StoreReader):
    """As `StoreReader`, for a store that lies elsewhere. Opening it takes the manifest, one listing, the target head
    and the fingerprint's sample; a shard's header is checked when its first sample is read.

    Args:
        remote: the store's folder.
        cache: what it is read through.
        expected: the contract that the caller needs.
        allow_incomplete: take a store whose extraction has not ended.

    Raises:
        ProblemsError: kinds `remote.*`, `cache.*`, `disk.*`, and those of `StoreReader`.
    """

    keeps_open = 0

    def __init__(
        self,
        remote: RemoteFolder,
        cache: PieceCache,
        expected: WiringContract | None = None,
        allow_incomplete: bool = False,
    ) -> None:
        self._remote, self._cache, self.name = remote, cache, remote.url
        raw, manifest = read_remote_manifest(remote)
        self._files = remote.list()
        problems = check_listing(remote, manifest, self._files)
        problems += check_whole(remote.url, manifest, expected)
        if allow_incomplete:
            problems = [problem for problem in problems if problem.kind != INCOMPLETE]
        title = f"cannot use the hidden states in {remote.url}"
        raise_problems(problems, title)
        store, version = cache_name(remote.url), hashlib.sha256(raw).hexdigest()[:16]
        cache.forget(store, keep=version)
        self._prefix = f"{store}/{version}"
        self.folder = cache.folder / self._prefix
        head = manifest.target_head
        cache.check_fits(head.bytes + len(raw), "manifest and target head", remote.url)
        cache.hold(
            Piece(
                f"{self._prefix}/{MANIFEST_FILE}",
                remote.where(MANIFEST_FILE),
                lambda: len(raw),
                lambda path: _write(path, raw),
                lambda path: path.read_bytes() == raw,
            )
        )
        fetch = partial(fetch_whole, remote, head, self._files[head.file])
        name = f"{self._prefix}/{head.file}"
        cache.hold(Piece(name, remote.where(head.file), lambda: head.bytes, fetch, _is_safetensors))
        raise_problems(self._elsewhere(check_target_head(self.folder, manifest)), title)
        self._headers: dict[str, Header] = {}
        self._header_locks: dict[str, Lock] = {}
        self._take(manifest)
        self._origins: list[tuple[ShardInfo, int]] = []
        for shard in manifest.shards:
            self._origins += [(shard, place) for place in range(len(shard.samples))]
        self._places = [
            Place(_sample_file(*at), *sample_rows([at[0].samples[at[1]]], self.layout)[0]) for at in self._origins
        ]
        self._open = self.open_shard
        raise_problems(self._check_fingerprint(manifest), title)

    def open_shard(self, file: str) -> OpenShard:
        """A file of the cache, which is held meanwhile."""
        return OpenShard(self.folder / file)

    def read(self, index: int) -> StoredSample:
        """Sample `index` (0-based, manifest order)."""
        with self.held(index):
            return super().read(index)

    def read_tokens(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """input_ids int32 [t] and loss_mask bool [t] of sample `index`, without fetching its states."""
        if self._piece(index).name in self._cache:
            with self.held(index):
                return super().read_tokens(index)
        shard, place = self._origins[index]
        rows = sample_rows(shard.samples[: place + 1], self.layout)[place][0]
        with self._cache.held(self._table(shard, self.where(index))) as path:
            table = OpenShard(path)
            input_ids, loss_mask = (table.rows(name, rows) for name in _TOKEN_TENSORS)
        input_ids = input_ids.int()
        self._check_tokens(index, input_ids, loss_mask)
        return input_ids, loss_mask.bool()

    @contextmanager
    def ahead(self, groups: Sequence[Sequence[int]], tokens_only: bool = False) -> Iterator[Callable[[int], None]]:
        """As that of `StoreReader`: fetches these samples as far as the cache has room.

        Raises:
            ProblemsError: kind `cache.too_small`, two groups that follow each other do not fit.
        """
        if tokens_only:
            used = (self._origins[index][0] for group in groups for index in group)
            shards = list({shard.file: shard for shard in used}.values())
            with self._cache.ahead([self._table(shard).name for shard in shards], lambda at: self._table(shards[at])):
                yield lambda count: None
            return
        sizes = [sum(map(self._about, group)) for group in groups]
        most = max((sum(sizes[at : at + 2]) for at in range(len(sizes))), default=0)
        self._cache.check_fits(most, "the samples of a step and of the next one", self.name)
        order = [index for group in groups for index in group]
        left = iter(groups)
        with self._cache.ahead([self._piece(index).name for index in order], lambda at: self._piece(order[at])) as done:

            def groups_done(count: int) -> None:
                done(sum(len(next(left)) for _ in range(count)))

            yield groups_done

    @contextmanager
    def held(self, index: int) -> Iterator[None]:
        """While it is entered, the sample's own shard is in the cache. Problems of that copy name the sample."""
        with self._cache.held(self._piece(index)) as path:
            try:
                yield
            except ProblemsError as error:
                where = self.where(index)
                raise ProblemsError(
                    [
                        dataclasses.replace(
                            item,
                            where=where,
                            message=f"its copy {path}: {item.message}",
                            fix=item.fix if item.kind.startswith(_DISK) else self._mend,
                        )
                        if item.where.startswith(str(path))
                        else item
                        for item in error.problems
                    ]
                ) from error

    @property
    def _mend(self) -> str:
        return (
            f"remove {self._cache.folder}, in which the copy may be damaged, and run again; "
            f"if that is no help, {PUSH_ELSEWHERE}"
        )

    def where(self, index: int) -> str:
        """URL of the shard, and id, of sample `index`, for messages."""
        shard, place = self._origins[index]
        return f"{self._remote.where(shard.file)}: sample {shard.samples[place].id!r}"

    def _piece(self, index: int) -> Piece:
        """The shard that holds this sample alone."""
        shard, place = self._origins[index]
        name = f"{self._prefix}/{_sample_file(shard, place)}"
        return self._part(name, self.where(index), shard, place)

    def _table(self, shard: ShardInfo, where: str | None = None) -> Piece:
        """Token ids and loss masks of all samples of a shard. `where` is what problems name; default: the shard."""
        name = f"{self._prefix}/tokens-{shard.file}"
        return self._part(name, where or self._remote.where(shard.file), shard, None)

    def _part(self, name: str, where: str, shard: ShardInfo, place: int | None) -> Piece:
        size, fetch = partial(self._size, shard, place, where), partial(self._fetch, shard, place, where)
        return Piece(name, where, size, fetch, _is_safetensors, kept=place is None)

    def _about(self, index: int) -> int:
        """Bytes of a sample in the cache, without asking for its header."""
        shard, place = self._origins[index]
        return shard.bytes * shard.samples[place].tokens // shard.tokens + _HEADER_BYTES

    def _size(self, shard: ShardInfo, place: int | None, where: str) -> int:
        head, stretches = self._content(shard, place, where)
        return len(head) + sum(end - begin for begin, end in stretches)

    def _fetch(self, shard: ShardInfo, place: int | None, where: str, path: Path) -> None:
        """Writes a file of one sample, or of all samples' tokens, from byte ranges of the shard."""
        head, stretches = self._content(shard, place, where)
        with open(path, "wb") as target:
            target.write(head)
            for begin, end in stretches:
                copy_bytes(self._remote, shard.file, begin, end, target, where)
        check_unchanged(self._remote, shard.file, self._files[shard.file], where)

    def _content(self, shard: ShardInfo, place: int | None, where: str) -> tuple[bytes, list[tuple[int, int]]]:
        """The header of such a file, and the stretches of the shard that follow it."""
        header = self._header(shard, where)
        names = sorted(header.tensors, key=lambda name: header.tensors[name].begin)
        layout: dict[str, tuple[str, tuple[int, ...]]] = {}
        stretches: list[tuple[int, int]] = []
        for name in names if place is not None else [name for name in names if name in _TOKEN_TENSORS]:
            info = header.tensors[name]
            first, rows = self._stretch(shard, place, name, info)
            row_bytes = (info.end - info.begin) // max(info.shape[0], 1)
            begin = header.data_start + info.begin + first * row_bytes
            if stretches and stretches[-1][1] == begin:  # all rows of the tensor before it, and these follow
                begin = stretches.pop()[0]
            stretches.append((begin, header.data_start + info.begin + (first + rows) * row_bytes))
            layout[name] = (info.dtype, (rows, *info.shape[1:]))
        samples = shard.samples if place is None else shard.samples[place : place + 1]
        return file_header(layout, header_metadata(samples, self.layout.version)), stretches

    def _stretch(self, shard: ShardInfo, place: int | None, name: str, info: TensorInfo) -> tuple[int, int]:
        """(first row, rows) of a sample in a tensor of its shard; without a place, of all samples."""
        if place is None:
            return 0, info.shape[0]
        rows, last = sample_rows(shard.samples[: place + 1], self.layout)[place]
        chosen = last if goes_with_last(name) else rows
        return chosen.start, chosen.stop - chosen.start

    def _header(self, shard: ShardInfo, reader: str) -> Header:
        """The shard's header, checked.

        Args:
            reader: what it is read for, named where it cannot be read.

        Raises:
            ProblemsError: what `check_header` finds.
        """
        with self._header_locks.setdefault(shard.file, Lock()):
            if shard.file not in self._headers:
                self._headers[shard.file] = self._read_header(shard, reader)
            return self._headers[shard.file]

    def _read_header(self, shard: ShardInfo, reader: str) -> Header:
        where = self._remote.where(shard.file)
        first = self._remote.read(shard.file, 0, min(_FIRST_BYTES, shard.bytes), reader)
        length = int.from_bytes(first[:_LENGTH_BYTES], "little")
        if _LENGTH_BYTES + length > shard.bytes:
            raise problem_error(where, "safetensors.format", "is not a safetensors file", PUSH_ELSEWHERE)
        raw = first + self._remote.read(shard.file, len(first), max(len(first), _LENGTH_BYTES + length), reader)
        header = parse_header(raw[_LENGTH_BYTES : _LENGTH_BYTES + length], shard.bytes, where)
        raise_problems(at_url(check_header(header, shard, self.layout, where)))
        return dataclasses.replace(header, metadata={})

    def _check_fingerprint(self, manifest: Manifest) -> list[Problem]:
        """Against its sample, which is fetched for it."""
        value, known = manifest.to_dict(), manifest.fingerprint
        index = next((at for at, info in enumerate(self.samples) if known and info.id == known.sample), None)
        if index is None:
            return check_stored_fingerprint(self.folder, value, self.contract)
        with self.held(index):
            info = self.samples[index]
            value["shards"] = [{"file": self._places[index].file, "samples": [dataclasses.asdict(info)]}]
            found = check_stored_fingerprint(self.folder, value, self.contract)
        return self._elsewhere(found)

    def _elsewhere(self, problems: Sequence[Problem]) -> list[Problem]:
        """Problems that name the store, not its copies in the cache."""
        return at_url(
            dataclasses.replace(item, where=item.where.replace(str(self.folder), self.name)) for item in problems
        )


def _sample_file(shard: ShardInfo, place: int) -> str:
    return f"{shard.file.removesuffix('.safetensors')}.{place:05d}.safetensors"


def cache_name(url: str) -> str:
    """A folder's name for a store: readable, and its own."""
    readable = re.sub(r"[^A-Za-z0-9]+", "-", url.split("/")[-1])[:40]
    return f"{readable}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"


def _is_safetensors(path: Path) -> bool:
    try:
        read_header(path)
    except ProblemsError:  # a copy that is damaged is no loss: it is fetched again
        return False
    return True


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
