"""Room for checkpoints: their size is known before the first one is written."""

from __future__ import annotations

import shutil
from pathlib import Path

from torch import nn

from eagle3.config import MomentKind
from eagle3.errors import problem_error
from eagle3.files import existing_folder, size_text
from eagle3.train.checkpoint import checkpoints_folder
from eagle3.train.moments import moment_bytes


def checkpoint_bytes(model: nn.Module, kind: MomentKind) -> int:
    """Bytes of a checkpoint's tensors: float32 weights and the moments of the trained parameters."""
    return sum(value.numel() * 4 for value in model.parameters() if value.requires_grad) + moment_bytes(model, kind)


def room_note(run: Path, keep: int, size: int) -> str | None:
    """A warning where the disk cannot hold the checkpoints that a run comes to, or None.

    Args:
        keep: newest checkpoints that stay; the best one, and the one being written, come on top.
        size: bytes of one.
    """
    free = _free(run)
    there = sum(path.stat().st_size for path in checkpoints_folder(run).rglob("*") if path.is_file())
    needed = (keep + 2) * size - there
    if free is None or free >= needed:
        return None
    return (
        f"warning: checkpoints need up to {size_text((keep + 2) * size)} ({size_text(size)} each: the newest {keep}, "
        f"the best, and one being written), and {existing_folder(run)} has {size_text(free)} free: free space there, "
        "or lower keep_checkpoints"
    )


def check_room(run: Path, size: int) -> None:
    """Finds a disk that is too full for a checkpoint before it is begun.

    Raises:
        ProblemsError: kind `disk.full`.
    """
    free = _free(run)
    if free is None or free >= size:
        return
    message = f"cannot write: a checkpoint needs {size_text(size)}, {size_text(free)} are free"
    fix = "free space there or choose another folder, then run the same command again"
    raise problem_error(str(checkpoints_folder(run)), "disk.full", message, fix)


def _free(run: Path) -> int | None:
    """Bytes that this user may write; None where the file system does not say."""
    usage = shutil.disk_usage(existing_folder(run))
    return usage.free if usage.total else None
