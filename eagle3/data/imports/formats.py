"""What other trainers' dumps look like on disk: names, keys and shapes. docs/import.md says where each was read.

Legend: T tokens of a sample, L layers in a file (the aux ones and, last, that of the last hidden states), H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from eagle3.data.imports.sample import RawSample, unbatched
from eagle3.data.imports.torch_file import load_tensors, opened
from eagle3.errors import Problem, problem_error, raise_problems
from eagle3.wiring.safetensors_header import read_header

_SCALES = "hidden_states_scales"
_SEE = "see docs/import.md for what is read; give another format, or leave it out with skip_bad=true"


@dataclass(frozen=True)
class DumpFormat:
    """One trainer's dump.

    Attributes:
        name: as `format` takes it.
        maker: whose it is, in words.
        suffixes: of its files.
        read: a file's sample; raises `ProblemsError`.
    """

    name: str
    maker: str
    suffixes: tuple[str, ...]
    read: Callable[[Path], RawSample]


def read_specforge(path: Path) -> RawSample:
    """`aux_hidden_state` [1, T, A * H], `hidden_state` [1, T, H], `input_ids` [T], `loss_mask` [T]."""
    values = load_tensors(path)
    _need(path, values, "input_ids", "loss_mask", "aux_hidden_state", "hidden_state")
    return _sample(values["input_ids"], values["loss_mask"], values["aux_hidden_state"], values["hidden_state"])


def read_modelopt(path: Path) -> RawSample:
    """`aux_hidden_states` [T, A * H], `hidden_states` [T, H], `input_ids` [T], and `loss_mask` [T] in newer dumps."""
    values = load_tensors(path)
    _need(path, values, "input_ids", "aux_hidden_states", "hidden_states", optional=("loss_mask",))
    return _sample(values["input_ids"], values.get("loss_mask"), values["aux_hidden_states"], values["hidden_states"])


def read_speculators(path: Path) -> RawSample:
    """Safetensors: `hidden_states` [T, L, H], `token_ids` [T]. Older `.pt`: a list of L [T, H], with a mask."""
    if path.suffix == ".pt":
        return _read_speculators_list(path)
    values = _safetensors(path)
    if _SCALES in values:
        message = f"its states are fp8 with scales ({_SCALES})"
        raise problem_error(str(path), "import.dtype", message, "dump them without fp8: quantized states are not read")
    _need(path, values, "token_ids", "hidden_states", optional=("loss_mask",))
    states = unbatched(values["hidden_states"], 3)
    if states.ndim != 3:
        message = f"hidden_states are {list(states.shape)}, expected [tokens, layers, hidden]"
        raise problem_error(str(path), "import.shape", message, _SEE)
    return _sample(values["token_ids"], values.get("loss_mask"), states[:, :-1].flatten(1), states[:, -1])


def _read_speculators_list(path: Path) -> RawSample:
    values = load_tensors(path)
    states = values.get("hidden_states")
    if not isinstance(states, list) or len(states) < 2 or not all(_is_plain(rows) for rows in states):
        message = f"hidden_states is {_said(states)}, expected a list of a tensor a layer, the last one's at its end"
        raise problem_error(str(path), "import.key", message, _SEE)
    _need(path, values, "input_ids", optional=("loss_mask",))
    rows = [unbatched(layer, 2) for layer in states]
    if len({layer.shape for layer in rows}) > 1 or rows[0].ndim != 2:
        message = f"hidden_states are {[list(layer.shape) for layer in rows]}, expected [tokens, hidden] each"
        raise problem_error(str(path), "import.shape", message, _SEE)
    return _sample(values["input_ids"], values.get("loss_mask"), torch.cat(rows[:-1], dim=-1), rows[-1])


SPECFORGE = DumpFormat("specforge", "SpecForge", (".ckpt", ".ckpt.gz"), read_specforge)
SPECULATORS = DumpFormat("speculators", "speculators", (".safetensors", ".pt"), read_speculators)
MODELOPT = DumpFormat("modelopt", "Model-Optimizer", (".pt",), read_modelopt)
FORMATS = {dump.name: dump for dump in (SPECFORGE, SPECULATORS, MODELOPT)}


def format_of_pt(values: Mapping[str, Any]) -> DumpFormat:
    """Whose `.pt` file this is; both Model-Optimizer and older versions of speculators write such."""
    return SPECULATORS if isinstance(values.get("hidden_states"), list) else MODELOPT


def _safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Its tensors, mapped from disk.

    Raises:
        ProblemsError: kinds `safetensors.*`, `file.unreadable`, `import.damaged`.
    """
    read_header(path)
    try:
        with opened(path), safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    except SafetensorError as error:
        raise problem_error(str(path), "import.damaged", f"cannot be read: {error}", _SEE) from None


def _need(path: Path, values: Mapping[str, Any], *required: str, optional: tuple[str, ...] = ()) -> None:
    """Refuses a file that lacks one of these keys, or has something else than a plain tensor there."""
    problems = []
    for key in (*required, *optional):
        value = values.get(key)
        if key in required and key not in values:
            message = f"has no {key}; its keys are {', '.join(map(str, values)) or 'none'}"
            problems.append(Problem(str(path), "import.key", message, _SEE))
        elif not _is_plain(value) and (key in required or value is not None):
            problems.append(Problem(str(path), "import.key", f"{key} is {_said(value)}, expected a tensor", _SEE))
    raise_problems(problems)


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized


def _said(value: Any) -> str:
    return f"a {type(value).__name__}" if value is not None else "absent"


def _sample(ids: torch.Tensor, mask: torch.Tensor | None, aux: torch.Tensor, last: torch.Tensor) -> RawSample:
    return RawSample(
        input_ids=unbatched(ids, 1),
        loss_mask=None if mask is None else unbatched(mask, 1),
        aux_hidden_states=unbatched(aux, 2).detach(),
        last_hidden_states=unbatched(last, 2).detach(),
    )
