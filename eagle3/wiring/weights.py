"""Which tensors a checkpoint folder holds, in one safetensors file or in several with an index.

Only headers are read. What is no safetensors at all, or not all there, is one named problem.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.errors import Problem, problem_error, raise_problems
from eagle3.files import read_json_object
from eagle3.wiring.safetensors_header import TensorInfo, read_header, read_int_tensor

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_DOWNLOAD = "download the checkpoint again, whole"


@dataclass(frozen=True)
class Weights:
    """The tensors of a checkpoint by stored name, and the file that each is in."""

    tensors: Mapping[str, TensorInfo]
    files: Mapping[str, Path]

    def read_ints(self, name: str) -> list[int]:
        """The values of one integer or bool tensor; see `read_int_tensor`."""
        return read_int_tensor(self.files[name], name)


def read_weights(folder: Path) -> Weights:
    """The headers of a checkpoint's weights.

    Raises:
        ProblemsError: kinds `checkpoint.incomplete`, `checkpoint.pickle`, `checkpoint.no_weights`,
            `checkpoint.index`, `safetensors.*`, `file.*`.
    """
    if os.path.lexists(folder / WEIGHTS_FILE):
        return _merged({folder / WEIGHTS_FILE: None})
    if os.path.lexists(folder / INDEX_FILE):
        return _merged(_shards(folder, read_json_object(folder / INDEX_FILE, "an index of safetensors files")))
    if partial := sorted(path.name for path in folder.rglob("*.incomplete")):
        message = f"is half a download: {len(partial)} unfinished files, e.g. {partial[0]}"
        raise problem_error(str(folder), "checkpoint.incomplete", message, _DOWNLOAD)
    if pickles := sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern)):
        fix = f"save the weights as {WEIGHTS_FILE}; never load a pickle from a source you do not trust"
        raise problem_error(str(folder), "checkpoint.pickle", f"holds pickles ({', '.join(pickles)})", fix)
    raise problem_error(str(folder), "checkpoint.no_weights", f"has no {WEIGHTS_FILE}", "give the exported folder")


def _shards(folder: Path, index: Mapping[str, Any]) -> dict[Path, set[str] | None]:
    """Each file that the index names, with the tensors that should be in it."""
    where, names = str(folder / INDEX_FILE), index.get("weight_map")
    if not isinstance(names, dict) or not names or not all(_is_plain(file) for file in names.values()):
        message = "weight_map is not an object of tensor names and plain file names"
        raise problem_error(where, "checkpoint.index", message, _DOWNLOAD)
    shards: dict[Path, set[str] | None] = {
        folder / file: {name for name, other in names.items() if other == file} for file in sorted(set(names.values()))
    }
    if missing := [path.name for path in shards if not path.is_file()]:
        message = f"is half a download: {len(missing)} of {len(shards)} files are missing ({', '.join(missing)})"
        raise problem_error(str(folder), "checkpoint.incomplete", message, _DOWNLOAD)
    return shards


def _merged(files: Mapping[Path, set[str] | None]) -> Weights:
    """All tensors of these files; a set of names is what the index says the file holds."""
    tensors: dict[str, TensorInfo] = {}
    owners: dict[str, Path] = {}
    problems = []
    for path, listed in files.items():
        header = read_header(path)
        if listed is not None and listed != header.tensors.keys():
            strays = sorted(listed ^ header.tensors.keys())
            message = f"the index and the file disagree about {len(strays)} tensors, e.g. {strays[0]}"
            problems.append(Problem(str(path), "checkpoint.index", message, _DOWNLOAD))
        tensors |= header.tensors
        owners |= dict.fromkeys(header.tensors, path)
    raise_problems(problems)
    return Weights(tensors, owners)


def _is_plain(name: object) -> bool:
    return isinstance(name, str) and name != "" and Path(name).name == name
