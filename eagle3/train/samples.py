"""Which samples train, which are held out, and which have nothing to learn from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

import torch

from eagle3.config import TrainConfig
from eagle3.data.batch_plan import BatchPlan, order_version
from eagle3.data.dealing import Window
from eagle3.data.open_reader import open_reader
from eagle3.data.ring_reader import RingReader
from eagle3.data.ring_windows import RingWindows
from eagle3.data.store import StoreReader
from eagle3.data.store_format import MANIFEST_FILE, SampleInfo
from eagle3.data.vocab_count import count_supervised
from eagle3.draft.cost import Cost
from eagle3.errors import problem_error, raise_problems
from eagle3.files import digest_json, sha256_file
from eagle3.train.feed import Dataset, Feed, StoreFeed
from eagle3.train.ring_feed import RingSamples, ring_notes


class TrainSamples(Protocol):
    """What a run trains on."""

    @property
    def reader(self) -> Dataset:
        """Where they lie."""
        ...

    def count_supervised(self) -> torch.Tensor:
        """int64 [V]: occurrences of each target id at supervised positions."""
        ...

    def feed(self, config: TrainConfig, world_size: int, cost: Cost) -> Feed:
        """The windows of a run with so many ranks, balanced by what samples cost."""
        ...

    def windows(self, config: TrainConfig, world_size: int, cost: Cost) -> list[Window]:
        """Those of a store's first epoch, which differ from other epochs' only by which rows of like size meet; all of
        a ring."""
        ...

    def info(self, place: int) -> SampleInfo:
        """A sample of a window; its tokens, and the most that can be supervised of them, as far as they are used."""
        ...

    def loss_mask(self, place: int) -> torch.Tensor | None:
        """bool [T] of a sample, cut; None while that is not known, in a ring."""
        ...


@dataclass(frozen=True)
class SampleSet:
    """Samples of a store, by index, each cut to `max_length` tokens.

    Attributes:
        cut: supervised tokens of those that are longer, within `max_length`, by index.
    """

    reader: StoreReader
    indices: list[int]
    max_length: int
    cut: Mapping[int, int] = field(default_factory=dict)

    def count_supervised(self) -> torch.Tensor:
        """See `TrainSamples`; counted from the store itself, never from a cache."""
        return count_supervised(self.reader, self.indices)

    def feed(self, config: TrainConfig, world_size: int, cost: Cost) -> StoreFeed:
        """See `TrainSamples`."""
        infos = [self.info(place) for place in range(len(self.indices))]
        plan = BatchPlan(
            seed=config.seed,
            lengths=[info.tokens for info in infos],
            max_length=self.max_length,
            batch_size=config.batch_size,
            accumulate=config.accumulate,
            world_size=world_size,
            pack=config.packs,
            row_tokens=config.batch_tokens,
            costs=[cost.sample(info.tokens, info.supervised) for info in infos],
        )
        most = -(-(config.max_steps or config.epochs * plan.steps_per_epoch) // plan.steps_per_epoch)
        supervised = [info.supervised for info in infos]
        return StoreFeed(self.reader, self.indices, plan, min(config.epochs, most), supervised)

    def windows(self, config: TrainConfig, world_size: int, cost: Cost) -> list[Window]:
        """See `TrainSamples`."""
        return self.feed(config, world_size, cost).epoch(0)

    def info(self, place: int) -> SampleInfo:
        """See `TrainSamples`."""
        index = self.indices[place]
        sample = self.reader.samples[index]
        supervised = self.cut.get(index, min(sample.supervised, self.max_length))
        return SampleInfo(sample.id, min(sample.tokens, self.max_length), supervised)

    def loss_mask(self, place: int) -> torch.Tensor | None:
        """See `TrainSamples`."""
        return self.reader.read_tokens(self.indices[place])[1][: self.max_length]


@dataclass(frozen=True)
class Samples:
    """The training and held-out samples of a run.

    Attributes:
        train: at least one sample.
        heldout: None where nothing is held out.
        digest: `sha256:<hex>` of the stores' manifests, which hold a checksum of every shard, or of the ring's plan.
        notes: what a user should know about them, a line each.
    """

    train: TrainSamples
    heldout: SampleSet | None
    digest: str
    notes: list[str]

    @property
    def have_argmax(self) -> bool:
        """Whether all of them have the target's greedy tokens, so that nothing needs all of its head."""
        readers = [self.train.reader] if self.heldout is None else [self.train.reader, self.heldout.reader]
        return all(reader.layout.has_argmax for reader in readers)


def order_of(config: TrainConfig) -> int:
    """The version of the order in which a run has its samples; a ring's has never changed."""
    return order_version(config.packs and config.ring is None)


def select_samples(config: TrainConfig, reader: StoreReader) -> Samples:
    """Splits a store by the config's seed, or takes `eval_dataset` as the held-out samples.

    Raises:
        ProblemsError: nothing is supervised; or `eval_dataset` has another contract (every difference but the states'
            type is listed).
    """
    notes: list[str] = []
    usable, cut = _usable(reader, config.max_length, notes)
    if config.eval_dataset is None:
        train, heldout_indices = _split(usable, config.eval_fraction, config.seed)
        heldout = SampleSet(reader, heldout_indices, config.max_length, cut) if heldout_indices else None
    else:
        train = usable
        heldout = _heldout_store(config, reader, {reader.samples[index].id for index in train}, notes)
    notes.append(f"{len(train)} training samples, {len(heldout.indices) if heldout else 0} held out")
    digest = digest_json([_manifest_digest(reader), heldout and _manifest_digest(heldout.reader)])
    return Samples(SampleSet(reader, train, config.max_length, cut), heldout, digest, notes)


def select_ring_samples(config: TrainConfig, reader: RingReader, windows: RingWindows) -> Samples:
    """All samples of a ring; held-out ones only of `eval_dataset`.

    Raises:
        ProblemsError: as `select_samples`.
    """
    notes = ring_notes(config, windows)
    heldout = None
    if config.eval_dataset is not None:
        heldout = _heldout_store(config, reader, {sample.id for sample in reader.ring.samples}, notes)
        notes.append(f"{len(heldout.indices)} samples held out")
    digest = digest_json([reader.ring.digest, heldout and _manifest_digest(heldout.reader)])
    return Samples(RingSamples(reader, windows), heldout, digest, notes)


def _heldout_store(config: TrainConfig, reader: Dataset, known: set[str], notes: list[str]) -> SampleSet:
    """The usable samples of `eval_dataset`; `known` are the ids of the training samples."""
    other = _open_eval_dataset(config, reader)
    usable, cut = _usable(other, config.max_length, notes)
    heldout = SampleSet(other, usable, config.max_length, cut)
    if shared := sum(other.samples[index].id in known for index in heldout.indices):
        notes.append(f"{shared} of {len(heldout.indices)} held-out samples have the id of a training sample")
    return heldout


def _usable(reader: StoreReader, max_length: int, notes: list[str]) -> tuple[list[int], dict[int, int]]:
    """The samples with something supervised; how much of it those have that are cut."""
    long = [index for index in range(len(reader)) if reader.samples[index].tokens > max_length]
    with reader.ahead([[index] for index in long], tokens_only=True):
        cut = {index: int(reader.read_tokens(index)[1][:max_length].sum()) for index in long}
    usable = [index for index in range(len(reader)) if cut.get(index, reader.samples[index].supervised)]
    dropped, where = len(reader) - len(usable), reader.name
    if not usable:
        message = f"none of its {len(reader)} samples has a supervised token in the first {max_length}"
        raise problem_error(where, "train.nothing_supervised", message, "raise max_length, or extract other samples")
    if dropped:
        notes.append(
            f"{where}: {dropped} of {len(reader)} samples have no supervised token within {max_length}: dropped"
        )
    return usable, cut


def _split(indices: list[int], fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """(training, held out); at least one is held out where `fraction` asks for any, and one is left to train on."""
    count = 0 if fraction == 0 else min(max(1, round(fraction * len(indices))), len(indices) - 1)
    heldout = set(Random(f"held out:{seed}").sample(indices, count))
    return [index for index in indices if index not in heldout], sorted(heldout)


def _open_eval_dataset(config: TrainConfig, reader: Dataset) -> StoreReader:
    assert config.eval_dataset is not None
    other = open_reader(config.eval_dataset, config.cache)
    mine, theirs = f"eval_dataset {config.eval_dataset}", f"dataset {config.dataset}"
    raise_problems(other.contract.compare(reader.contract, mine, theirs, any_dtype=True))
    return other


def _manifest_digest(reader: StoreReader) -> str:
    return sha256_file(reader.folder / MANIFEST_FILE)
