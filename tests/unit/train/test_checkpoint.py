import errno
from pathlib import Path

import pytest
import torch
from torch import nn

import eagle3.train.checkpoint as checkpoint
from eagle3.config import OptimSection
from eagle3.data.tensor_file import save_tensors
from eagle3.errors import ProblemsError
from eagle3.files import read_json, write_json_atomic
from eagle3.train.checkpoint import (
    Best,
    TrainState,
    list_checkpoints,
    load_checkpoint,
    load_optimizer_tensors,
    optimizer_tensors,
    remove_old_checkpoints,
    save_checkpoint,
)
from eagle3.train.optim import make_optimizer
from tests.disks import small_disk


def save(run: Path, step: int, best: Best | None = None) -> Path:
    state = TrainState(step=step, skipped=1, processes=2, data_digest="sha256:0", best=best)
    return save_checkpoint(run, {"fc.weight": torch.full((2, 3), float(step))}, {}, state)


def test_weights_and_state_come_back(tmp_path: Path) -> None:
    folder = save(tmp_path, 7, Best("step-00000005", 1.25, 3.0))
    read = load_checkpoint(folder)
    assert read.state == TrainState(7, 1, 2, "sha256:0", Best("step-00000005", 1.25, 3.0))
    assert torch.equal(read.weights["fc.weight"], torch.full((2, 3), 7.0))


def test_best_is_by_acceptance_length_and_then_by_loss() -> None:
    ascending = [Best("a", None, None), Best("b", 1.1, 2.0), Best("c", 1.2, 9.0), Best("d", 1.2, 3.0)]
    assert sorted(reversed(ascending), key=lambda best: best.rank) == ascending


def test_resumed_moments_continue_bit_for_bit() -> None:
    def trained(steps: range, model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
        for step in steps:
            optimizer.zero_grad()
            (model(torch.arange(3.0) + step).square().sum()).backward()
            optimizer.step()

    def fresh() -> tuple[nn.Linear, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        return model, make_optimizer(model, OptimSection(weight_decay=0.1), fused=False)

    whole, optimizer = fresh()
    trained(range(5), whole, optimizer)
    first, optimizer = fresh()
    trained(range(3), first, optimizer)
    second, resumed = fresh()
    second.load_state_dict(first.state_dict())
    load_optimizer_tensors(resumed, second, optimizer_tensors(optimizer, first), "float32", 3)
    trained(range(3, 5), second, resumed)
    assert torch.equal(second.weight, whole.weight)
    assert torch.equal(second.bias, whole.bias)


def test_moments_of_another_model_are_refused_by_name() -> None:
    model = nn.Linear(3, 2)
    optimizer = make_optimizer(model, OptimSection(), fused=False)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    tensors = optimizer_tensors(optimizer, model)
    tensors["other.exp_avg"] = tensors.pop("bias.exp_avg")
    expected = r"bias\.exp_avg is missing, expected float32 \[2\]; other\.exp_avg is unknown"
    with pytest.raises(ProblemsError, match=expected):
        load_optimizer_tensors(optimizer, model, tensors, "float32", 1)


@pytest.mark.parametrize("name", ["draft.safetensors", "optimizer.safetensors"])
def test_a_truncated_file_is_refused_by_name_with_the_folder_to_delete(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, 1)
    file = folder / name
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ProblemsError, match=rf"(?s){name}.*expected.*delete .*step-00000001"):
        load_checkpoint(folder)


def test_a_garbled_header_is_a_named_problem(tmp_path: Path) -> None:
    file = save(tmp_path, 1) / "draft.safetensors"
    data = file.read_bytes()
    file.write_bytes(b"\xff" * 8 + data[8:])
    with pytest.raises(ProblemsError, match=r"checkpoint\.damaged"):
        load_checkpoint(file.parent)


def test_a_failed_write_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_tensors", full)
    with pytest.raises(ProblemsError, match=r"disk\.full"):
        save(tmp_path, 2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000001"]


def test_newest_and_best_are_kept_and_leftovers_cleared(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, step)
    (tmp_path / "checkpoints" / "step-00000009.tmp").mkdir()
    remove_old_checkpoints(tmp_path, keep=2, best="step-00000002")
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["step-00000002", "step-00000004", "step-00000005"]


@pytest.mark.parametrize(
    ("key", "value"),
    [("step", "1"), ("step", 2), ("skipped", -1), ("processes", None), ("files", {}), ("files", "x")]
    + [("best", value) for value in ("x", {}, {"checkpoint": 1, "acceptance_length": None, "loss": None})],
)
def test_a_state_that_no_run_writes_is_refused(tmp_path: Path, key: str, value: object) -> None:
    file = save(tmp_path, 1) / "state.json"
    write_json_atomic(file, {**read_json(file, "state"), key: value})
    with pytest.raises(ProblemsError, match=rf"checkpoint\.damaged.*state\.json: cannot be: {key}"):
        load_checkpoint(file.parent)


def test_an_error_of_the_file_system_is_an_os_error_although_safetensors_hides_it(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught:
        save_tensors({"a": torch.zeros(1)}, tmp_path / "absent" / "a.safetensors")
    assert caught.value.errno == errno.ENOENT


def test_a_disk_that_is_really_full_leaves_no_checkpoint(tmp_path: Path) -> None:
    with small_disk(tmp_path, "64k"):
        with pytest.raises(ProblemsError, match=r"disk\.full"):
            save_checkpoint(tmp_path, {"a": torch.zeros(1 << 16)}, {}, TrainState(1, 0, 1, "sha256:0"))
        assert not list((tmp_path / "checkpoints").iterdir())


def test_files_of_tensors_have_the_mode_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    save_tensors({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
    assert (tmp_path / "a.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode
