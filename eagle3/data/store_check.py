"""What is wrong with a hidden-state store by its sizes and headers; `store_verify` reads every byte.

Every function returns problems; none raises for bad data.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from eagle3.data.store_format import (
    METADATA_KEY,
    SAMPLE_COUNT,
    FileInfo,
    Manifest,
    ShardInfo,
    shard_files,
    shard_metadata,
)
from eagle3.data.store_layout import StoreLayout
from eagle3.data.store_sample import shard_header
from eagle3.errors import Problem, ProblemsError
from eagle3.wiring.contract import WiringContract
from eagle3.wiring.dataset import DTYPE_CODES
from eagle3.wiring.fingerprint_check import check_stored_fingerprint
from eagle3.wiring.safetensors_header import Header, read_header

INCOMPLETE = "store.incomplete"
REDO = "run `eagle3 extract` with the same settings again: it redoes damaged and missing shards"


def check_store(folder: Path, manifest: Manifest, expected: WiringContract | None = None) -> list[Problem]:
    """Sizes and headers of every file, files that should not be there, and whether there is any sample.

    Reads no states but the few rows of the fingerprint; `expected` is the contract that
    the caller needs; every difference is a problem.
    """
    problems = check_target_head(folder, manifest)
    for shard in manifest.shards:
        problems += check_shard(folder, shard, manifest.layout)
    listed = {shard.file for shard in manifest.shards}
    for path in shard_files(folder):
        if path.name not in listed:
            problems.append(unlisted(str(path)))
    if not problems:
        problems += check_stored_fingerprint(folder, manifest.to_dict(), manifest.contract)
    return problems + check_whole(str(folder), manifest, expected)


def check_whole(where: str, manifest: Manifest, expected: WiringContract | None = None) -> list[Problem]:
    """Whether a manifest lists all samples, at least one, under the contract that is expected."""
    problems = []
    held, planned = sum(len(shard.samples) for shard in manifest.shards), manifest.settings.get(SAMPLE_COUNT)
    if manifest.shards and isinstance(planned, int) and held < planned:
        message = f"holds {held:,} of {planned:,} samples: its extraction has not ended"
        fix = "run `eagle3 extract` with the same settings to its end"
        problems.append(Problem(where, INCOMPLETE, message, fix))
    if not manifest.shards:
        problems.append(Problem(where, "store.empty", "holds no sample yet", "run `eagle3 extract` to its end"))
    if expected is not None:
        problems += manifest.contract.compare(expected, where, "what is expected")
    return problems


def is_complete(folder: Path, manifest: Manifest, ids: Iterable[str]) -> bool:
    """Whether the store is whole and holds these samples and no others."""
    held = {sample.id for shard in manifest.shards for sample in shard.samples}
    return held == set(ids) and not check_store(folder, manifest)


def unlisted(where: str) -> Problem:
    """A shard that the manifest does not name."""
    message = "is not in the manifest (a writer is at work or was killed before it listed the shard)"
    return Problem(where, "store.shard_unlisted", message, REDO)


def check_shard(folder: Path, shard: ShardInfo, layout: StoreLayout) -> list[Problem]:
    """Size, header, tensors and sample list of one shard, without reading its states."""
    if _is_as_written(folder, shard, layout):
        return []
    header = _checked_header(folder, shard)
    if not isinstance(header, Header):
        return header
    return check_header(header, shard, layout, str(folder / shard.file))


def check_header(header: Header, shard: ShardInfo, layout: StoreLayout, where: str) -> list[Problem]:
    """Tensors and sample list of a shard's header."""
    inside = samples_said(shard)
    problems = _check_sample_list(header.metadata.get(METADATA_KEY), shard, layout.version, where)
    found = {name: (info.dtype, tuple(info.shape)) for name, info in header.tensors.items()}
    expected = layout.tensors(shard.tokens, shard.supervised)
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            message = f"{name} is {_said(found.get(name))}, expected {_said(expected.get(name))} {inside}"
            problems.append(Problem(where, "store.shard_mismatch", message, REDO))
    return problems


def _is_as_written(folder: Path, shard: ShardInfo, layout: StoreLayout) -> bool:
    """Whether size and header are to the byte what our writers write: then there is nothing to look for. A tenth of the
    time that parsing takes, which counts with thousands of shards.
    """
    header = shard_header(shard.samples, layout)
    if shard.bytes != len(header) + layout.tensor_bytes(shard.tokens, shard.supervised):
        return False
    try:
        with open(f"{folder}/{shard.file}", "rb", buffering=0) as file:
            return os.fstat(file.fileno()).st_size == shard.bytes and file.read(len(header)) == header
    except OSError:  # the checks that follow say what is wrong
        return False


def check_target_head(folder: Path, manifest: Manifest) -> list[Problem]:
    """Size, header and tensors of the target's embedding, final norm and head."""
    header = _checked_header(folder, manifest.target_head)
    if not isinstance(header, Header):
        return header
    found = {name: tuple(info.shape) for name, info in header.tensors.items()}
    expected = target_head_shapes(manifest.contract)
    if "lm_head.weight" not in found:
        del expected["lm_head.weight"]
    types = {info.dtype for info in header.tensors.values()} - set(DTYPE_CODES.values())
    if found == expected and not types:
        return []
    message = f"holds {found} {sorted(types) or ''}, expected floating {expected}"
    return [Problem(str(folder / manifest.target_head.file), "store.target_head", message, REDO)]


def target_head_shapes(contract: WiringContract) -> dict[str, tuple[int, ...]]:
    """Shapes in the target head's file; `lm_head.weight` is left out where the target ties it to its embedding."""
    matrix = (contract.vocab_size, contract.hidden_size)
    return {"embed_tokens.weight": matrix, "norm.weight": (contract.hidden_size,), "lm_head.weight": matrix}


def _checked_header(folder: Path, file: FileInfo) -> Header | list[Problem]:
    path = folder / file.file
    if problem := check_size(str(path), path.stat().st_size if path.is_file() else None, file):
        return [problem]
    try:
        return read_header(path)
    except ProblemsError as error:
        inside = samples_said(file)
        return [Problem(str(path), item.kind, f"{item.message} {inside}".rstrip(), REDO) for item in error.problems]


def check_size(where: str, size: int | None, file: FileInfo) -> Problem | None:
    """Whether a file has the bytes that the manifest says; no size: it is not there."""
    what, inside = "shard" if isinstance(file, ShardInfo) else "target_head", samples_said(file)
    if size is None:
        return Problem(where, f"store.{what}_missing", f"is listed, but not there {inside}".rstrip(), REDO)
    if size == file.bytes:
        return None
    kind = "truncated" if size < file.bytes else "extra_bytes"
    message = f"has {size} bytes, the manifest says {file.bytes} {inside}".rstrip()
    return Problem(where, f"store.{what}_{kind}", message, REDO)


def _check_sample_list(text: str | None, shard: ShardInfo, version: int, where: str) -> list[Problem]:
    """The header's own sample list against the manifest's."""
    try:
        value = json.loads(text or "null")
        found = [(str(item["id"]), item["tokens"]) for item in value["samples"]]
    except (ValueError, TypeError, KeyError):
        message = f"its header has no valid {METADATA_KEY!r} entry {samples_said(shard)}"
        return [Problem(where, "store.shard_mismatch", message, REDO)]
    if value == shard_metadata(shard.samples, version):
        return []
    listed = [(sample.id, sample.tokens) for sample in shard.samples]
    counts, known = Counter(sample_id for sample_id, _ in found), dict(listed)
    problems = []

    def add(kind: str, message: str) -> None:
        problems.append(Problem(where, f"store.{kind}", message, REDO))

    for sample_id, count in counts.items():
        if count > 1:
            add("duplicate_sample", f"holds sample {sample_id!r} {count} times")
        if sample_id not in known:
            add("sample_unlisted", f"holds sample {sample_id!r}, which the manifest does not list here")
    for sample_id, tokens in listed:
        if sample_id not in counts:
            add("sample_missing", f"lacks sample {sample_id!r}, which the manifest lists here")
        elif counts[sample_id] == 1 and (there := dict(found)[sample_id]) != tokens:
            add("sample_tokens", f"says {there} tokens for sample {sample_id!r}, the manifest says {tokens}")
    if not problems:
        add("shard_mismatch", f"its header differs from the manifest in order, format or version {samples_said(shard)}")
    return problems


def samples_said(file: FileInfo) -> str:
    """Which samples a shard holds, in words; nothing for another file."""
    if not isinstance(file, ShardInfo):
        return ""
    ids = [sample.id for sample in file.samples]
    return f"(samples {', '.join(ids)})" if len(ids) <= 3 else f"({len(ids)} samples, {ids[0]} to {ids[-1]})"


def _said(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    return "absent" if tensor is None else f"{tensor[0]} {list(tensor[1])}"
