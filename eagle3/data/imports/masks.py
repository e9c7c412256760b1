"""Where loss masks come from, if a dump's files have none.

Legend: T tokens of a sample.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any, Protocol

import torch

from eagle3.data.imports.sample import RawSample
from eagle3.errors import problem_error
from eagle3.files import parse_json, readable

IN_FILE = "file"
ALL = "all"
_NUMBER = re.compile(r"(\d+)\D*$")
_HOW = (
    "pass loss_mask=all (every token is supervised), a JSONL file of `id` and `loss_mask`, or the folder that "
    "speculators' prepare_data.py wrote"
)
_CHECK = "give the file or folder that belongs to this dump"


class Masks(Protocol):
    """Gives a sample its loss mask."""

    def mask(self, where: str, name: str, raw: RawSample) -> torch.Tensor:
        """[T].

        Raises:
            ProblemsError: kinds `import.no_mask`, `import.other_ids`.
        """
        ...


def open_masks(source: str) -> Masks:
    """What `loss_mask` of a config names: `file`, `all`, a JSONL file, or a folder of `datasets`.

    Raises:
        ProblemsError: kind `import.masks`; it cannot be used.
    """
    if source == IN_FILE:
        return _InFile()
    if source == ALL:
        return _All()
    path = Path(source)
    if path.is_dir():
        return _Rows(path)
    if path.is_file():
        return _Lines(path)
    raise problem_error(source, "import.masks", "no such file or folder", f"pass loss_mask={IN_FILE} or {_HOW[5:]}")


class _InFile:
    def mask(self, where: str, name: str, raw: RawSample) -> torch.Tensor:
        if raw.loss_mask is None:
            raise problem_error(where, "import.no_mask", "holds no loss mask", _HOW)
        return raw.loss_mask


class _All:
    def mask(self, where: str, name: str, raw: RawSample) -> torch.Tensor:
        return torch.ones(len(raw.input_ids), dtype=torch.bool)


class _Rows:
    """A dataset saved by `datasets`, with `input_ids` and `loss_mask`: row i belongs to the file that ends in i."""

    def __init__(self, folder: Path) -> None:
        from datasets import Dataset, load_from_disk

        self._folder, self._lock = folder, threading.Lock()
        try:
            rows = load_from_disk(str(folder))
        except Exception as error:  # damaged files make it raise almost anything
            message = f"is no dataset that was saved by `datasets`: {type(error).__name__}: {error}"
            raise problem_error(str(folder), "import.masks", message, _CHECK) from error
        if not isinstance(rows, Dataset) or not {"input_ids", "loss_mask"} <= set(rows.column_names):
            message = "holds no columns input_ids and loss_mask"
            raise problem_error(str(folder), "import.masks", message, _CHECK)
        self._rows = rows.with_format(None)

    def mask(self, where: str, name: str, raw: RawSample) -> torch.Tensor:
        number = _NUMBER.search(name.rpartition("/")[2].partition(".")[0])
        if number is None or int(number[1]) >= len(self._rows):
            message = f"its name ends in no number of a row of {self._folder}, which has {len(self._rows):,}"
            raise problem_error(where, "import.no_mask", message, _CHECK)
        with self._lock:
            row: dict[str, Any] = self._rows[int(number[1])]
        ids, stored, mask = raw.input_ids.tolist(), row["input_ids"], row["loss_mask"]
        if not isinstance(stored, list) or not _is_mask(mask):
            message = f"row {number[1]} of {self._folder} holds no list of token ids, or no mask of 0 and 1"
            raise problem_error(where, "import.no_mask", message, _CHECK)
        if stored[: len(ids)] != ids:
            message = f"its token ids are not those of row {number[1]} of {self._folder}"
            raise problem_error(where, "import.other_ids", message, _CHECK)
        return torch.tensor(mask[: len(ids)])


class _Lines:
    """JSONL, a line a sample: `id` is its path in the dump, with or without the suffix."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock, self._places = path, threading.Lock(), {}
        with readable(path):
            self._file = open(path, "rb")  # noqa: SIM115 (read from as long as there are samples)
            while line := self._file.readline():
                if line.strip():
                    name, _ = self._parsed(line)
                    self._places[name] = self._file.tell() - len(line)

    def mask(self, where: str, name: str, raw: RawSample) -> torch.Tensor:
        stem = name.rpartition(".")[0]
        place = self._places.get(name, self._places.get(stem))
        if place is None:
            message = f"{self._path} has no line with id {name!r}, nor {stem!r}"
            raise problem_error(where, "import.no_mask", message, _CHECK)
        with self._lock:
            self._file.seek(place)
            return torch.tensor(self._parsed(self._file.readline())[1])

    def _parsed(self, line: bytes) -> tuple[str, list[int]]:
        try:
            record = parse_json(line.decode())
            name, mask = record["id"], record["loss_mask"]
            if not isinstance(name, str) or not _is_mask(mask):
                raise ValueError("id is no text, or loss_mask no list of 0 and 1")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            message = f"has a line that is no object with id and loss_mask: {error}"
            raise problem_error(str(self._path), "import.masks", message, "correct it") from None
        return name, mask


def _is_mask(value: object) -> bool:
    return isinstance(value, list) and all(type(item) in (int, bool) and item in (0, 1) for item in value)
