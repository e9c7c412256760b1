"""The folder of a ring: its small files, and whether a writer may begin or go on there.

Legend: V target vocab.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from eagle3.data.ring_format import (
    COUNTS_FILE,
    READER_FILE,
    READER_LOCK_FILE,
    RING_FILE,
    WRITER_FILE,
    WRITER_LOCK_FILE,
    Ring,
    RingPlan,
    entry_name,
    entry_numbers,
    load_ring,
)
from eagle3.data.store_check import check_target_head
from eagle3.data.store_folder import layout_differences, plain_json, same_head, setting_differences, write_target_head
from eagle3.data.store_format import MANIFEST_FILE, TARGET_HEAD_FILE, FileInfo, shard_files, shard_name
from eagle3.data.tensor_file import write_tensor_file_atomic
from eagle3.errors import Problem, problem_error, raise_problems
from eagle3.files import (
    TEMPORARY_SUFFIX,
    explained_os_errors,
    read_json_object,
    sha256_file,
    write_json_atomic,
)
from eagle3.wiring.fingerprint_file import FINGERPRINT_FILE

_OWN = {
    RING_FILE,
    COUNTS_FILE,
    TARGET_HEAD_FILE,
    FINGERPRINT_FILE,
    READER_FILE,
    WRITER_FILE,
    READER_LOCK_FILE,
    WRITER_LOCK_FILE,
}
_TEMPORARY = re.compile(rf"({'|'.join(map(re.escape, _OWN))}|shard-\d+\.(safetensors|json)){TEMPORARY_SUFFIX}")
_SHA256 = re.compile(r"sha256:[0-9a-f]{64}")
_COUNTS = "supervised_counts"
_OLD_RING_FIX = "let the eagle3 that began it make the rest, or begin another ring; this one can be trained from"


def check_ring_output(folder: Path) -> list[Problem]:
    """Finds a folder that is neither new nor a ring: what is in it is somebody's, so nothing is written there."""
    if not folder.exists() or (folder / RING_FILE).exists():
        return []
    if not folder.is_dir():
        return [Problem(str(folder), "ring.not_a_ring", "is a file, expected a folder", "use another output")]
    fix = "use an empty or a new folder as output"
    if (folder / MANIFEST_FILE).exists():
        return [Problem(str(folder), "ring.not_a_ring", "is a hidden-state store, not a ring", fix)]
    foreign = sorted(
        path.name for path in folder.iterdir() if path.name not in _OWN and not _TEMPORARY.fullmatch(path.name)
    )
    if foreign:
        message = f"is no ring, and holds {', '.join(foreign[:5])}{' ...' if len(foreign) > 5 else ''}"
        return [Problem(str(folder), "ring.not_a_ring", message, fix)]
    return []


def check_ring_plan(folder: Path, plan: RingPlan) -> Ring | None:
    """The ring that lies there, if this plan may go on with it; None where none is begun.

    Raises:
        ProblemsError: the folder is somebody else's; every difference in contract and settings.
    """
    raise_problems(check_ring_output(folder))
    if not (folder / RING_FILE).exists():
        return None
    ring, where = load_ring(folder), str(folder)
    problems = ring.contract.compare(plan.contract, where, "this run")
    problems += layout_differences(ring.layout, plan.layout, where, _OLD_RING_FIX)
    problems += setting_differences(ring.settings, plain_json(plan.settings), where)
    raise_problems(problems, f"cannot go on with the ring in {where}")
    return ring


def check_ring_resume(folder: Path, plan: RingPlan, head: Mapping[str, torch.Tensor], counts: torch.Tensor) -> Ring:
    """As `check_ring_plan`, of a ring that is begun; damaged files of head and counts are written again.

    Raises:
        ProblemsError: also another head.
    """
    ring = check_ring_plan(folder, plan)
    assert ring is not None
    if check_target_head(folder, ring.manifest()):
        _same_file(folder, write_target_head(folder, head), ring.target_head)
    elif not same_head(folder, head):
        raise _other_target(folder)
    path = folder / COUNTS_FILE
    if not path.is_file() or sha256_file(path) != ring.supervised_counts.sha256:
        _same_file(folder, write_counts(folder, counts), ring.supervised_counts)
    check_ring_fingerprint(folder, ring)
    return ring


def check_ring_fingerprint(folder: Path, ring: Ring) -> None:
    """Refuses a ring whose fingerprint is gone after the shard that it is of: neither side could go on.

    Raises:
        ProblemsError: kind `ring.fingerprint`.
    """
    if not (folder / FINGERPRINT_FILE).exists() and read_reader(folder, len(ring.shards)).released:
        message = "is gone, and so is shard 0, which it was of: that was released"
        fix = f"copy {FINGERPRINT_FILE} from the folder of the run that trains here, or begin another ring"
        raise problem_error(str(folder / FINGERPRINT_FILE), "ring.fingerprint", message, fix)


def _same_file(folder: Path, written: FileInfo, listed: FileInfo) -> None:
    if written != listed:
        raise _other_target(folder)


def _other_target(folder: Path) -> Exception:
    message = "the ring was begun with other weights of the target's embedding, norm or head, or with other samples"
    return problem_error(str(folder), "store.other_target", message, "use its settings, or another output")


def write_counts(folder: Path, counts: torch.Tensor) -> FileInfo:
    """Writes how often each token is supervised in an epoch, int64 [V]."""
    path = folder / COUNTS_FILE
    checksum = write_tensor_file_atomic(path, {_COUNTS: [counts]}, {})
    return FileInfo(path.name, path.stat().st_size, checksum)


def read_counts(folder: Path) -> torch.Tensor:
    """int64 [V]; see `write_counts`."""
    return load_file(folder / COUNTS_FILE)[_COUNTS]


def is_listed(folder: Path, number: int) -> bool:
    """Whether a shard and its entry are there."""
    return (folder / entry_name(number)).exists() and (folder / shard_name(number)).exists()


def list_shard(folder: Path, number: int, size: int, checksum: str) -> None:
    """Writes the entry of a shard that has its final name."""
    write_json_atomic(folder / entry_name(number), {"bytes": size, "sha256": checksum})


def read_entry(folder: Path, number: int, size: int) -> str:
    """The checksum in a shard's entry.

    Args:
        size: bytes that the shard should have.

    Raises:
        ProblemsError: kind `ring.entry`, it is not the entry of this ring's shard.
    """
    path = folder / entry_name(number)
    value = read_json_object(path, "a shard's entry")
    sha256 = value.get("sha256")
    if value.keys() != {"bytes", "sha256"} or value["bytes"] != size or not _SHA256.fullmatch(str(sha256)):
        fix = f"delete it and {shard_name(number)}: the writer makes them anew"
        raise problem_error(str(path), "ring.entry", f"does not say a checksum and {size} bytes", fix)
    return str(sha256)


def remove_shard(folder: Path, number: int) -> None:
    """Removes a shard, its entry first: no shard is listed that is not there."""
    with explained_os_errors(folder):
        (folder / entry_name(number)).unlink(missing_ok=True)
        (folder / shard_name(number)).unlink(missing_ok=True)


def listed_bytes(folder: Path) -> int:
    """Bytes of all shards that are there, listed or not."""
    total = 0
    for path in shard_files(folder):
        with suppress(FileNotFoundError):  # the other side has just removed it
            total += path.stat().st_size
    return total


def remove_temporary_files(folder: Path) -> None:
    """Removes what a killed writer left half-written; the reader's own is left to it."""
    for path in folder.iterdir():
        if _TEMPORARY.fullmatch(path.name) and path.name != READER_FILE + TEMPORARY_SUFFIX:
            path.unlink(missing_ok=True)


@dataclass(frozen=True)
class ReaderState:
    """What the trainer says.

    Attributes:
        released: the first shard that may still be needed.
        finished: no shard is needed any more.
        run: what tells its run from others.
    """

    released: int = 0
    finished: bool = False
    run: str = ""


def read_reader(folder: Path, shards: int) -> ReaderState:
    """What the trainer said last; nothing is released before any came.

    Args:
        shards: of the ring.

    Raises:
        ProblemsError: kind `ring.reader`, the file is damaged.
    """
    path = folder / READER_FILE
    if not path.exists():
        return ReaderState()
    value = read_json_object(path, "what the trainer says")
    types = {"released": int, "finished": bool, "run": str}
    if {key: type(item) for key, item in value.items()} != types or not 0 <= value["released"] <= shards:
        message = f"holds {value}, expected {', '.join(types)}, and 0 to {shards} released shards"
        fix = "delete it: the trainer then begins, or goes on, with the shards that it needs"
        raise problem_error(str(path), "ring.reader", message, fix)
    return ReaderState(**value)


def free_shards(folder: Path, released: int) -> None:
    """Removes every shard before `released`, and what a kill left of one."""
    for path in shard_files(folder):
        if shard_number(path) < released:
            remove_shard(folder, shard_number(path))
    for number in entry_numbers(folder):
        if number < released:
            remove_shard(folder, number)


def shard_number(path: Path) -> int:
    """The number in a shard's file name."""
    return int(path.stem.removeprefix("shard-"))
