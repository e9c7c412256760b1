import pytest
import torch
from torch import nn

from eagle3.config import OptimSection
from eagle3.train.optim import learning_rate, make_optimizer


def schedule(total: int, **values: object) -> list[float]:
    optim = OptimSection(learning_rate=1.0, **values)
    return [learning_rate(step, total, optim) for step in range(1, total + 1)]


def test_fault_13_rate_reaches_its_end_value_on_the_last_step_and_not_before() -> None:
    for kind in ("cosine", "linear"):
        rates = schedule(12, schedule=kind, warmup_fraction=0.0, final_fraction=0.1)
        assert rates[-1] == pytest.approx(0.1)
        assert all(rate > 0.1 + 1e-6 for rate in rates[:-1])
        assert rates == sorted(rates, reverse=True)


def test_warm_up_rises_linearly_and_its_last_step_has_the_peak() -> None:
    rates = schedule(12, schedule="linear", warmup_fraction=0.34)
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, *[1 - i / 8 for i in range(1, 9)]])


def test_constant_stays_at_the_peak_after_warm_up() -> None:
    assert schedule(4, schedule="constant", warmup_fraction=0.5) == [0.5, 1.0, 1.0, 1.0]


def test_a_schedule_of_one_step_ends_at_its_end_value() -> None:
    assert schedule(1, schedule="linear", warmup_fraction=0.9, final_fraction=0.5) == [0.5]


def test_only_trainable_matrices_decay() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "fc": nn.Linear(2, 2, bias=False), "norm": nn.RMSNorm(2)})
    model["embed"].weight.requires_grad_(False)
    optimizer = make_optimizer(model, OptimSection(learning_rate=0.1, weight_decay=0.5), fused=False)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.equal(model["embed"].weight, before["embed.weight"])
    assert torch.equal(model["norm"].weight, before["norm.weight"])
    assert torch.allclose(model["fc"].weight, before["fc.weight"] * (1 - 0.1 * 0.5))
