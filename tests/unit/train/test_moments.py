"""The bytes that moments take, and moments through checkpoints."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from eagle3.config import Moments, OptimSection
from eagle3.draft.config import DraftConfig, RopeConfig
from eagle3.draft.model import DraftModel
from eagle3.errors import ProblemsError
from eagle3.files import size_text
from eagle3.train.checkpoint import TrainState, load_checkpoint, load_optimizer_tensors, optimizer_tensors
from eagle3.train.checkpoint import save_checkpoint as save
from eagle3.train.moments import BLOCK, moment_bytes, moment_layout
from eagle3.train.optim import make_optimizer, set_learning_rate
from tests.bits import same_bits

NARROW: list[Moments] = ["bfloat16", "float8"]
ALL: list[Moments] = ["float32", *NARROW]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"fc": nn.Linear(70, 71), "norm": nn.RMSNorm(70), "frozen": nn.Embedding(70, 70)})


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    model["frozen"].weight.requires_grad_(False)
    for number in steps:
        optimizer.zero_grad()
        inputs = torch.randn(9, 70, generator=torch.Generator().manual_seed(number))
        model["fc"](model["norm"](inputs)).square().mean().backward()
        optimizer.step()


def fresh(moments: Moments, prepare: Callable[[torch.optim.Optimizer], object] = lambda optimizer: optimizer) -> tuple:
    model = make_model()
    model["frozen"].weight.requires_grad_(False)
    return model, prepare(make_optimizer(model, OptimSection(moments=moments, weight_decay=0.1), fused=False))


@pytest.mark.parametrize("moments", ALL)
def test_through_files_any_number_of_resumes_continue_bit_for_bit_in_the_stored_types(
    moments: Moments, tmp_path: Path
) -> None:
    prepare = Accelerator(cpu=True).prepare_optimizer
    whole, optimizer = fresh(moments)
    train(whole, optimizer, range(8))
    model, resumed = fresh(moments, prepare)
    for number in range(4):
        train(model, resumed, range(2 * number, 2 * number + 2))
        state = TrainState(number, 0, 1, "sha256:0")
        folder = save(tmp_path, model.state_dict(), optimizer_tensors(resumed, model), state)
        checkpoint = load_checkpoint(folder)
        model, resumed = fresh(moments, prepare)
        model.load_state_dict(checkpoint.weights)
        load_optimizer_tensors(resumed, model, checkpoint.optimizer, moments, 2 * number + 2)
    mine, theirs = optimizer_tensors(resumed, model), optimizer_tensors(optimizer, whole)
    assert mine.keys() == theirs.keys()
    assert all(same_bits(mine[name], theirs[name]) for name in theirs)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), whole.parameters(), strict=True))
    assert mine["fc.weight.exp_avg"].dtype == moment_layout(whole["fc"].weight.shape, moments)["exp_avg"][1]


@pytest.mark.parametrize("moments", NARROW)
def test_loaded_moments_are_a_copy(moments: Moments) -> None:
    model, optimizer = fresh(moments)
    train(model, optimizer, range(2))
    tensors = {name: value.clone() for name, value in optimizer_tensors(optimizer, model).items()}
    kept = copy.deepcopy(tensors)
    other, resumed = fresh(moments)
    load_optimizer_tensors(resumed, other, tensors, moments, 2)
    train(other, resumed, range(2, 4))
    assert all(same_bits(tensors[name], kept[name]) for name in kept)


@pytest.mark.parametrize("there", ALL)
@pytest.mark.parametrize("now", ALL)
def test_moments_of_another_type_are_refused_with_what_was_found_and_expected(there: Moments, now: Moments) -> None:
    model, optimizer = fresh(there)
    train(model, optimizer, range(1))
    tensors = optimizer_tensors(optimizer, model)
    other, resumed = fresh(now)
    if there == now:
        load_optimizer_tensors(resumed, other, tensors, now, 1)
        return
    type_there, type_now = (moment_layout(torch.Size([71, 70]), kind)["exp_avg"][1] for kind in (there, now))
    shown = [str(kind).removeprefix("torch.") for kind in (type_there, type_now)]
    expected = rf"fc\.weight\.exp_avg is {shown[0]} \[71, 70\], expected {shown[1]} \[71, 70\]"
    with pytest.raises(ProblemsError, match=rf"(?s)checkpoint\.moments.*not {now} moments.*{expected}"):
        load_optimizer_tensors(resumed, other, tensors, now, 1)


def test_scales_of_another_length_are_refused() -> None:
    model, optimizer = fresh("float8")
    train(model, optimizer, range(1))
    tensors = optimizer_tensors(optimizer, model)
    tensors["fc.weight.exp_avg_scale"] = tensors["fc.weight.exp_avg_scale"][:-1]
    with pytest.raises(ProblemsError, match=r"exp_avg_scale is float32 \[19\], expected float32 \[20\]"):
        load_optimizer_tensors(optimizer, model, tensors, "float8", 1)


@pytest.mark.parametrize("moments", ALL)
def test_the_bytes_are_those_of_the_moments(moments: Moments) -> None:
    model, optimizer = fresh(moments)
    train(model, optimizer, range(1))
    tensors = optimizer_tensors(optimizer, model)
    found = sum(value.nbytes for name, value in tensors.items() if not name.endswith(".step"))
    assert moment_bytes(model, moments) == found
    rest = (70 + 71) * 8
    scales = 2 * 4 * -(-4970 // BLOCK)
    assert found == rest + 4970 * {"float32": 8, "bfloat16": 4, "float8": 2}[moments] + scales * (moments == "float8")


def test_the_bytes_of_kimis_drafter_are_those_in_the_docs() -> None:
    shape = {"hidden_size": 7168, "intermediate_size": 40960, "num_attention_heads": 56, "num_key_value_heads": 8}
    shape |= {"head_dim": 128, "vocab_size": 163840, "draft_vocab_size": 32000, "num_aux": 3}
    limits = {"target_hidden_size": 7168, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072}
    with torch.device("meta"):
        model = DraftModel(DraftConfig(**shape, **limits, rope=RopeConfig(rope_theta=50000.0)))
    model.embed_tokens.requires_grad_(False)
    table = (Path(__file__).parents[3] / "docs/training.md").read_text(encoding="utf-8")
    count = model.config.parameter_counts()["trainable"]
    assert f"({count:,} trained)" in table
    for moments in ALL:
        size = moment_bytes(model, moments)
        assert f"| `{moments}` | {round(size / count, 3):g} | {size_text(size)} |" in table


@pytest.mark.parametrize("moments", NARROW)
def test_the_learning_rate_is_the_groups(moments: Moments) -> None:
    model, optimizer = fresh(moments)
    before = model["fc"].weight.detach().clone()
    set_learning_rate(optimizer, 0.0)
    train(model, optimizer, range(2))
    assert torch.equal(model["fc"].weight, before)
    assert optimizer.state[model["fc"].weight]["step"] == 2


@pytest.mark.parametrize("moments", ALL)
@pytest.mark.parametrize("count", [-1.0, 0.0, 1.5, 3.0, float("nan")])
def test_a_count_of_other_steps_is_refused(moments: Moments, count: float) -> None:
    model, optimizer = fresh(moments)
    train(model, optimizer, range(2))
    tensors = optimizer_tensors(optimizer, model)
    tensors["norm.weight.step"] = torch.tensor(count)
    with pytest.raises(ProblemsError, match=rf"norm\.weight\.step is {count:g}, expected 2"):
        load_optimizer_tensors(optimizer, model, tensors, moments, 2)


def test_moments_that_are_gone_are_missed_unless_no_step_was_taken() -> None:
    model, optimizer = fresh("float8")
    load_optimizer_tensors(optimizer, model, {}, "float8", 0)
    with pytest.raises(ProblemsError, match=r"fc\.weight\.step is missing"):
        load_optimizer_tensors(optimizer, model, {}, "float8", 1)
