"""The hidden-state store: a reader that opens shards when they are needed; the writer is in `store_writer`.

Legend: T tokens of a sample, H target hidden, V target vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Self

import torch
from safetensors.torch import load_file

from eagle3.data.open_shard import OpenShard, naming
from eagle3.data.store_check import INCOMPLETE, check_shard, check_store
from eagle3.data.store_format import TARGET_HEAD_FILE, Manifest, SampleInfo, load_manifest, sample_rows
from eagle3.data.store_layout import goes_with_last
from eagle3.data.store_sample import StoredSample
from eagle3.data.store_verify import verify
from eagle3.data.store_writer import StoreWriter
from eagle3.draft.states import dequantize
from eagle3.errors import problem_error, raise_problems
from eagle3.wiring.contract import WiringContract

__all__ = ["StoreReader", "StoreWriter", "StoredSample", "verify"]

_OPEN_SHARDS = 32
_OPEN_FILES = 64


class Place(NamedTuple):
    """A sample's shard, its rows there, and its rows of the last hidden states."""

    file: str
    rows: slice
    last: slice


class StoreReader:
    """A store that is whole. Opening it reads the manifest and each file's header; states are read when asked for.

    `RemoteStoreReader` is the same for a store at a URL; `eagle3.data.open_reader.open_reader` gives the right one.

    Attributes:
        folder: where its manifest and target head lie.
        name: the folder or the URL, for messages.
        keeps_open: files that a consumer may keep open.

    Args:
        folder: of the store.
        expected: the contract that the caller needs.
        allow_incomplete: take a store whose extraction has not ended.

    Raises:
        ProblemsError: anything that `eagle3.data.store_check.check_store` finds, all of it.
    """

    keeps_open = _OPEN_FILES

    def __init__(
        self, folder: Path | str, expected: WiringContract | None = None, allow_incomplete: bool = False
    ) -> None:
        self.folder, self.name = Path(folder), str(folder)
        manifest = load_manifest(self.folder)
        problems = check_store(self.folder, manifest, expected)
        if allow_incomplete:
            problems = [problem for problem in problems if problem.kind != INCOMPLETE]
        raise_problems(problems, f"cannot use the hidden states in {folder}")
        self._take(manifest)

    @classmethod
    def of_manifest(cls, folder: Path, manifest: Manifest) -> Self:
        """What a manifest lists, as it is: the caller has checked the files."""
        reader = cls.__new__(cls)
        reader.folder, reader.name = folder, str(folder)
        reader._take(manifest)
        return reader

    def _take(self, manifest: Manifest) -> None:
        self.contract = manifest.contract
        self.layout = manifest.layout
        self.settings = manifest.settings
        self.target_config = manifest.target_config
        self.fingerprint = manifest.fingerprint
        self.samples: list[SampleInfo] = []
        self._places: list[Place] = []
        for shard in manifest.shards:
            self.samples += shard.samples
            self._places += [Place(shard.file, *rows) for rows in sample_rows(shard.samples, manifest.layout)]
        self._by_name = {shard.file: shard for shard in manifest.shards}
        self._open: Callable[[str], OpenShard] = lru_cache(maxsize=_OPEN_SHARDS)(self.open_shard)

    def __len__(self) -> int:
        return len(self.samples)

    @contextmanager
    def ahead(self, groups: Sequence[Sequence[int]], tokens_only: bool = False) -> Iterator[Callable[[int], None]]:
        """Says what will be read while the block runs, so that a store elsewhere can fetch it beforehand.

        Args:
            groups: indices of samples, in order; those of a group are read together.
            tokens_only: their states are not read.

        Yields:
            `done(count)`: so many more groups have been read.
        """
        del groups, tokens_only
        yield lambda count: None

    def held(self, index: int) -> AbstractContextManager[object]:
        """While it is entered, the file that `place` names is there."""
        del index
        return nullcontext()

    def read(self, index: int) -> StoredSample:
        """Sample `index` (0-based, manifest order); fp8 states come as bfloat16.

        Raises:
            ProblemsError: as `read_tokens`.
        """
        aux, last = self._rows(index, "aux_hidden_states"), self._rows(index, "last_hidden_states")
        if self.layout.scaled:
            slots = aux.unflatten(1, (-1, self.contract.hidden_size))
            aux = dequantize(slots, self._rows(index, "aux_scales")).flatten(1)
            last = dequantize(last, self._rows(index, "last_scales"))
        argmax = self._rows(index, "target_argmax").int() if self.layout.has_argmax else None
        self.check_argmax(index, argmax)
        info = self.samples[index]
        return StoredSample(info.id, *self.read_tokens(index), aux, last, argmax, info.source)

    def read_tokens(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """input_ids int32 [T] and loss_mask bool [T] of sample `index`, without its states.

        Raises:
            ProblemsError: they cannot be; or as `open_shard` and `OpenShard.read`, with the sample's id.
        """
        input_ids = self._rows(index, "input_ids").int()
        loss_mask = self._rows(index, "loss_mask")
        self._check_tokens(index, input_ids, loss_mask)
        return input_ids, loss_mask.bool()

    def place(self, index: int) -> Place:
        """Where sample `index` is."""
        return self._places[index]

    def where(self, index: int) -> str:
        """Shard and id of sample `index`, for messages."""
        return f"{self.folder / self._places[index].file}: sample {self.samples[index].id!r}"

    def open_shard(self, file: str) -> OpenShard:
        """A shard by its name, which must still be what the manifest lists.

        Raises:
            ProblemsError: kinds `store.shard_*`, `store.sample_*`, `store.unreadable`.
        """
        raise_problems(check_shard(self.folder, self._by_name[file], self.layout))
        return OpenShard(self.folder / file)

    @property
    def _mend(self) -> str:
        """What to do about a shard that is damaged."""
        return "run `eagle3 data repair`, then `eagle3 extract` again"

    def target_head(self) -> dict[str, torch.Tensor]:
        """`embed_tokens.weight` [V, H], `norm.weight` [H], and `lm_head.weight` [V, H] (the embedding, if tied)."""
        tensors = load_file(self.folder / TARGET_HEAD_FILE)
        return {"lm_head.weight": tensors["embed_tokens.weight"], **tensors}

    def check_argmax(self, index: int, argmax: torch.Tensor | None) -> None:
        """Refuses greedy tokens of sample `index` that are outside the vocabulary, which would fail far from here.

        Args:
            argmax: [n] of a type that has a least and a greatest, or None.

        Raises:
            ProblemsError: kind `store.ids_out_of_range`.
        """
        if (
            argmax is not None
            and len(argmax)
            and not 0 <= int(argmax.min()) <= int(argmax.max()) < self.contract.vocab_size
        ):
            message = f"has token ids outside 0 to {self.contract.vocab_size - 1} in its target_argmax: it is damaged"
            raise problem_error(self.where(index), "store.ids_out_of_range", message, self._mend)

    def _check_tokens(self, index: int, input_ids: torch.Tensor, loss_mask: torch.Tensor) -> None:
        """An id outside the vocabulary would fail far from here, on a GPU without saying where; a wrong mask would pair
        tokens with last hidden states of others.
        """
        fix = self._mend
        if int(input_ids.min()) < 0 or int(input_ids.max()) >= self.contract.vocab_size:
            message = f"has token ids outside 0 to {self.contract.vocab_size - 1}: the shard is damaged"
            raise problem_error(self.where(index), "store.ids_out_of_range", message, fix)
        found, listed = int(loss_mask.sum(dtype=torch.int64)), self.samples[index].supervised
        if found != listed or int(loss_mask.max()) > 1:
            message = f"has {found} in its loss mask, the manifest lists {listed} supervised tokens: one is damaged"
            raise problem_error(self.where(index), "store.loss_mask", message, fix)

    def _rows(self, index: int, name: str) -> torch.Tensor:
        place = self._places[index]
        with naming(self.samples[index].id):
            return self._open(place.file).rows(name, place.last if goes_with_last(name) else place.rows)
