"""Training checkpoints: whole or absent, safetensors and JSON only.

`<run>/checkpoints/step-<8 digits>/` holds `draft.safetensors` (the trainable weights, float32), `optimizer.safetensors`
(the optimizer's moments in the types that they have in memory, named `<parameter>.<moment>`) and `state.json`. The
folder appears by one rename after its files are synced, so a kill at any moment leaves the checkpoints before it.
Sample order and learning rate are functions of the step, so they are not stored.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from eagle3.config import MomentKind
from eagle3.data.tensor_file import save_tensors
from eagle3.errors import Problem, ProblemsError, problem_error
from eagle3.files import TEMPORARY_SUFFIX, atomic_folder, read_json, write_json_atomic
from eagle3.train.moments import Layout, state_layout

FORMAT = "eagle3-checkpoint"
FORMAT_VERSION = 1
WEIGHTS_FILE = "draft.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"


@dataclass(frozen=True)
class Best:
    """The checkpoint of the best evaluation; both numbers are None in a run that holds nothing out."""

    checkpoint: str
    acceptance_length: float | None
    loss: float | None

    @property
    def rank(self) -> tuple[float, float]:
        """Greater is better: acceptance length, then less loss."""
        length = -math.inf if self.acceptance_length is None else self.acceptance_length
        return length, -math.inf if self.loss is None else -self.loss


@dataclass(frozen=True)
class Plateau:
    """Where early stopping stands: the acceptance length of the last improvement, and the evaluations since."""

    acceptance_length: float | None
    evaluations: int


@dataclass(frozen=True)
class TrainState:
    """What a resumed run needs besides weights and moments.

    Attributes:
        step: steps of the schedule done, over all epochs, skipped ones included.
        skipped: of these, the ones without a loss term, which changed nothing.
        processes: ranks that trained.
        data_digest: digest of the training and held-out samples.
        best: best checkpoint so far; its name may be this checkpoint's own.
        order: version of the order of samples, see `eagle3.data.batch_plan`; checkpoints from before it was written
            have 1.
        plateau: of early stopping; None without it, and before its first evaluation.
    """

    step: int
    skipped: int
    processes: int
    data_digest: str
    best: Best | None = None
    order: int = 1
    plateau: Plateau | None = None

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "plateau" or value is not None}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint read back: weights and moments by name, on the CPU."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: TrainState


def checkpoints_folder(run: Path) -> Path:
    return run / "checkpoints"


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def list_checkpoints(run: Path) -> list[Path]:
    """Checkpoint folders of a run, oldest first; what a kill left half-written is not among them."""
    found = checkpoints_folder(run).glob("step-*")
    return sorted(path for path in found if not path.name.endswith(TEMPORARY_SUFFIX))


def save_checkpoint(
    run: Path, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], state: TrainState
) -> Path:
    """Writes the checkpoint of `state.step` whole, or not at all.

    Raises:
        ProblemsError: the disk is full, read-only or not writable.
    """
    folder = checkpoints_folder(run) / checkpoint_name(state.step)
    with atomic_folder(folder) as temporary:
        for name, tensors in ((WEIGHTS_FILE, weights), (OPTIMIZER_FILE, optimizer)):
            save_tensors({key: tensor.detach().contiguous() for key, tensor in tensors.items()}, temporary / name)
        sizes = {name: (temporary / name).stat().st_size for name in (WEIGHTS_FILE, OPTIMIZER_FILE)}
        header = {"format": FORMAT, "format_version": FORMAT_VERSION, "files": sizes}
        write_json_atomic(temporary / STATE_FILE, header | state.to_dict())
    return folder


def load_checkpoint(folder: Path) -> Checkpoint:
    """Reads a checkpoint.

    Raises:
        ProblemsError: kinds `checkpoint.damaged`, `checkpoint.format`, `file.missing`, `file.not_json`.
    """
    state = load_state(folder)
    return Checkpoint(_load(folder / WEIGHTS_FILE), _load(folder / OPTIMIZER_FILE), state)


def load_state(folder: Path) -> TrainState:
    """Reads `state.json` and holds the sizes of the other files against it; see `load_checkpoint`."""
    values = read_json(folder / STATE_FILE, "the state of a checkpoint")
    if isinstance(values, dict):
        values = {"order": 1, "plateau": None, **values}
    expected = {"format", "format_version", "files", *(field.name for field in fields(TrainState))}
    if not isinstance(values, dict) or set(values) != expected or values["format"] != FORMAT:
        message = f"does not hold exactly the keys {sorted(expected)} of {FORMAT}"
        raise problem_error(str(folder / STATE_FILE), "checkpoint.format", message, _fix(folder))
    if values["format_version"] != FORMAT_VERSION:
        message = f"format_version is {values['format_version']}, expected {FORMAT_VERSION}"
        raise problem_error(str(folder / STATE_FILE), "checkpoint.format", message, "use the release that wrote it")
    if wrong := _wrong_values(values, folder):
        message = f"cannot be: {', '.join(f'{key} {values[key]!r}' for key in wrong)}"
        raise problem_error(str(folder / STATE_FILE), "checkpoint.damaged", message, _fix(folder))
    problems = [
        Problem(str(folder / name), "checkpoint.damaged", f"has {size} bytes, expected {expected_size}", _fix(folder))
        for name, expected_size in values["files"].items()
        if (size := _size(folder / name)) != expected_size
    ]
    if problems:
        raise ProblemsError(problems)
    best = None if values["best"] is None else Best(**values["best"])
    plateau = None if values["plateau"] is None else Plateau(**values["plateau"])
    step, order = values["step"], values["order"]
    return TrainState(step, values["skipped"], values["processes"], values["data_digest"], best, order, plateau)


def remove_old_checkpoints(run: Path, keep: int, best: str | None) -> None:
    """Keeps the newest `keep` checkpoints and the one named `best`, and clears what a kill left half-written."""
    old = [path for path in list_checkpoints(run)[:-keep] if path.name != best]
    for path in old:
        path.replace(path.with_name(path.name + TEMPORARY_SUFFIX))
    for leftover in checkpoints_folder(run).glob(f"*{TEMPORARY_SUFFIX}"):
        shutil.rmtree(leftover)


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimizer's state as `<parameter>.<moment>`; empty before the first step."""
    return {
        f"{name}.{moment}": value
        for name, parameter in model.named_parameters()
        for moment, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    kind: MomentKind,
    updates: int,
    folder: Path = Path(),
    place: Callable[[Tensor, Tensor], Tensor] = lambda parameter, value: value,
) -> None:
    """Puts back what `optimizer_tensors` gave, every parameter or none.

    Args:
        kind: what this optimizer keeps.
        updates: steps that it took; 0: there is no state yet.
        folder: of the checkpoint, for messages.
        place: what is kept of a parameter's whole tensor, such as a shard.

    Raises:
        ProblemsError: see `check_optimizer_tensors`.
    """
    if not tensors and not updates:
        return
    names = {parameter: name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    shapes = {names[parameter]: parameter.shape for parameter in parameters}
    layouts = check_optimizer_tensors(shapes, tensors, kind, updates, folder)
    state: dict[int, Any] = {
        index: {
            moment: place(parameter, tensors[f"{names[parameter]}.{moment}"]) for moment in layouts[names[parameter]]
        }
        for index, parameter in enumerate(parameters)
    }
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def check_optimizer_tensors(
    shapes: Mapping[str, torch.Size],
    tensors: Mapping[str, Tensor],
    kind: MomentKind,
    updates: int,
    folder: Path,
) -> dict[str, Layout]:
    """What each parameter's state consists of, its count of steps included.

    Args:
        shapes: of the trained parameters, by name.

    Raises:
        ProblemsError: kind `checkpoint.moments`, listing tensors that are missing, unknown or of another shape or type,
            and counts of other steps.
    """
    layouts: dict[str, Layout] = {name: state_layout(name, shape, kind) for name, shape in shapes.items()}
    expected = {
        f"{name}.{moment}": _described(*form) for name, layout in layouts.items() for moment, form in layout.items()
    }
    found = {name: _described(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    wrong = [
        f"{name} is {found.get(name, 'missing')}, expected {form}"
        for name, form in expected.items()
        if found.get(name) != form
    ]
    wrong += [f"{name} is unknown" for name in sorted(set(tensors) - set(expected))]
    steps = {name: float(tensors[name]) for name in expected if name.endswith(".step") and not wrong}
    wrong += [f"{name} is {step:g}, expected {updates}" for name, step in steps.items() if step != updates]
    if wrong:
        message = f"not {kind} moments of this model: {'; '.join(wrong)}"
        raise problem_error(str(folder / OPTIMIZER_FILE), "checkpoint.moments", message, _fix(folder))
    return layouts


def _described(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _wrong_values(values: Mapping[str, Any], folder: Path) -> list[str]:
    """Keys of `state.json` that hold what no run writes."""
    wrong = [
        key for key in ("step", "skipped", "processes", "order") if type(values[key]) is not int or values[key] < 0
    ]
    if not wrong and folder.name != checkpoint_name(values["step"]):
        wrong.append("step")
    if not isinstance(values["files"], dict) or set(values["files"]) != {WEIGHTS_FILE, OPTIMIZER_FILE}:
        wrong.append("files")
    if not _is_best(values["best"]):
        wrong.append("best")
    if not _is_plateau(values["plateau"]):
        wrong.append("plateau")
    return wrong


def _is_plateau(value: Any) -> bool:
    if value is None:
        return True
    if not isinstance(value, dict) or set(value) != {field.name for field in fields(Plateau)}:
        return False
    count = value["evaluations"]
    return type(value["acceptance_length"]) in (int, float, type(None)) and type(count) is int and count >= 0


def _is_best(value: Any) -> bool:
    if value is None:
        return True
    if not isinstance(value, dict) or set(value) != {field.name for field in fields(Best)}:
        return False
    numbers = (value["acceptance_length"], value["loss"])
    return isinstance(value["checkpoint"], str) and all(type(item) in (int, float, type(None)) for item in numbers)


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise problem_error(str(path), "checkpoint.damaged", f"cannot be read: {error}", _fix(path.parent)) from None


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _fix(folder: Path) -> str:
    return f"delete {folder}; training then goes on from the checkpoint before it"
