"""The optimizer's kernel on a GPU against the plain step on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from eagle3.config import Moments, OptimSection
from eagle3.train.checkpoint import list_checkpoints, load_optimizer_tensors, optimizer_tensors
from eagle3.train.moments import moment_bytes
from eagle3.train.optim import make_optimizer, set_learning_rate
from eagle3.train.rounded_adamw import Coefficients
from eagle3.train.trainer import run_training
from tests.stores import train_config, write_random_store

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NARROW: list[Moments] = ["bfloat16", "float8"]
SHAPES = [(64, 64), (1, 4097), (77, 131), (1000, 2048), (3, 5), (5000,)]


def make_model(device: str) -> nn.ParameterList:
    generator = torch.Generator().manual_seed(0)
    return nn.ParameterList(torch.randn(shape, generator=generator) for shape in SHAPES).to(device)


def make_gradients(step: int) -> list[torch.Tensor]:
    """Of very different sizes, also too small and too large for float32's squares, with zero blocks, NaN, infinity."""
    generator = torch.Generator().manual_seed(step)
    gradients = []
    for shape in SHAPES:
        size = 10.0 ** torch.randint(-14, 3, (shape[0], *[1] * (len(shape) - 1)), generator=generator)
        gradient = torch.randn(shape, generator=generator) * size * {3: 1e-20, 4: 1e20}.get(step, 1.0)
        if step == 2:
            gradient.view(-1)[:3000] = 0
        if step == 6:
            gradient.view(-1)[-3:] = torch.tensor([torch.nan, torch.inf, -torch.inf])
        gradients.append(gradient)
    return gradients


def take_steps(model: nn.ParameterList, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        set_learning_rate(optimizer, 1e-3 / step)
        for parameter, gradient in zip(model, make_gradients(step), strict=True):
            parameter.grad = gradient.to(parameter.device)
        optimizer.step()


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Bytes on the CPU, with one NaN for all NaNs."""
    shown = {}
    for name, tensor in tensors.items():
        value = tensor.detach().cpu().reshape(-1)
        if value.dtype != torch.float8_e4m3fn:
            value = torch.where(value.isnan(), torch.nan, value)
        shown[name] = value.view(torch.uint8)
    return shown


@pytest.mark.parametrize("moments", NARROW)
def test_the_kernel_takes_the_plain_steps_bit_for_bit(moments: Moments) -> None:
    found = {}
    for device in ("cpu", "cuda"):
        model = make_model(device)
        optimizer = make_optimizer(model, OptimSection(moments=moments, weight_decay=0.1), fused=False)
        take_steps(model, optimizer, range(1, 9))
        tensors = dict(model.named_parameters()) | optimizer_tensors(optimizer, model)
        small = {name: value for name, value in tensors.items() if int(name.split(".")[0]) >= 4}
        for name in small:  # plain on both: a GPU fuses multiplications and additions of its own accord
            tensors.pop(name)
        found[device] = bits(tensors)
        found[f"{device} small"] = {name: value.detach().cpu() for name, value in small.items()}
    assert found["cpu"].keys() == found["cuda"].keys()
    different = [name for name, value in found["cpu"].items() if not torch.equal(value, found["cuda"][name])]
    assert different == []
    for name, value in found["cpu small"].items():
        torch.testing.assert_close(found["cuda small"][name], value, rtol=1e-5, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("moments", NARROW)
def test_a_gradient_at_any_address_gives_the_same_step(moments: Moments) -> None:
    """DDP's gradients are views of a bucket, at multiples of 4 bytes."""
    found = []
    for offset in (0, 1):
        parameter = nn.Parameter(torch.ones(1, 4096, device="cuda"))
        optimizer = make_optimizer(nn.ParameterList([parameter]), OptimSection(moments=moments), fused=False)
        generator = torch.Generator("cuda").manual_seed(0)
        bucket = torch.empty(4097, device="cuda")
        parameter.grad = bucket[offset : 4096 + offset][None]
        parameter.grad.copy_(torch.randn(1, 4096, generator=generator, device="cuda"))
        optimizer.step()
        found.append(parameter.detach().clone())
    assert torch.equal(*found)


@pytest.mark.parametrize("moments", NARROW)
def test_nothing_is_compiled_anew_as_steps_and_rates_change(moments: Moments) -> None:
    from eagle3.train.kernels import adamw

    parameter = nn.Parameter(torch.ones(1, 5000, device="cuda"))
    optimizer = make_optimizer(nn.ParameterList([parameter]), OptimSection(moments=moments), fused=False)
    parameter.grad = torch.ones(1, 5000, device="cuda")
    optimizer.step()
    kernels = sum(len(entry[0]) for entry in adamw._step.device_caches.values())
    assert kernels > 0
    for step in range(2, 40):
        set_learning_rate(optimizer, 0.0 if step == 5 else 1.0 if step == 6 else 1e-3 / step)
        optimizer.step()
    assert sum(len(entry[0]) for entry in adamw._step.device_caches.values()) == kernels


def test_elements_beyond_two_to_the_31_are_stepped() -> None:
    """The last elements of a parameter of 2^31 + 300, whose first 2^31 are left alone by a gradient of zero."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB")
    from eagle3.train.kernels.adamw import fused_step
    from eagle3.train.moments import moment_layout
    from eagle3.train.rounding import make_keys

    count = 2**31 + 300
    weight = torch.zeros(1, count, device="cuda")
    gradient = torch.zeros(1, count, device="cuda")
    gradient[0, -300:] = 1.0
    layout = moment_layout(weight.shape, "float8")
    state = {name: torch.zeros(shape, dtype=dtype, device="cuda") for name, (shape, dtype) in layout.items()}
    group = {"betas": (0.9, 0.95), "lr": 1e-3, "weight_decay": 0.0, "eps": 1e-8}
    fused_step(weight, gradient, state, Coefficients.of(group, 1), make_keys(1, 0))
    assert torch.allclose(weight[0, -300:], torch.tensor(-1e-3, device="cuda"))
    assert not weight[0, :-300].any()
    assert (state["exp_avg"][0, -300:].float() > 0).all()


@pytest.mark.parametrize("moments", ["float32", *NARROW])
def test_the_bytes_on_the_card_are_those_that_are_said(moments: Moments) -> None:
    model = nn.ParameterList([torch.zeros(4096, 4096), torch.zeros(4096)]).to("cuda")
    optimizer = make_optimizer(model, OptimSection(moments=moments), fused=True)
    for parameter in model:
        parameter.grad = torch.zeros_like(parameter)
    before = torch.cuda.memory_allocated()
    optimizer.step()
    assert 0 <= torch.cuda.memory_allocated() - before - moment_bytes(model, moments) < 8192


@pytest.mark.parametrize("moments", NARROW)
def test_moments_travel_from_the_card_to_the_cpu_and_back(moments: Moments) -> None:
    model = make_model("cuda")
    optimizer = make_optimizer(model, OptimSection(moments=moments), fused=False)
    take_steps(model, optimizer, range(1, 3))
    tensors = {name: value.cpu() for name, value in optimizer_tensors(optimizer, model).items()}
    other = make_model("cuda")
    other.load_state_dict(model.state_dict())
    resumed = make_optimizer(other, OptimSection(moments=moments), fused=False)
    load_optimizer_tensors(resumed, other, tensors, moments, 2)
    take_steps(model, optimizer, range(3, 6))
    take_steps(other, resumed, range(3, 6))
    mine, theirs = bits(optimizer_tensors(resumed, other)), bits(optimizer_tensors(optimizer, model))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert all(torch.equal(*pair) for pair in zip(other, model, strict=True))
    assert resumed.state[other[0]]["exp_avg"].is_cuda and not resumed.state[other[0]]["step"].is_cuda


def test_a_step_does_not_wait_for_the_card() -> None:
    model = make_model("cuda")
    optimizer = make_optimizer(model, OptimSection(moments="float8"), fused=False)
    take_steps(model, optimizer, range(1, 2))
    before = [parameter.detach().clone() for parameter in model]
    torch.cuda.set_sync_debug_mode("error")  # what waits, raises
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not any(torch.equal(*pair) for pair in zip(before, model, strict=True))


@pytest.mark.parametrize("moments", NARROW)
def test_a_run_on_the_card_learns_and_stores_its_moments(tmp_path: Path, moments: Moments) -> None:
    store = write_random_store(tmp_path / "store", count=6)
    losses = {}
    for kind in ("float32", moments):
        optim = {"learning_rate": 1e-2, "moments": kind}
        draft = {"init": "random", "intermediate_size": 300}
        config = train_config(store, tmp_path / kind, batch_size=3, epochs=40, draft=draft, optim=optim)
        result = run_training(config)
        losses[kind] = (result.first_loss, result.last_loss)
    assert losses[moments][1] < 0.5 * losses[moments][0]
    assert losses[moments][1] == pytest.approx(losses["float32"][1], rel=0.15)
    stored = load_file(list_checkpoints(tmp_path / moments)[-1] / "optimizer.safetensors")
    assert sum(value.dtype != torch.float32 for value in stored.values()) == 6
