"""Hidden-state store: what `manifest.json` and a shard's header hold. docs/hidden-state-format.md is the rule."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from eagle3.data.store_layout import VERSIONS, LastRows, StoreLayout
from eagle3.errors import Problem, ProblemsError, problem_error, raise_problems
from eagle3.files import parse_json_file, read_file, refuse_url, write_json_atomic
from eagle3.sealed import SEAL, check_seal, write_sealed
from eagle3.wiring.contract import WiringContract
from eagle3.wiring.dataset import RING_FILE
from eagle3.wiring.fingerprint_file import Fingerprint
from eagle3.wiring.layers import is_int

FORMAT = "eagle3-hidden-states"
MANIFEST_FILE = "manifest.json"
TARGET_HEAD_FILE = "target_head.safetensors"
LOCK_FILE = "writer.lock"
COMMIT_LOCK_FILE = "commit.lock"
PROCESS_LOCK_FILES = "process-*.lock"
METADATA_KEY = "eagle3"
LAST_ROWS = "last_hidden_rows"
"""Key of the manifest that says for which tokens there are last hidden states (not in version 1: for all)."""

_A_MANIFEST = "the manifest of a hidden-state store"
_SHARD_NAME = re.compile(r"shard-\d{5,}\.safetensors")
_SHA256 = re.compile(r"sha256:[0-9a-f]{64}")
_RESTORE = "restore the folder from a copy, or extract again into an empty folder"


@dataclass(frozen=True, slots=True)
class SampleInfo:
    """One sample as the manifest lists it: its id, length and supervised positions (both in tokens), and where its
    prompt comes from, if that is known."""

    id: str
    tokens: int
    supervised: int
    source: str | None = None

    def to_dict(self) -> dict[str, Any]:
        known = {"id": self.id, "tokens": self.tokens, "supervised": self.supervised}
        return known if self.source is None else {**known, "source": self.source}


@dataclass(frozen=True)
class FileInfo:
    """A file of the store: name inside the folder, size in bytes, `sha256:<hex>`."""

    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class ShardInfo(FileInfo):
    """A shard and the samples in it, in the order of their rows."""

    samples: tuple[SampleInfo, ...]

    @property
    def tokens(self) -> int:
        return sum(sample.tokens for sample in self.samples)

    @property
    def supervised(self) -> int:
        return sum(sample.supervised for sample in self.samples)

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "tokens": self.tokens, "samples": [sample.to_dict() for sample in self.samples]}


@dataclass(frozen=True)
class Manifest:
    """All of `manifest.json`."""

    layout: StoreLayout
    settings: dict[str, Any]
    target_config: dict[str, Any]
    target_head: FileInfo
    fingerprint: Fingerprint | None = None
    shards: tuple[ShardInfo, ...] = ()
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def contract(self) -> WiringContract:
        return self.layout.contract

    def to_dict(self) -> dict[str, Any]:
        last_rows = {} if self.layout.version == 1 else {LAST_ROWS: self.layout.last_rows}
        return {
            "format": FORMAT,
            "format_version": self.layout.version,
            "contract": self.contract.to_dict(),
            **last_rows,
            "settings": self.settings,
            "target_config": self.target_config,
            "target_head": vars(self.target_head),
            "fingerprint": None if self.fingerprint is None else self.fingerprint.to_dict(),
            "shards": [shard.to_dict() for shard in self.shards],
            "provenance": self.provenance,
        }


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def process_lock_file(index: int) -> str:
    return PROCESS_LOCK_FILES.replace("*", f"{index:05d}")


SAMPLE_COUNT = "sample_count"
"""Setting that says how many samples a store has when it is complete."""


def is_shard_name(name: str) -> bool:
    return _SHARD_NAME.fullmatch(name) is not None


def shard_files(folder: Path) -> list[Path]:
    """Every file in the folder that has a shard's name, listed in the manifest or not."""
    names = sorted(path.name for path in folder.iterdir())  # paths compare far slower
    return [folder / name for name in names if is_shard_name(name)]


def shard_metadata(samples: Iterable[SampleInfo], version: int) -> dict[str, Any]:
    """The JSON object under `METADATA_KEY` in a shard's header."""
    listed = [{"id": sample.id, "tokens": sample.tokens} for sample in samples]
    return {"format": FORMAT, "format_version": version, "samples": listed}


def sample_rows(samples: Iterable[SampleInfo], layout: StoreLayout) -> list[tuple[slice, slice]]:
    """Each sample's rows in its shard: of what is there for every token, and of the last hidden states."""
    rows, begin, last_begin = [], 0, 0
    for sample in samples:
        end = begin + sample.tokens
        last_end = last_begin + (sample.tokens if layout.last_rows == "all" else sample.supervised)
        rows.append((slice(begin, end), slice(last_begin, last_end)))
        begin, last_begin = end, last_end
    return rows


def load_manifest(folder: Path) -> Manifest:
    """Reads and checks `manifest.json` alone, not the files that it lists.

    Raises:
        ProblemsError: it is missing, not JSON, of another format or version, or breaks the format anywhere
            (every place is named).
    """
    refuse_url(folder, "the store of this command", "run `eagle3 data pull URL FOLDER`, and give that folder")
    path = folder / MANIFEST_FILE
    if not path.exists() and (folder / RING_FILE).exists():
        fix = "train from it with `eagle3 train --stream`; for a store, extract without --stream into another folder"
        message = "is a ring, not a store: its shards come and go"
        raise problem_error(str(folder), "store.is_a_ring", message, fix)
    raw = read_file(path, _A_MANIFEST)
    value = parse_json_file(raw, path, _A_MANIFEST)
    manifest = parse_manifest(value, str(path))
    raise_problems([] if manifest.layout.version == 1 else check_seal(raw, str(path)))
    return manifest


def save_manifest(folder: Path, manifest: Manifest) -> None:
    """Replaces `manifest.json`, whole or not at all."""
    path = folder / MANIFEST_FILE
    if manifest.layout.version == 1:
        write_json_atomic(path, manifest.to_dict())
    else:
        write_sealed(path, manifest.to_dict())


def parse_manifest(value: object, where: str) -> Manifest:
    """The manifest of a parsed JSON value; see `load_manifest`."""
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        found = value.get("format") if isinstance(value, dict) else type(value).__name__
        message = f"is not a hidden-state store: format is {found!r}, expected {FORMAT!r}"
        raise problem_error(where, "store.format", message, "give the folder that `eagle3 extract` wrote")
    version = value.get("format_version")
    if not is_int(version) or version not in VERSIONS:
        message = f"has format version {version!r}, this reader knows {', '.join(map(str, VERSIONS))}"
        raise problem_error(where, "store.format_version", message, "use the eagle3 that wrote it, or extract again")
    fields = _MANIFEST_FIELDS if version == 1 else {**_MANIFEST_FIELDS, LAST_ROWS: str, SEAL: str}
    problems = _check_fields(value, "", fields, where)
    rows = value.get(LAST_ROWS)
    if version > 1 and isinstance(rows, str) and rows not in get_args(LastRows):
        message = f"{LAST_ROWS} is {rows!r}, expected one of {', '.join(get_args(LastRows))}"
        problems.append(_problem(where, "manifest_value", message))
    contract = None
    if isinstance(value.get("contract"), dict):
        try:
            contract = WiringContract.from_dict(value["contract"], f"{where}: contract")
        except ProblemsError as error:
            problems += error.problems
    if isinstance(value.get("target_head"), dict):
        problems += _check_file(value["target_head"], "target_head", _FILE_FIELDS, where)
    if isinstance(value.get("shards"), list):
        for number, shard in enumerate(value["shards"]):
            problems += _check_shard_entry(shard, f"shards[{number}]", where)
    raise_problems(problems)
    assert contract is not None
    fingerprint = value["fingerprint"]
    if fingerprint is not None:
        fingerprint = Fingerprint.from_dict(fingerprint, contract, f"{where}: fingerprint")
    shards = tuple(_shard(shard) for shard in value["shards"])
    raise_problems(_check_repeats(shards, where))
    return Manifest(
        layout=StoreLayout(contract, value.get(LAST_ROWS, "all"), version),
        settings=value["settings"],
        target_config=value["target_config"],
        target_head=FileInfo(**value["target_head"]),
        fingerprint=fingerprint,
        shards=shards,
        provenance=value["provenance"],
    )


_MANIFEST_FIELDS = {
    "format": str,
    "format_version": int,
    "contract": dict,
    "settings": dict,
    "target_config": dict,
    "target_head": dict,
    "fingerprint": dict,
    "shards": list,
    "provenance": dict,
}
_NULLABLE = {"fingerprint"}
_FILE_FIELDS = {"file": str, "bytes": int, "sha256": str}
_SHARD_FIELDS = {**_FILE_FIELDS, "tokens": int, "samples": list}
_SAMPLE_FIELDS = {"id": str, "tokens": int, "supervised": int}
_OPTIONAL_FIELDS = {"source": str}


def _problem(where: str, kind: str, message: str) -> Problem:
    return Problem(where, f"store.{kind}", message, _RESTORE)


def _check_fields(value: object, path: str, fields: Mapping[str, type], where: str) -> list[Problem]:
    """Exactly these keys, each of its type; `path` is the place inside the manifest."""
    if not isinstance(value, dict):
        return [_problem(where, "manifest_type", f"{path} is a {type(value).__name__}, expected an object")]
    prefix = f"{path}." if path else ""
    problems = []
    for key in sorted(fields.keys() | value.keys()):
        if key not in value:
            problems.append(_problem(where, "manifest_key", f"{prefix}{key} is missing"))
        elif key not in fields:
            problems.append(_problem(where, "manifest_key", f"{prefix}{key} is not part of the format"))
        elif type(value[key]) is not fields[key] and not (key in _NULLABLE and value[key] is None):
            found, expected = type(value[key]).__name__, fields[key].__name__
            problems.append(_problem(where, "manifest_type", f"{prefix}{key} is a {found}, expected {expected}"))
    return problems


def _check_file(value: object, path: str, fields: Mapping[str, type], where: str) -> list[Problem]:
    problems = _check_fields(value, path, fields, where)
    if not problems and isinstance(value, dict):
        pattern = _SHARD_NAME if fields is _SHARD_FIELDS else re.compile(re.escape(TARGET_HEAD_FILE))
        if not pattern.fullmatch(value["file"]):
            message = f"{path}.file is {value['file']!r}, expected {pattern.pattern}"
            problems.append(_problem(where, "manifest_value", message))
        if not _SHA256.fullmatch(value["sha256"]):
            problems.append(_problem(where, "manifest_value", f"{path}.sha256 is {value['sha256']!r}"))
        if value["bytes"] <= 0:
            problems.append(_problem(where, "manifest_value", f"{path}.bytes is {value['bytes']}"))
    return problems


def _check_shard_entry(value: Any, path: str, where: str) -> list[Problem]:
    problems = _check_file(value, path, _SHARD_FIELDS, where)
    if not isinstance(value, dict) or not isinstance(value.get("samples"), list):
        return problems
    for number, sample in enumerate(value["samples"]):
        place = f"{path}.samples[{number}]"
        given = _OPTIONAL_FIELDS if isinstance(sample, dict) and "source" in sample else {}
        wrong = _check_fields(sample, place, _SAMPLE_FIELDS | given, where)
        if not wrong and not 0 <= sample["supervised"] <= sample["tokens"] > 0:
            message = f"{place} ({sample['id']}) has {sample['supervised']} supervised of {sample['tokens']} tokens"
            wrong = [_problem(where, "token_count", message)]
        problems += wrong
    if not value["samples"]:
        problems.append(_problem(where, "manifest_value", f"{path}.samples is empty"))
    if not problems and value["tokens"] != sum(sample["tokens"] for sample in value["samples"]):
        message = f"{path} ({value['file']}) says {value['tokens']} tokens, its samples add up to another number"
        problems.append(_problem(where, "token_count", message))
    return problems


def _check_repeats(shards: tuple[ShardInfo, ...], where: str) -> list[Problem]:
    problems = []
    for name, count in Counter(shard.file for shard in shards).items():
        if count > 1:
            problems.append(_problem(where, "duplicate_shard", f"{name} is listed {count} times"))
    places: dict[str, list[str]] = {}
    for shard in shards:
        for sample in shard.samples:
            places.setdefault(sample.id, []).append(shard.file)
    for sample_id, files in places.items():
        if len(files) > 1:
            message = f"sample {sample_id!r} is listed {len(files)} times: in {', '.join(files)}"
            problems.append(_problem(where, "duplicate_sample", message))
    return problems


def _shard(value: dict[str, Any]) -> ShardInfo:
    samples = tuple(
        SampleInfo(item["id"], item["tokens"], item["supervised"], _shared(item.get("source")))
        for item in value["samples"]
    )
    return ShardInfo(value["file"], value["bytes"], value["sha256"], samples)


def _shared(source: str | None) -> str | None:
    """One text for all samples of a source, in place of one each."""
    return None if source is None else sys.intern(source)
