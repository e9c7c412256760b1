"""The folder of a hidden-state store: what may be in it, its target head, and whether another run may go on with it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from eagle3.data.store_check import check_shard, check_target_head, target_head_shapes
from eagle3.data.store_format import (
    COMMIT_LOCK_FILE,
    LAST_ROWS,
    LOCK_FILE,
    MANIFEST_FILE,
    PROCESS_LOCK_FILES,
    TARGET_HEAD_FILE,
    FileInfo,
    Manifest,
    load_manifest,
    shard_files,
)
from eagle3.data.store_layout import StoreLayout
from eagle3.data.tensor_file import write_tensor_file_atomic
from eagle3.errors import Problem, problem_error, raise_problems
from eagle3.files import TEMPORARY_SUFFIX, refuse_url
from eagle3.wiring.contract import WiringContract
from eagle3.wiring.dataset import RING_FILE

_OTHER_SETTINGS_FIX = "use its settings, or another output"
_OLD_STORE_FIX = (
    "if it is whole, make a new store of it: `eagle3 extract --from` takes over what it holds; else go on with the "
    "eagle3 that began it, or extract into another folder"
)


def begin_manifest(
    folder: Path,
    layout: StoreLayout,
    settings: Mapping[str, Any],
    target_config: Mapping[str, Any],
    head: Mapping[str, torch.Tensor],
    provenance: Mapping[str, Any],
) -> Manifest:
    """Writes the target head and gives the first manifest, without shards; it is not written yet."""
    file = write_target_head(folder, head)
    return Manifest(layout, plain_json(settings), plain_json(target_config), file, provenance=plain_json(provenance))


def resume_manifest(
    folder: Path, layout: StoreLayout, settings: Mapping[str, Any], head: Mapping[str, torch.Tensor]
) -> tuple[Manifest, list[Problem]]:
    """The manifest without the shards that are damaged, and what was wrong; a damaged head is written again.

    Raises:
        ProblemsError: the store has other settings, another contract or another head (every difference is listed).
    """
    manifest = check_resume(folder, layout, settings)
    damaged_head = check_target_head(folder, manifest)
    if not damaged_head and not same_head(folder, head):
        message = "the store was begun with other weights of the target's embedding, norm or head"
        raise problem_error(str(folder), "store.other_target", message, _OTHER_SETTINGS_FIX)
    if damaged_head:
        manifest = replace(manifest, target_head=write_target_head(folder, head))
    damaged = {shard.file: check_shard(folder, shard, manifest.layout) for shard in manifest.shards}
    shards = tuple(shard for shard in manifest.shards if not damaged[shard.file])
    kept = {sample.id for shard in shards for sample in shard.samples}
    if manifest.fingerprint is not None and manifest.fingerprint.sample not in kept:
        manifest = replace(manifest, fingerprint=None)
    redone = damaged_head + [problem for problems in damaged.values() for problem in problems]
    return replace(manifest, shards=shards), redone


def check_resume(folder: Path, layout: StoreLayout, settings: Mapping[str, Any]) -> Manifest:
    """The manifest of a store that a run with this layout and these settings may go on with.

    Raises:
        ProblemsError: every difference.
    """
    manifest, where = load_manifest(folder), str(folder)
    problems = manifest.contract.compare(layout.contract, where, "this run")
    problems += layout_differences(manifest.layout, layout, where)
    problems += setting_differences(manifest.settings, plain_json(settings), where)
    raise_problems(problems, f"cannot resume {where}")
    return manifest


def layout_differences(
    begun: StoreLayout, mine: StoreLayout, where: str, old_fix: str = _OLD_STORE_FIX
) -> list[Problem]:
    """What bars a run from going on with what was `begun`; `old_fix`: what to do about an older version."""
    if begun.version != mine.version:
        message = f"was begun in format version {begun.version}, this eagle3 writes version {mine.version}"
        return [Problem(where, "store.other_version", message, old_fix)]
    if begun.last_rows == mine.last_rows:
        return []
    message = f"{LAST_ROWS}: it was begun with {begun.last_rows!r}, this run has {mine.last_rows!r}"
    return [Problem(where, "store.other_settings", message, _OTHER_SETTINGS_FIX)]


def check_head(head: Mapping[str, torch.Tensor], contract: WiringContract) -> list[Problem]:
    """What bars these tensors from being the target head of a store of that contract."""
    expected = target_head_shapes(contract)
    missing = expected.keys() - head.keys() - {"lm_head.weight"}
    problems = []
    for name in sorted(head.keys() | missing):
        tensor, shape = head.get(name), expected.get(name)
        found = None if tensor is None else tuple(tensor.shape)
        if found != shape or tensor is None or not tensor.dtype.is_floating_point:
            message = f"{name} is {found or 'absent'}, expected {shape or 'absent'}"
            problems.append(Problem("target_head", "store.target_head", message, "give the target's own tensors"))
        elif not torch.isfinite(tensor).all():
            problems.append(
                Problem("target_head", "store.non_finite", f"{name} has NaN or infinity", "check the target")
            )
    return problems


def refuse_url_output(output: Path | str) -> None:
    """Stores are written to a local disk, and pushed afterwards.

    Raises:
        ProblemsError: kind `remote.not_here`.
    """
    refuse_url(output, "the output", "write to a local folder, then run `eagle3 data push FOLDER URL`")


def check_output(folder: Path) -> list[Problem]:
    """Finds a folder that is neither new nor a store: what is in it is somebody's, so nothing is written there."""
    refuse_url_output(folder)
    if not folder.exists() or (folder / MANIFEST_FILE).exists():
        return []
    if not folder.is_dir():
        return [Problem(str(folder), "store.not_a_store", "is a file, expected a folder", "use another output")]
    if (folder / RING_FILE).exists():
        message = "is a ring, not a store"
        return [Problem(str(folder), "store.is_a_ring", message, "pass --stream, or use another output")]
    if shards := shard_files(folder):  # a killed writer never leaves that
        message = f"has {len(shards)} shards, but no {MANIFEST_FILE}"
        return [Problem(str(folder), "store.manifest_missing", message, "restore the manifest, or use an empty folder")]
    left = [*_temporary_files(folder), *folder.glob(PROCESS_LOCK_FILES)]
    ours = {LOCK_FILE, COMMIT_LOCK_FILE, TARGET_HEAD_FILE, *(path.name for path in left)}
    if foreign := sorted(path.name for path in folder.iterdir() if path.name not in ours):
        message = f"is no hidden-state store, and holds {', '.join(foreign[:5])}{' ...' if len(foreign) > 5 else ''}"
        return [Problem(str(folder), "store.not_a_store", message, "use an empty or a new folder as output")]
    return []


def write_target_head(folder: Path, head: Mapping[str, torch.Tensor]) -> FileInfo:
    """Writes `target_head.safetensors` anew."""
    path = folder / TARGET_HEAD_FILE
    checksum = write_tensor_file_atomic(path, {name: [head[name]] for name in sorted(head)}, {})
    return FileInfo(path.name, path.stat().st_size, checksum)


def same_head(folder: Path, head: Mapping[str, torch.Tensor]) -> bool:
    """Whether the stored target head is this one."""
    stored = load_file(folder / TARGET_HEAD_FILE)
    return stored.keys() == head.keys() and all(torch.equal(stored[name], head[name].cpu()) for name in stored)


def remove_temporary_files(folder: Path) -> None:
    """Removes what a killed writer left half-written."""
    for path in _temporary_files(folder):
        path.unlink()


def _temporary_files(folder: Path) -> list[Path]:
    """What a killed writer may have left half-written."""
    names = (MANIFEST_FILE, TARGET_HEAD_FILE, "shard-*.safetensors")
    return [path for name in names for path in folder.glob(f"{name}{TEMPORARY_SUFFIX}") if path.is_file()]


def setting_differences(stored: dict[str, Any], given: dict[str, Any], where: str) -> list[Problem]:
    """One problem for each setting in which a run differs from what it resumes."""
    return [
        Problem(
            where,
            "store.other_settings",
            f"settings.{key}: it was begun with {begun}, this run has {now}",
            _OTHER_SETTINGS_FIX,
        )
        for key, begun, now in differing_settings(stored, given)
    ]


def differing_settings(mine: dict[str, Any], theirs: dict[str, Any]) -> Iterable[tuple[str, str, str]]:
    """Each setting (JSON values, nested keys dotted) in which two stores differ, and what it is in each."""
    flat = [dict(_flat(side)) for side in (mine, theirs)]
    for key in sorted(flat[0].keys() | flat[1].keys()):
        ours, others = (repr(side[key]) if key in side else "nothing" for side in flat)
        if ours != others:
            yield key, ours, others


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, dict):
            yield from _flat(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item


def plain_json(value: Mapping[str, Any]) -> dict[str, Any]:
    """The value as JSON gives it back (tuples become lists), so that it can be compared with a stored one."""
    result: dict[str, Any] = json.loads(json.dumps(value, allow_nan=False))
    return result
