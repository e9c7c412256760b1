"""Which samples train, which are held out, and which have nothing to learn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from eagle3.config import TrainConfig
from eagle3.data.store import StoreReader
from eagle3.data.store_format import MANIFEST_FILE
from eagle3.errors import problem_error, raise_problems
from eagle3.files import digest_json, sha256_file


@dataclass(frozen=True)
class SampleSet:
    """Samples of a store, by index, each cut to `max_length` tokens."""

    reader: StoreReader
    indices: list[int]
    max_length: int

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sample, cut."""
        return [min(self.reader.samples[index].tokens, self.max_length) for index in self.indices]

    def ids(self, places: Sequence[int]) -> list[str]:
        """Sample ids of places in `indices`."""
        return [self.reader.samples[self.indices[place]].id for place in places]


@dataclass(frozen=True)
class Samples:
    """The training and held-out samples of a run.

    Attributes:
        train: at least one sample.
        heldout: None where nothing is held out.
        digest: `sha256:<hex>` of the stores' manifests, which hold a checksum of every shard.
        notes: what a user should know about them, a line each.
    """

    train: SampleSet
    heldout: SampleSet | None
    digest: str
    notes: list[str]


def select_samples(config: TrainConfig, reader: StoreReader) -> Samples:
    """Splits a store by the config's seed, or takes `eval_dataset` as the held-out samples.

    Raises:
        ProblemsError: nothing is supervised; or `eval_dataset` has another contract (every difference but the states'
            type is listed).
    """
    notes: list[str] = []
    usable = _usable(reader, config.max_length, notes)
    if config.eval_dataset is None:
        train, heldout_indices = _split(usable, config.eval_fraction, config.seed)
        heldout = SampleSet(reader, heldout_indices, config.max_length) if heldout_indices else None
    else:
        train = usable
        other = _open_eval_dataset(config, reader)
        heldout = SampleSet(other, _usable(other, config.max_length, notes), config.max_length)
        known = {reader.samples[index].id for index in train}
        if shared := sum(other.samples[index].id in known for index in heldout.indices):
            notes.append(f"{shared} of {len(heldout.indices)} held-out samples have the id of a training sample")
    notes.append(f"{len(train)} training samples, {len(heldout.indices) if heldout else 0} held out")
    digest = digest_json([_manifest_digest(reader), heldout and _manifest_digest(heldout.reader)])
    return Samples(SampleSet(reader, train, config.max_length), heldout, digest, notes)


def _usable(reader: StoreReader, max_length: int, notes: list[str]) -> list[int]:
    usable = [index for index in range(len(reader)) if _is_supervised(reader, index, max_length)]
    dropped, where = len(reader) - len(usable), str(reader.folder)
    if not usable:
        message = f"none of its {len(reader)} samples has a supervised token in the first {max_length}"
        raise problem_error(where, "train.nothing_supervised", message, "raise max_length, or extract other samples")
    if dropped:
        notes.append(
            f"{where}: {dropped} of {len(reader)} samples have no supervised token within {max_length}: dropped"
        )
    return usable


def _is_supervised(reader: StoreReader, index: int, max_length: int) -> bool:
    sample = reader.samples[index]
    if sample.tokens <= max_length:
        return sample.supervised > 0
    return bool(reader.read_tokens(index)[1][:max_length].any())


def _split(indices: list[int], fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """(training, held out); at least one is held out where `fraction` asks for any, and one is left to train on."""
    count = 0 if fraction == 0 else min(max(1, round(fraction * len(indices))), len(indices) - 1)
    heldout = set(Random(f"held out:{seed}").sample(indices, count))
    return [index for index in indices if index not in heldout], sorted(heldout)


def _open_eval_dataset(config: TrainConfig, reader: StoreReader) -> StoreReader:
    assert config.eval_dataset is not None
    other = StoreReader(Path(config.eval_dataset))
    mine, theirs = f"eval_dataset {config.eval_dataset}", f"dataset {config.dataset}"
    raise_problems(other.contract.compare(reader.contract, mine, theirs, any_dtype=True))
    return other


def _manifest_digest(reader: StoreReader) -> str:
    return sha256_file(reader.folder / MANIFEST_FILE)
