"""A ring: shards that a writer makes and a trainer consumes at the same time. What its files hold; docs/ring.md is the
rule.

Legend: V target vocab.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eagle3.data.store_format import (
    LAST_ROWS,
    MANIFEST_FILE,
    TARGET_HEAD_FILE,
    FileInfo,
    Manifest,
    SampleInfo,
    ShardInfo,
    shard_name,
)
from eagle3.data.store_layout import LastRows, StoreLayout
from eagle3.errors import Problem, problem_error, raise_problems
from eagle3.files import digest_json, parse_json_file, read_file
from eagle3.sealed import SEAL, check_seal
from eagle3.wiring.contract import WiringContract
from eagle3.wiring.dataset import RING_FILE
from eagle3.wiring.fingerprint_file import Fingerprint

__all__ = ["RING_FILE", "Ring", "RingPlan", "RingShard", "load_ring"]

FORMAT = "eagle3-ring"
FORMAT_VERSION = 1
COUNTS_FILE = "supervised_counts.safetensors"
WRITER_FILE = "writer.json"
READER_FILE = "reader.json"
WRITER_LOCK_FILE = "writer.lock"
READER_LOCK_FILE = "reader.lock"

_A_RING = "the plan of a ring"
_ENTRY_NAME = re.compile(r"shard-(\d{5,})\.json")
_RESTORE = "delete the ring's folder and begin it again"


@dataclass(frozen=True)
class RingShard:
    """A shard, made or not: what is known of it before the extraction.

    Attributes:
        epoch: that its samples are of, from 0.
        unit: shards of one unit are made together, so there must be room for all of them.
        bytes: size of its file.
        samples: places in the ring's list of samples, in the order of the rows.
    """

    epoch: int
    unit: int
    bytes: int
    samples: tuple[int, ...]


@dataclass(frozen=True)
class RingPlan:
    """All of a ring that is known before anything is extracted.

    Attributes:
        layout: what the states are, and how shards hold them.
        settings: whatever the samples and their order depend on (JSON values).
        target_config: the target's text config.
        max_bytes: most bytes of shards at a time.
        samples: of an epoch; each has a supervised token.
        shards: of all epochs, by number.
    """

    layout: StoreLayout
    settings: dict[str, Any]
    target_config: dict[str, Any]
    max_bytes: int
    samples: tuple[SampleInfo, ...]
    shards: tuple[RingShard, ...]

    @property
    def contract(self) -> WiringContract:
        return self.layout.contract

    @property
    def epochs(self) -> int:
        return self.shards[-1].epoch + 1

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return max(sample.tokens for sample in self.samples)

    @cached_property
    def ends(self) -> list[int]:
        """Bytes of all shards up to each one, itself included, whether or not they are there."""
        return list(accumulate(shard.bytes for shard in self.shards))

    @cached_property
    def unit_ends(self) -> list[int]:
        """The last shard of each shard's unit."""
        last = {shard.unit: number for number, shard in enumerate(self.shards)}
        return [last[shard.unit] for shard in self.shards]

    def bytes_between(self, first: int, last: int) -> int:
        """Bytes of shards `first` to `last`, both included."""
        return self.ends[last] - (self.ends[first - 1] if first else 0)

    def infos(self, number: int) -> tuple[SampleInfo, ...]:
        """The samples of a shard, in the order of the rows."""
        return tuple(self.samples[place] for place in self.shards[number].samples)


@dataclass(frozen=True)
class Ring(RingPlan):
    """All of `ring.json`.

    Attributes:
        target_head: the file of the target's embedding, final norm and head.
        supervised_counts: the file of how often each token is supervised in an epoch, int64 [V].
        provenance: command line, versions, time; never compared.
    """

    target_head: FileInfo
    supervised_counts: FileInfo
    provenance: dict[str, Any]

    @classmethod
    def of(cls, plan: RingPlan, head: FileInfo, counts: FileInfo, provenance: dict[str, Any]) -> Self:
        values = {field.name: getattr(plan, field.name) for field in fields(RingPlan)}
        return cls(**values, target_head=head, supervised_counts=counts, provenance=provenance)

    @property
    def digest(self) -> str:
        """`sha256:<hex>` of all but provenance: two rings of one digest hold the same samples in the same order."""
        return digest_json({**self.to_dict(), "provenance": {}})

    def manifest(self, entries: Sequence[ShardInfo] = (), fingerprint: Fingerprint | None = None) -> Manifest:
        """The ring as a store that holds these shards, for what reads and checks stores."""
        return Manifest(self.layout, self.settings, self.target_config, self.target_head, fingerprint, tuple(entries))

    def entry(self, number: int, sha256: str) -> ShardInfo:
        """A shard that was made, as a store's manifest would list it."""
        return ShardInfo(shard_name(number), self.shards[number].bytes, sha256, self.infos(number))

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "contract": self.contract.to_dict(),
            "store_version": self.layout.version,
            LAST_ROWS: self.layout.last_rows,
            "settings": self.settings,
            "target_config": self.target_config,
            "target_head": vars(self.target_head),
            "supervised_counts": vars(self.supervised_counts),
            "max_bytes": self.max_bytes,
            "samples": [sample.to_dict() for sample in self.samples],
            "shards": [{**vars(shard), "samples": list(shard.samples)} for shard in self.shards],
            "provenance": self.provenance,
        }


def entry_name(number: int) -> str:
    """The file that makes a shard part of the ring: `{"bytes", "sha256"}`."""
    return f"shard-{number:05d}.json"


def entry_numbers(folder: Path) -> list[int]:
    """Numbers of the shards that the ring lists now, ascending."""
    found = (_ENTRY_NAME.fullmatch(path.name) for path in folder.iterdir())
    return sorted(int(match[1]) for match in found if match)


def load_ring(folder: Path) -> Ring:
    """Reads and checks `ring.json` alone.

    Raises:
        ProblemsError: kinds `ring.not_a_ring`, `ring.format`, `ring.format_version`, `ring.value` (every place is
            named), `contract.*`, `file.*` (`file.seal`: it was changed).
    """
    path = folder / RING_FILE
    if not path.exists() and (folder / MANIFEST_FILE).exists():
        fix = "train on it without --stream, or give the folder that `eagle3 extract --stream` fills"
        raise problem_error(str(folder), "ring.not_a_ring", "is a hidden-state store, not a ring", fix)
    raw, where = read_file(path, _A_RING), str(path)
    value = parse_json_file(raw, path, _A_RING)
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        found = value.get("format") if isinstance(value, dict) else type(value).__name__
        raise problem_error(where, "ring.format", f"format is {found!r}, expected {FORMAT!r}", _RESTORE)
    if value.get("format_version") != FORMAT_VERSION:
        message = f"has format version {value.get('format_version')!r}, this reader knows {FORMAT_VERSION}"
        raise problem_error(where, "ring.format_version", message, "use the eagle3 that wrote it, or begin it again")
    raise_problems(check_seal(raw, where))
    try:
        parsed = _RingModel.model_validate({key: item for key, item in value.items() if key != SEAL})
    except ValidationError as error:
        raise_problems(
            _problem(where, f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}") for detail in error.errors()
        )
        raise AssertionError from error
    contract = WiringContract.from_dict(parsed.contract, f"{where}: contract")
    ring = Ring(
        layout=StoreLayout(contract, parsed.last_hidden_rows, parsed.store_version),
        settings=parsed.settings,
        target_config=parsed.target_config,
        max_bytes=parsed.max_bytes,
        samples=tuple(SampleInfo(**vars(sample)) for sample in parsed.samples),
        shards=tuple(RingShard(**vars(shard)) for shard in parsed.shards),
        target_head=FileInfo(**vars(parsed.target_head)),
        supervised_counts=FileInfo(**vars(parsed.supervised_counts)),
        provenance=parsed.provenance,
    )
    raise_problems(_problem(where, message) for message in _plan_faults(ring))
    return ring


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


_Count = Annotated[int, Field(ge=0, lt=2**63, strict=True)]
_Positive = Annotated[int, Field(gt=0, lt=2**63, strict=True)]
_Text = Annotated[str, Field(min_length=1, strict=True)]


class _FileModel(_Model):
    file: _Text
    bytes: _Positive
    sha256: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]


class _SampleModel(_Model):
    id: _Text
    tokens: _Positive
    supervised: _Positive


class _ShardModel(_Model):
    epoch: _Count
    unit: _Count
    bytes: _Positive
    samples: Annotated[tuple[_Count, ...], Field(min_length=1)]


class _RingModel(_Model):
    format: str
    format_version: int
    contract: dict[str, Any]
    store_version: Literal[2, 3]
    last_hidden_rows: LastRows
    settings: dict[str, Any]
    target_config: dict[str, Any]
    target_head: _FileModel
    supervised_counts: _FileModel
    max_bytes: _Positive
    samples: Annotated[tuple[_SampleModel, ...], Field(min_length=1)]
    shards: Annotated[tuple[_ShardModel, ...], Field(min_length=1)]
    provenance: dict[str, Any]


def _problem(where: str, message: str) -> Problem:
    return Problem(where, "ring.value", message, _RESTORE)


def _plan_faults(ring: Ring) -> list[str]:
    """What the plan says that no writer writes."""
    faults = []
    if (ring.target_head.file, ring.supervised_counts.file) != (TARGET_HEAD_FILE, COUNTS_FILE):
        faults.append(f"the files of head and counts are not called {TARGET_HEAD_FILE} and {COUNTS_FILE}")
    if len({sample.id for sample in ring.samples}) < len(ring.samples):
        faults.append("samples: an id is listed twice")
    for sample in ring.samples:
        if sample.supervised > sample.tokens:
            faults.append(f"sample {sample.id!r} has {sample.supervised} supervised of {sample.tokens} tokens")
    order = [(shard.epoch, shard.unit) for shard in ring.shards]
    steps = [(later[0] - epoch, later[1] - unit) for (epoch, unit), later in pairwise(order)]
    if order[0] != (0, 0) or not set(steps) <= {(0, 0), (0, 1), (1, 1)}:
        faults.append("shards: epochs or units are not numbered through from 0")
    for epoch in range(ring.epochs):
        places = sorted(place for shard in ring.shards if shard.epoch == epoch for place in shard.samples)
        if places != list(range(len(ring.samples))):
            faults.append(f"shards: epoch {epoch} does not hold each sample exactly once")
    return faults
