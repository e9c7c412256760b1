"""Muon for the layer's matrices: which, how far they move, what is kept, resumes, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from eagle3.config import OptimSection, TrainConfig
from eagle3.draft.fused.memory import _CUBLAS, Types
from eagle3.draft.model import DraftModel
from eagle3.errors import ProblemsError
from eagle3.train.checkpoint import list_checkpoints, load_optimizer_tensors, optimizer_tensors
from eagle3.train.engines.sharded import refuse_whole_parameters
from eagle3.train.memory import Place, Run, run_ledger
from eagle3.train.moments import moment_bytes
from eagle3.train.muon import check_muon, muon_workspace
from eagle3.train.optim import make_optimizer, set_learning_rate
from eagle3.train.trainer import run_training
from tests.stores import train_config, write_random_store
from tests.unit.draft.cases import make_config
from tests.unit.draft.storages import StorageCount

from .test_memory import LARGE, NOTHING, make_module
from .test_resume import Stopped, assert_same_run, stop_after

HIDDEN = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def make_model() -> DraftModel:
    model = DraftModel(make_config())
    model.init_weights(0)
    return model


def give_gradients(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator)


def muons(model: DraftModel) -> dict[str, torch.nn.Parameter]:
    return {name: value for name, value in model.named_parameters() if name.split(".")[-2] in HIDDEN}


def test_the_layers_matrices_are_muons_and_all_else_adamws() -> None:
    model = make_model()
    optimizer = make_optimizer(model, OptimSection(name="muon"), fused=False)
    give_gradients(model, 1)
    optimizer.step()
    kept = optimizer_tensors(optimizer, model)
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    with_momentum = {name.removesuffix(".momentum_buffer") for name in kept if name.endswith("momentum_buffer")}
    assert with_momentum == set(muons(model)) and len(with_momentum) == 7
    assert {name.removesuffix(".exp_avg") for name in kept if name.endswith(".exp_avg")} == trained - with_momentum
    assert {"fc.weight", "lm_head.weight", "norm.weight"} <= trained - with_momentum


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_it_takes_torchs_steps_at_its_rates(adjust: str) -> None:
    optim = OptimSection(
        name="muon",
        learning_rate=0.01,
        muon_learning_rate=0.03,
        muon_adjust=adjust,
        weight_decay=0.1,
        muon_momentum=0.9,
    )  # type: ignore[arg-type]
    mine, theirs = make_model(), make_model()
    optimizer = make_optimizer(mine, optim, fused=False)
    hidden = muons(theirs)
    others = [value for name, value in theirs.named_parameters() if value.requires_grad and name not in hidden]
    matrices, vectors = ([value for value in others if (value.ndim == 2) == wanted] for wanted in (True, False))
    muon = torch.optim.Muon(list(hidden.values()), weight_decay=0.1, momentum=0.9, adjust_lr_fn=adjust)
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, betas=optim.betas, eps=optim.eps)
    for step in range(4):
        for model in (mine, theirs):
            give_gradients(model, step)
        rate = 0.01 / (step + 1)
        set_learning_rate(optimizer, rate)
        set_learning_rate(muon, 0.03 / 0.01 * rate)
        set_learning_rate(adamw, rate)
        for each in (optimizer, muon, adamw):
            each.step()
    state = theirs.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in mine.state_dict().items())


def test_a_step_turns_every_singular_value_to_about_one_and_is_as_large_as_adamws() -> None:
    """arXiv 2502.16982: 0.2 x the rate, root mean square; by singular values, computed apart from the iteration."""
    model = make_model()
    optim = OptimSection(name="muon", learning_rate=1e-2)
    optimizer = make_optimizer(model, optim, fused=False)
    before = {name: value.detach().clone() for name, value in muons(model).items()}
    give_gradients(model, 3)
    gradients = {name: value.grad.clone() for name, value in muons(model).items() if value.grad is not None}
    optimizer.step()
    for name, value in muons(model).items():
        step = (before[name] - value.detach()) / (1e-2 * 0.2 * max(value.shape) ** 0.5)
        left, _, right = torch.linalg.svd(gradients[name], full_matrices=False)
        along = (left.T @ step @ right.T).diagonal()
        assert (along > 0.5).all() and (along < 1.5).all(), name
        torch.testing.assert_close(left @ along.diag() @ right, step, rtol=0, atol=0.05)


def test_what_it_keeps_and_takes_is_what_the_plan_counts() -> None:
    module = make_module()
    with torch.device("meta"):
        model = DraftModel(LARGE)
    optimizer, count = make_optimizer(model, OptimSection(name="muon"), fused=False), StorageCount()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    kept = sum(v.nbytes for state in optimizer.state.values() for name, v in state.items() if name != "step")
    count.know([value for state in optimizer.state.values() for value in state.values()])
    count.know([*model.parameters(), *(value.grad for value in model.parameters() if value.grad is not None)])
    with count:
        optimizer.step()
    ledger = run_ledger(Run(LARGE, module.ttt, Types(), moments="muon"), NOTHING, Place(1, NOTHING))
    assert ledger.groups("update")["moments"] == kept == moment_bytes(model, "muon")
    both = sum(value.numel() for value in model.parameters() if value.requires_grad) * 8
    assert kept == both - 4 * sum(value.numel() for value in muons(model).values())
    assert count.peak == muon_workspace(LARGE) == ledger.groups("update")["workspace"] - _CUBLAS


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return write_random_store(tmp_path / "store", [(8, (2, 8)), (9, (8, 9)), (12, (3, 12)), (7, (1, 7))] * 3)


def config_for(store: Path, output: Path, **values: object) -> TrainConfig:
    optim = {"name": "muon", "learning_rate": 1e-2, "muon_learning_rate": 2e-2}
    settings: dict[str, object] = {"batch_size": 2, "epochs": 3, "save_every": 2, "eval_every": 3, "eval_fraction": 0.2}
    return train_config(store, output, **{**settings, "optim": optim, **values})


def test_runs_learn_and_resume_bit_for_bit(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for steps in (3, 5, 8):
        with monkeypatch.context() as patch, pytest.raises(Stopped):
            stop_after(steps, patch)
            run_training(config_for(store, tmp_path / "run"))
    run_training(config_for(store, tmp_path / "run"))
    whole = run_training(config_for(store, tmp_path / "whole"))
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert whole.last_loss < whole.first_loss - 0.2
    stored = load_file(list_checkpoints(tmp_path / "run")[-1] / "optimizer.safetensors")
    assert sum(name.endswith(".momentum_buffer") for name in stored) == 7
    with pytest.raises(ProblemsError, match=r"optim\.name is 'muon' there, 'adamw' now"):
        run_training(config_for(store, tmp_path / "run", optim={"learning_rate": 1e-2}))


def test_a_warm_start_begins_its_momentum_anew(store: Path, tmp_path: Path) -> None:
    run_training(config_for(store, tmp_path / "first", epochs=1))
    result = run_training(config_for(store, tmp_path / "second", epochs=1, init_from=str(tmp_path / "first")))
    assert result.steps > 0 and result.last_loss == result.last_loss


def test_damaged_moments_are_named() -> None:
    model = make_model()
    optimizer = Accelerator(cpu=True).prepare_optimizer(make_optimizer(model, OptimSection(name="muon"), fused=False))
    give_gradients(model, 1)
    optimizer.step()
    tensors = optimizer_tensors(optimizer, model)
    name = "midlayer.mlp.up_proj.weight"
    tensors[f"{name}.exp_avg"] = tensors.pop(f"{name}.momentum_buffer")
    with pytest.raises(ProblemsError, match=r"(?s)not muon moments.*up_proj\.weight\.momentum_buffer is missing"):
        load_optimizer_tensors(optimizer, model, tensors, "muon", 1)


@pytest.mark.parametrize("engine", ["fsdp2", "deepspeed_zero2", "deepspeed_zero3"])
def test_engines_with_shards_refuse_it(engine: str) -> None:
    with pytest.raises(ProblemsError, match=rf"train\.engine_optimizer.*{engine} has shards(?s:.*)ddp\.yaml"):
        refuse_whole_parameters(engine, OptimSection(name="muon"))
    refuse_whole_parameters(engine, OptimSection())


def test_a_torch_without_it_is_refused(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    assert check_muon(OptimSection()) == []
    with pytest.raises(ProblemsError, match=r"train\.muon(?s:.*)torch 2\.9"):
        run_training(config_for(store, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"name": "muon", "moments": "float8"}, "leave out optim.moments"),
        ({"muon_momentum": 0.9, "muon_learning_rate": 1e-3}, "muon_learning_rate=0.001 and optim.muon_momentum=0.9"),
        ({"name": "sgd"}, "adamw"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(tmp_path: Path, values: dict[str, object], said: str) -> None:
    with pytest.raises(ProblemsError, match=said):
        train_config(tmp_path, tmp_path, optim=values)
