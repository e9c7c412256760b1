"""Files of `torch.save`, read by torch's weights-only loader: a pickle's code is never run."""

from __future__ import annotations

import gzip
import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from eagle3.errors import ProblemsError, problem_error
from eagle3.files import readable

_ZIP = b"PK\x03\x04"
_PICKLE = b"\x80"
_LFS_POINTER = b"version "
_RESTORE = "restore it from its source, make that sample again, or leave it out with skip_bad=true"
_SAFE = (
    "it holds more than tensors, lists, texts and numbers, which only running its code would load: save these alone, "
    "or leave it out with skip_bad=true"
)


@contextmanager
def opened(path: Path) -> Iterator[None]:
    """Makes a file that cannot be read, or is not there any more, a problem of this file."""
    try:
        with readable(path):
            yield
    except (FileNotFoundError, NotADirectoryError):
        message = "is gone, or a link that leads nowhere"
        raise problem_error(str(path), "file.missing", message, "restore it, or take it out of the dump") from None


def load_tensors(path: Path) -> dict[str, Any]:
    """The dict that a file holds, its tensors mapped from disk (from memory, if the name ends in `.gz`).

    Raises:
        ProblemsError: kinds `import.pickle` (it would run code), `import.damaged`, `import.format` (no dict),
            `file.unreadable`, `file.missing`.
    """
    with opened(path), open(path, "rb") as file:
        packed = file.read() if path.suffix == ".gz" else None
        start = file.read(len(_LFS_POINTER))
    try:
        if packed is not None:
            packed = gzip.decompress(packed)
            start = packed[: len(_LFS_POINTER)]
        if not start.startswith(_ZIP):
            raise _no_torch_file(path, start)
        value = torch.load(
            path if packed is None else io.BytesIO(packed), "cpu", weights_only=True, mmap=packed is None
        )
    except ProblemsError:
        raise
    except pickle.UnpicklingError as error:
        raise problem_error(str(path), "import.pickle", f"torch refuses to load it: {_reason(error)}", _SAFE) from error
    except Exception as error:  # a damaged archive makes torch and zlib raise almost anything
        message = f"cannot be read, it is cut off or damaged: {_first_sentence(error)}"
        raise problem_error(str(path), "import.damaged", message, _RESTORE) from error
    if not isinstance(value, dict):
        message = f"holds a {type(value).__name__}, expected a dict of tensors"
        raise problem_error(str(path), "import.format", message, "see docs/import.md for what is read")
    return value


def _no_torch_file(path: Path, start: bytes) -> ProblemsError:
    if start.startswith(_PICKLE):
        return problem_error(str(path), "import.pickle", "is a bare pickle, which is never loaded", _SAFE)
    if start == _LFS_POINTER:
        message = "is a Git LFS pointer, not the file itself"
        return problem_error(str(path), "import.damaged", message, "fetch the file itself: git lfs pull")
    message = f"is no file of torch.save: it starts with {start!r}" if start else "is empty"
    return problem_error(str(path), "import.damaged", message, _RESTORE)


def _reason(error: Exception) -> str:
    """What the loader stumbled over, without its advice to load the file all the same."""
    text = str(error)
    place = text.find("WeightsUnpickler error:")
    return _first_sentence(text[place:].removeprefix("WeightsUnpickler error:") if place >= 0 else text)


def _first_sentence(error: object) -> str:
    return (str(error).strip() or type(error).__name__).split(". ")[0].splitlines()[0][:200]
