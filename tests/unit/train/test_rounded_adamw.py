"""AdamW with moments in bfloat16 or float8 against AdamW in float64, and what it never does."""

import pytest
import torch
from torch import Tensor, nn

from eagle3.config import Moments, OptimSection
from eagle3.train.moments import BLOCK, SMALL
from eagle3.train.optim import make_optimizer, set_learning_rate
from eagle3.train.rounded_adamw import RoundedAdamW
from tests.bits import same_bits

NARROW: list[Moments] = ["bfloat16", "float8"]
BETA1, BETA2 = 0.9, 0.95
RATE, EPS, DECAY = 1e-3, 1e-8, 0.1
SHAPES = {"whole blocks": (64, 64), "a tail": (67, 71), "small": (13, 5), "one row": (1, 5001), "a vector": (5001,)}


class Exact:
    """AdamW of one parameter in float64."""

    def __init__(self, weight: Tensor, beta2: float = BETA2) -> None:
        self.weight, self.beta2 = weight.double().clone(), beta2
        self.first, self.second, self.steps = torch.zeros_like(self.weight), torch.zeros_like(self.weight), 0

    def step(self, gradient: Tensor, rate: float = RATE, decay: float = DECAY) -> None:
        self.steps += 1
        self.weight -= rate * decay * self.weight
        self.first += (1 - BETA1) * (gradient - self.first)
        self.second += (1 - self.beta2) * (gradient.double().square() - self.second)
        first, second = self.first / (1 - BETA1**self.steps), self.second / (1 - self.beta2**self.steps)
        self.weight -= rate * first / (second.sqrt() + EPS)


def rounded(
    parameters: list[nn.Parameter], moments: Moments, decay: float = DECAY, beta2: float = BETA2
) -> RoundedAdamW:
    assert moments != "float32"
    return RoundedAdamW(parameters, RATE, (BETA1, beta2), EPS, decay, moments)


def step(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, gradient: Tensor) -> None:
    parameter.grad = gradient
    optimizer.step()


def stored(optimizer: RoundedAdamW, parameter: Tensor) -> tuple[Tensor, Tensor]:
    """Both moments in float64."""
    state = optimizer.state[parameter]
    if "exp_avg_sq" in state:
        return state["exp_avg"].double(), state["exp_avg_sq"].double()
    values = []
    for name in ("exp_avg", "exp_avg_sq_root"):
        scales = state[f"{name}_scale"].double().repeat_interleave(BLOCK)[: parameter.numel()]
        values.append(state[name].double() * scales.view(parameter.shape))
    return values[0], values[1].square()


@pytest.mark.parametrize("moments", NARROW)
def test_a_parameter_with_float32_moments_takes_the_steps_of_float64(moments: Moments) -> None:
    generator = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.randn(40, 100, generator=generator))
    optimizer, exact = rounded([parameter], moments), Exact(parameter.data)
    assert parameter.numel() < SMALL
    for _ in range(50):
        gradient = torch.randn(40, 100, generator=generator)
        step(optimizer, parameter, gradient)
        exact.step(gradient)
    rounding = 50 * 2**-24 * float(exact.weight.abs().max())  # half a last bit at each step
    assert float((parameter.detach() - exact.weight).abs().max()) < rounding
    assert optimizer.state[parameter]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("moments", NARROW)
def test_the_first_step_is_that_of_float64_and_its_moments_are_right_in_the_mean(moments: Moments, shape: str) -> None:
    """The step is taken with the new moments before they are rounded."""
    generator = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.randn(SHAPES[shape], generator=generator))
    optimizer, exact = rounded([parameter], moments), Exact(parameter.data)
    gradient = torch.randn(SHAPES[shape], generator=generator)
    step(optimizer, parameter, gradient)
    exact.step(gradient)
    assert float((parameter.detach() - exact.weight).abs().max()) < 1e-6
    first, second = stored(optimizer, parameter)
    wide = parameter.numel() < SMALL or parameter.ndim < 2
    spacing = 1e-6 if wide else 2**-7 if moments == "bfloat16" else 2**-3
    noise = spacing * 5 / parameter.numel() ** 0.5
    assert float(((first - exact.first) / exact.first.abs().mean()).mean().abs()) < noise
    assert float(((second - exact.second) / exact.second.mean()).mean().abs()) < 2 * noise
    assert float((first - exact.first).abs().max()) <= spacing * float(first.abs().max())


@pytest.mark.parametrize("beta2", [0.95, 0.999])
@pytest.mark.parametrize(("moments", "spread"), [("bfloat16", 0.02), ("float8", 0.4)])
def test_moments_stay_right_in_the_mean_and_fade_when_gradients_stop(
    moments: Moments, spread: float, beta2: float
) -> None:
    """Rounded to nearest, a second moment would stop where a step's share (5% or 0.1%) rounds back."""
    generator = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.zeros(64, 1024))
    optimizer, exact = rounded([parameter], moments, 0.0, beta2), Exact(parameter.data, beta2)
    sizes = 10.0 ** torch.empty(64, 1024).uniform_(-3, 0, generator=generator)
    for number in range(1, 101):
        gradient = torch.randn(64, 1024, generator=generator) * sizes * (number <= 60)
        step(optimizer, parameter, gradient)
        exact.step(gradient, decay=0.0)
        if number in (30, 60, 80, 100):
            first, second = stored(optimizer, parameter)
            ratio = second / exact.second
            assert abs(float(ratio.mean()) - 1) < 0.03, number
            assert number > 60 or float(ratio.std()) < spread
            slope = float((first * exact.first).sum() / exact.first.square().sum())
            assert abs(slope - 1) < 0.03, number


@pytest.mark.parametrize(("moments", "bound"), [("bfloat16", 0.005), ("float8", 0.05)])
def test_a_small_problem_converges_as_with_float32_moments(moments: Moments, bound: float) -> None:
    """Least squares from noisy batches; `bound` is on the relative difference of the loss besides the noise."""

    def trained(kind: Moments) -> float:
        generator = torch.Generator().manual_seed(0)
        truth = torch.randn(96, 64, generator=generator)
        model = nn.Linear(96, 64, bias=False)
        with torch.no_grad():
            model.weight.zero_()
        optimizer = make_optimizer(model, OptimSection(learning_rate=1.0, moments=kind), fused=False)
        for number in range(600):
            set_learning_rate(optimizer, 2e-2 * (1 - number / 600))
            inputs = torch.randn(32, 96, generator=generator)
            wanted = inputs @ truth + torch.randn(32, 64, generator=generator)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), wanted).backward()
            optimizer.step()
        return float((model.weight.detach().T - truth).square().sum(0).mean())

    reference = trained("float32")
    assert reference < 0.03
    assert abs(trained(moments) / reference - 1) < bound


@pytest.mark.parametrize("size", [1e-20, 1e-12, 1.0, 1e12, 1e20])
@pytest.mark.parametrize("moments", NARROW)
def test_tiny_and_huge_gradients_leave_everything_finite(moments: Moments, size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.zeros(1, 4100))
    optimizer = rounded([parameter], moments)
    for number in range(1, 21):
        before = parameter.detach().clone()
        gradient = torch.randn(1, 4100, generator=generator) * size
        gradient[0, :300] = 0
        step(optimizer, parameter, gradient)
        assert parameter.isfinite().all()
        assert float((parameter.detach() - before).abs().max()) < 10 * RATE, number
        assert (parameter[0, :300] == 0).all()
    for moment in stored(optimizer, parameter):
        assert moment.isfinite().all() and (moment[0, :256] == 0).all()
    assert all(value.float().isfinite().all() for value in optimizer.state[parameter].values())


@pytest.mark.parametrize("moments", NARROW)
def test_zero_gradients_change_nothing_but_by_weight_decay(moments: Moments) -> None:
    parameter = nn.Parameter(torch.ones(64, 65))
    optimizer = rounded([parameter], moments)
    for _ in range(3):
        step(optimizer, parameter, torch.zeros(64, 65))
    assert torch.allclose(parameter, torch.full((64, 65), (1 - RATE * DECAY) ** 3))
    assert all((moment == 0).all() for moment in stored(optimizer, parameter))


@pytest.mark.parametrize("moments", NARROW)
def test_elements_far_below_their_blocks_largest_take_no_giant_steps(moments: Moments) -> None:
    """A second moment rounded to zero under a first moment that was not would divide by epsilon alone."""
    generator = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.zeros(32, 128))
    optimizer = rounded([parameter], moments, decay=0.0)
    sizes = 10.0 ** torch.empty(32, 128).uniform_(-12, 2, generator=generator)
    for number in range(200):
        before = parameter.detach().clone()
        gradient = torch.randn(32, 128, generator=generator) * sizes * (number % 7 < 3)
        step(optimizer, parameter, gradient)
        assert float((parameter.detach() - before).abs().max()) < 5 * RATE, number


@pytest.mark.parametrize("moments", NARROW)
def test_two_optimizers_take_the_same_steps_bit_for_bit(moments: Moments) -> None:
    def trained() -> list[Tensor]:
        torch.manual_seed(torch.seed() % 2**32)  # global random state has no say
        generator = torch.Generator().manual_seed(0)
        parameters = [nn.Parameter(torch.ones(70, 70)) for _ in range(2)]
        optimizer = rounded(parameters, moments)
        for _ in range(5):
            gradient = torch.randn(70, 70, generator=generator)
            for parameter in parameters:
                parameter.grad = gradient.clone()
            optimizer.step()
        states = [value for parameter in parameters for value in optimizer.state[parameter].values()]
        return [*(parameter.data for parameter in parameters), *states]

    one, other = trained(), trained()
    assert all(same_bits(*pair) for pair in zip(one, other, strict=True))
    assert not torch.equal(one[0], one[1])  # parameters have random bits of their own


@pytest.mark.parametrize("moments", NARROW)
def test_a_parameter_of_several_pieces_takes_the_steps_of_one(
    moments: Moments, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained() -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        parameter = nn.Parameter(torch.ones(1, 5000))
        optimizer = rounded([parameter], moments)
        for _ in range(3):
            step(optimizer, parameter, torch.randn(1, 5000, generator=generator))
        return [parameter.data, *optimizer.state[parameter].values()]

    one = trained()
    monkeypatch.setattr("eagle3.train.rounded_adamw._PIECE", 4 * BLOCK)
    assert all(same_bits(*pair) for pair in zip(one, trained(), strict=True))


@pytest.mark.parametrize("moments", NARROW)
def test_a_gradient_that_is_not_finite_spoils_its_own_element_only(moments: Moments) -> None:
    parameter = nn.Parameter(torch.ones(1, 4096))
    optimizer = rounded([parameter], moments)
    gradient = torch.ones(1, 4096)
    gradient[0, 5] = torch.nan
    for _ in range(2):
        step(optimizer, parameter, gradient)
    assert parameter.isnan().nonzero().tolist() == [[0, 5]]
    assert all(moment.isnan().nonzero().tolist() == [[0, 5]] for moment in stored(optimizer, parameter))
