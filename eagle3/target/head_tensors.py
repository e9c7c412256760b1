"""A target's embedding, final norm and head, read from its checkpoint without the rest of it.

The folder needs only the weight files that hold these three. Shapes: V target vocab, H target hidden.
"""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

import torch
from safetensors import safe_open

from eagle3.config import TargetConfig
from eagle3.errors import Problem, raise_problems
from eagle3.files import read_json_object
from eagle3.target.resolve import TargetFiles, find_target
from eagle3.target.streaming.checkpoint import INDEX_FILE
from eagle3.wiring.safetensors_header import TensorInfo, read_header

HEAD = "lm_head.weight"
_PLAIN = {"F32", "BF16", "F16"}
_FIX = "download the files that hold it (the checkpoint's index names them), or correct its config.json"


def find_target_with_head(target: TargetConfig, download: bool = True) -> TargetFiles:
    """As `find_target`, but of a target on the hub only those weight files are downloaded that hold the head.

    Raises:
        ProblemsError: as `find_target`.
    """
    files = find_target(target, weights=False, download=download)
    index = files.folder / INDEX_FILE
    if not index.exists():
        return find_target(target, weights=["model.safetensors"], download=download)
    places = read_json_object(index, "the index of the target's weights").get("weight_map")
    places = places if isinstance(places, dict) else {}
    holding = {places.get(name) for name, _ in _wanted(files, torch.float32, places).values()}
    return find_target(target, weights=sorted(file for file in holding if isinstance(file, str)), download=download)


def read_head_tensors(files: TargetFiles, target: TargetConfig) -> dict[str, torch.Tensor]:
    """`embed_tokens.weight` [V, H], `norm.weight` [H] and, unless tied to the first, `lm_head.weight` [V, H].

    On the CPU in `target.dtype`, equal to what `TargetSpec.head_tensors` gives of the loaded model.

    Raises:
        ProblemsError: kinds `target.missing_weights`, `target.mismatched_weights`, `target.quantized`, for each of
            them; a weight file is damaged.
    """
    dtype = getattr(torch, target.dtype)
    places = check_head_tensors(files, target)
    wanted = _wanted(files, dtype, places)
    tensors = {key: read_tensor(places[name][0], name).to(dtype) for key, (name, _) in wanted.items()}
    if (
        files.text_config.get("tie_word_embeddings")
        and HEAD in tensors
        and torch.equal(tensors[HEAD], tensors["embed_tokens.weight"])
    ):
        del tensors[HEAD]
    return tensors


def check_head_tensors(files: TargetFiles, target: TargetConfig) -> dict[str, tuple[Path, TensorInfo]]:
    """Where each tensor of the checkpoint lies; refuses one that lacks any of these three.

    Raises:
        ProblemsError: as `read_head_tensors`; only headers are read.
    """
    places = tensor_places(files.folder)
    wanted = _wanted(files, getattr(torch, target.dtype), places)
    problems = (tensor_problem(files.folder, name, shape, places.get(name)) for name, shape in wanted.values())
    raise_problems(problem for problem in problems if problem is not None)
    return places


def tensor_places(folder: Path) -> dict[str, tuple[Path, TensorInfo]]:
    """Each tensor of a checkpoint's weight files: its file, and what the header says of it."""
    return {
        name: (path, info)
        for path in sorted(folder.glob("*.safetensors"))
        for name, info in read_header(path).tensors.items()
    }


def has_all_weights(folder: Path) -> bool:
    """Whether every weight file that a checkpoint's index names is there."""
    index = folder / INDEX_FILE
    if not index.exists():
        return (folder / "model.safetensors").exists()
    places = read_json_object(index, "the index of the target's weights").get("weight_map")
    return isinstance(places, dict) and all((folder / str(name)).exists() for name in set(places.values()))


def _wanted(files: TargetFiles, dtype: torch.dtype, there: Container[str]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Each tensor's name in the checkpoint and its shape; of a tied target the head only if it is `there` all the same,
    since Transformers then uses that."""
    model = files.spec.empty(files.folder, dtype)
    names = {module: name for name, module in model.named_modules()}
    modules = {
        "embed_tokens.weight": model.get_input_embeddings(),
        "norm.weight": files.spec.final_norm(model),
        HEAD: model.get_output_embeddings(),
    }
    wanted = {
        key: (f"{files.spec.weight_prefix}{names[module]}.weight", tuple(module.state_dict()["weight"].shape))
        for key, module in modules.items()
    }
    if model.config.tie_word_embeddings and wanted[HEAD][0] not in there:
        del wanted[HEAD]
    return wanted


def tensor_problem(
    folder: Path, name: str, shape: tuple[int, ...], found: tuple[Path, TensorInfo] | None
) -> Problem | None:
    """What is wrong with a tensor that a checkpoint is to have, plain and in this shape, if anything."""
    if found is None:
        return Problem(str(folder), "target.missing_weights", f"there is no {name}", _FIX)
    info = found[1]
    if info.dtype not in _PLAIN:
        fix = "use a checkpoint that keeps it in a plain floating type"
        return Problem(str(folder), "target.quantized", f"{name} is {info.dtype}", fix)
    if tuple(info.shape) != shape:
        message = f"{name} is {list(info.shape)}, not {list(shape)}"
        return Problem(str(folder), "target.mismatched_weights", message, _FIX)
    return None


def read_tensor(path: Path, name: str) -> torch.Tensor:
    """A tensor of a safetensors file."""
    with safe_open(path, "pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
    return tensor
