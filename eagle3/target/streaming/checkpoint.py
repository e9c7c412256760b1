"""A published checkpoint read by tensor names, without building the model: where each of a module's parameters comes
from, in how many bytes, and everything that bars it from being read.

Legend: E experts, I expert width, H hidden.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from eagle3.errors import Problem, ProblemsError, problem_error, raise_problems
from eagle3.files import read_json_object
from eagle3.target.resolve import TargetFiles
from eagle3.target.streaming.quantization import Quantization, dequantize_fp8, read_quantization, unpack_int4
from eagle3.wiring.safetensors_header import Header, TensorInfo, read_header

INDEX_FILE = "model.safetensors.index.json"
_PLAIN = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_TYPES = {**_PLAIN, "I32": torch.int32, "F8_E4M3": torch.float8_e4m3fn}
_FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
# Beside the weights: the packed matrix's shape, which the model says too, and a table that older checkpoints carry.
_IGNORED = (".weight_shape", ".rotary_emb.inv_freq")
_AGAIN = "download the checkpoint again, or correct its config.json"
_WORD = 8


@dataclass(frozen=True)
class Place:
    """Where one tensor of the checkpoint lies: its file, and its bytes in it."""

    name: str
    path: Path
    begin: int
    size: int


@dataclass(frozen=True, eq=False)
class Raw:
    """Tensors of the checkpoint that are read one after the other into one: [parts, ...] of equal shapes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    places: tuple[Place, ...]

    @property
    def size(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Recipe:
    """One parameter of a module, and what it is made of.

    Attributes:
        key: its name in the module.
        shape, dtype: that the model keeps it in.
        scheme: how `raws` become it.
        raws: `(weight,)`, `(packed, scale)` or `(weight, scale)`.
        block: of FP8.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    scheme: Literal["plain", "int4", "fp8"]
    raws: tuple[Raw, ...]
    block: tuple[int, int] = (0, 0)

    @property
    def size(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def decode(self, raws: list[torch.Tensor], out: torch.Tensor) -> None:
        """Fills `out` (of the recipe's shape, or some leading rows of it) from as many parts of its raw tensors."""
        parts = raws[0].shape[0]
        target = out.view(parts, -1, out.shape[-1]) if out.dim() > 1 else out.view(parts, -1)
        if self.scheme == "plain":
            target.copy_(raws[0].reshape(target.shape))
        elif self.scheme == "int4":
            unpack_int4(raws[0], raws[1], target)
        else:
            dequantize_fp8(raws[0], raws[1], self.block, target)


class Checkpoint:
    """The tensors of a checkpoint folder by name, wherever they lie.

    Raises:
        ProblemsError: a file that the index names is missing or damaged, a tensor is there twice, or the
            quantization is not known; all of it is listed.
    """

    def __init__(self, files: TargetFiles) -> None:
        self.files = files
        self.folder = files.folder
        self._where = str(files.folder)
        problems: list[Problem] = []
        self.quantization = Quantization()
        for config in {id(item): item for item in (files.config, files.text_config)}.values():
            found, reasons = read_quantization(config, self._where)
            problems += reasons
            if found != Quantization():
                self.quantization = found
        self._places: dict[str, tuple[Path, TensorInfo, int]] = {}
        headers, reasons = _headers(self.folder)
        problems += reasons
        for path, header in headers.items():
            for name, info in header.tensors.items():
                if name in self._places:
                    message = f"{name} is in {self._places[name][0].name} and in {path.name}"
                    problems.append(Problem(self._where, "target.duplicate_weights", message, "remove one file"))
                self._places[name] = (path, info, header.data_start)
        raise_problems(problems, f"cannot read {self.folder}")

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(self._places)

    def check_depth(self, depth: int) -> None:
        """Holds the config's number of layers against the layers that are here, of which `depth` are needed (those that
        predict further tokens, `num_nextn_predict_layers`, follow the others).

        Raises:
            ProblemsError: kind `target.layers`.
        """
        said = self.files.facts.num_hidden_layers
        extra = self.files.text_config.get("num_nextn_predict_layers")
        pattern = re.compile(rf"{re.escape(self.files.spec.weight_prefix)}model\.layers\.(\d{{1,9}})\.")
        numbers = {int(match[1]) for name in self.names if (match := pattern.match(name))}
        most = said + (extra if isinstance(extra, int) else 0)
        if numbers and not depth <= max(numbers) + 1 <= most:
            message = f"has weights of layers {min(numbers)} to {max(numbers)}, config.json says {said} layers"
            raise problem_error(self._where, "target.layers", message, _AGAIN)

    def recipes(self, module: nn.Module, name: str) -> tuple[list[Recipe], list[Problem]]:
        """How to make every parameter and buffer of `module` (called `name` in the model), and what bars it."""
        recipes, problems = [], []
        for key, like in module.state_dict().items():
            found = self._recipe(f"{name}.{key}" if name else key, key, like)
            if isinstance(found, Recipe):
                recipes.append(found)
            else:
                problems += found
        return recipes, problems

    def unused(self, recipes: Iterable[Recipe], names: Iterable[str]) -> list[Problem]:
        """Tensors below the modules `names` that no recipe reads."""
        used = {place.name for recipe in recipes for raw in recipe.raws for place in raw.places}
        prefixes = tuple(f"{self.files.spec.weight_prefix}{name}." for name in names)
        extra = [name for name in self.names - used if name.startswith(prefixes) and not name.endswith(_IGNORED)]
        return [
            Problem(self._where, "target.unexpected_weights", f"{name} belongs to no part of this model", _AGAIN)
            for name in sorted(extra)
        ]

    def _recipe(self, name: str, key: str, like: torch.Tensor) -> Recipe | list[Problem]:
        sources, shape = self._sources(self.files.spec.weight_prefix + name, like)
        scheme = self._scheme(sources)
        stems = [source.removesuffix(".weight") for source in sources]
        matrix = (shape[0], prod(shape[1:])) if len(shape) > 1 else shape
        block = self.quantization.block or (1, 1)
        if scheme == "int4":
            group = self.quantization.group or _WORD
            wanted: list[tuple[str, tuple[str, ...], tuple[int, ...]]] = [
                (".weight_packed", ("I32",), (matrix[0], matrix[-1] // _WORD)),
                (".weight_scale", tuple(_PLAIN), (matrix[0], matrix[-1] // group)),
            ]
        elif scheme == "fp8":
            scales = (-(-matrix[0] // block[0]), -(-matrix[-1] // block[1]))
            wanted = [(".weight", ("F8_E4M3",), matrix), (".weight_scale_inv", ("F32",), scales)]
        else:
            wanted = [("", tuple(_PLAIN), shape)]
        problems: list[Problem] = []
        raws = []
        for suffix, dtypes, part in wanted:
            named = [f"{stem}{suffix}" for stem in stems] if suffix else sources
            raws.append(self._raw(named, dtypes, part, problems))
        if problems:
            return problems
        return Recipe(key, tuple(like.shape), like.dtype, scheme, tuple(raws), block)

    def _raw(self, names: list[str], dtypes: tuple[str, ...], shape: tuple[int, ...], problems: list[Problem]) -> Raw:
        places: list[Place] = []
        there = Counter(self._places[name][1].dtype for name in names if name in self._places)
        kind = max(dtypes, key=lambda dtype: there[dtype])
        for name in names:
            found = self._places.get(name)
            if found is None:
                problems.append(Problem(self._where, "target.missing_weights", f"there is no {name}", _AGAIN))
                continue
            path, info, start = found
            if info.dtype != kind:
                expected = kind if there[kind] else " or ".join(dtypes)
                message = f"{name} is {info.dtype}, expected {expected}"
                problems.append(Problem(self._where, "target.quantized", message, _AGAIN))
            elif tuple(info.shape) != shape:
                message = f"{name} is {list(info.shape)}, not {list(shape)}"
                problems.append(Problem(self._where, "target.mismatched_weights", message, _AGAIN))
            else:
                places.append(Place(name, path, start + info.begin, info.end - info.begin))
        return Raw(_TYPES[kind], (len(names), *shape), tuple(places))

    def _scheme(self, sources: Sequence[str]) -> Literal["plain", "int4", "fp8"]:
        """Of one of the model's tensors, by what the checkpoint holds of its parts."""
        stems = [source.removesuffix(".weight") for source in sources]
        if self.quantization.group and any(f"{stem}.weight_packed" in self._places for stem in stems):
            return "int4"
        if self.quantization.block and any(f"{stem}.weight_scale_inv" in self._places for stem in stems):
            return "fp8"
        return "plain"

    def _sources(self, whole: str, like: torch.Tensor) -> tuple[list[str], tuple[int, ...]]:
        """The names, in order, of what one of the model's tensors is made of, and the shape of each.

        Transformers fuses a layer's experts: [E, 2 * I, H] of gate and up, and [E, H, I] of down.
        """
        stem, _, kind = whole.rpartition(".experts.")
        if not stem or kind not in _FUSED or whole in self._places:
            return [whole], tuple(like.shape)
        parts = _FUSED[kind]
        names = [f"{stem}.experts.{expert}.{part}.weight" for expert in range(like.shape[0]) for part in parts]
        return names, (like.shape[1] // len(parts), like.shape[2])


def _headers(folder: Path) -> tuple[dict[Path, Header], list[Problem]]:
    """Every weight file's header; those that the index names must all be there."""
    paths = sorted(folder.glob("*.safetensors"))
    problems: list[Problem] = []
    if (folder / INDEX_FILE).exists():
        index = read_json_object(folder / INDEX_FILE, "the index of the weights")
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            message = f"weight_map is no object of file names in {INDEX_FILE}"
            return {}, [Problem(str(folder), "target.index", message, _AGAIN)]
        names = sorted(set(weight_map.values()))
        if outside := [name for name in names if not name or Path(name).name != name]:
            message = f"{INDEX_FILE} names {outside[0]!r:.80}, expected files of this folder"
            return {}, [Problem(str(folder), "target.index", message, _AGAIN)]
        paths = [folder / name for name in names]
    headers = {}
    for path in paths:
        try:
            headers[path] = read_header(path)
        except ProblemsError as error:
            problems += error.problems
    return headers, problems


def raw_bytes(recipes: Iterable[Recipe]) -> int:
    """Bytes that are read from the checkpoint for these parameters."""
    return sum(raw.size for recipe in recipes for raw in recipe.raws)


def decoded_bytes(recipes: Iterable[Recipe]) -> int:
    """Bytes that these parameters take in the model's types."""
    return sum(recipe.size for recipe in recipes)
