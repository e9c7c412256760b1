"""Products in float8: what is rounded, and how far losses and gradients are from exact ones."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from eagle3.draft.config import TTTSettings
from eagle3.draft.fused import plain
from eagle3.draft.fused.quantized import Quantized
from eagle3.draft.model import DraftModel
from eagle3.draft.ttt import TTTLoss, count_terms
from eagle3.errors import ProblemsError

from .cases import (
    gradients,
    make_batch,
    make_config,
    make_document,
    make_head,
    make_model,
    make_vocab,
    random_documents,
    run_loss,
)

LARGEST = 448.0
HALF_STEP = 1 / 16  # of e4m3's 3 bits, relative


def widened(part: Quantized) -> torch.Tensor:
    return part.values.double() * part.scales.double()[:, None]


def rows_of_all_sizes() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 96, generator=generator, dtype=torch.float64)
    return x * torch.logspace(-12, 12, 40, dtype=torch.float64)[:, None]


def test_rows_are_rounded_to_three_bits_with_a_power_of_two_as_their_scale() -> None:
    x = rows_of_all_sizes()
    found = plain.quantize_rows(x)
    assert found.values.dtype == torch.float8_e4m3fn and found.values.shape == x.shape
    peaks, scales = x.abs().amax(1), found.scales.double()
    assert torch.equal(scales.log2(), scales.log2().round())
    assert (peaks <= LARGEST * scales * (1 + 1e-7)).all() and (peaks > LARGEST / 2 * scales).all()
    smallest = (scales * 2**-9)[:, None]  # e4m3's least step
    assert ((widened(found) - x).abs() <= (x.abs() * HALF_STEP).clamp(min=smallest / 2) * (1 + 1e-6)).all()


@pytest.mark.parametrize("peak", [448.0, 448.1, 256.0, 255.9, 1.0, 7.0, 7.001, 3.4e38, 1.2e-38])
def test_the_scale_is_the_least_that_fits(peak: float) -> None:
    found = plain.quantize_rows(torch.tensor([[peak, -peak / 3]], dtype=torch.float64))
    scale = max(2.0 ** math.ceil(math.log2(max(peak, 1e-30) / LARGEST)), 0)
    assert found.scales.item() == scale


def test_columns_are_the_rounded_rows_with_a_scale_for_each_column() -> None:
    x = rows_of_all_sizes()[15:25]
    rows = plain.quantize_rows(x)
    columns = plain.quantize_columns(rows)
    assert columns.values.shape == (96, 10)
    difference = (widened(columns).T - widened(rows)).abs()
    least = columns.scales.double() * 2**-9
    assert (difference <= least / 2).all()  # only what is below e4m3's least number is rounded once more
    assert (difference[-3:] == 0).all()


def test_zero_rows_stay_zero_and_what_is_not_finite_is_seen() -> None:
    x = torch.ones(4, 16)
    x[0], x[1, 3], x[2, 5] = 0, torch.nan, torch.inf
    found = widened(plain.quantize_rows(x))
    assert not found[0].any() and found[1].isnan().any() and found[2].isnan().any()
    torch.testing.assert_close(found[3], x[3].double(), rtol=1e-6, atol=0)


def test_a_product_is_that_of_the_rounded_rows() -> None:
    x, y = rows_of_all_sizes(), torch.randn(24, 96, dtype=torch.float64)
    a, b = plain.quantize_rows(x), plain.quantize_rows(y)
    expected = widened(a) @ widened(b).T
    torch.testing.assert_close(plain.scaled_product(a, b, torch.float64), expected, rtol=1e-12, atol=0)
    out = torch.empty(40, 24, dtype=torch.float64)
    assert torch.equal(plain.scaled_product(a, b, torch.float64, out), out)


def wide_model(seed: int = 0) -> DraftModel:
    model = make_model(seed=seed)
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(0.5 if value.ndim == 2 else 1)
    return model


@pytest.mark.parametrize("chunk", [1000, 17])
def test_losses_and_gradients_are_near_exact_ones(chunk: int) -> None:
    batch = make_batch([[make_document([0] * 5 + [1] * 60, 1), make_document([0, 1, 1, 1, 1, 1, 1, 0], 2)]])
    model, exact = wide_model(), TTTSettings(4, chunk=chunk)
    expected, found = run_loss(model, batch, exact), run_loss(model, batch, replace(exact, float8=True))
    assert 1e-6 < abs(found.loss / expected.loss - 1) < 0.01
    slopes = gradients(model, expected.loss)
    errors = {
        name: float((value - slopes[name]).norm() / slopes[name].norm())
        for name, value in gradients(model, found.loss).items()
    }
    assert min(errors.values()) > 0.01 and max(errors.values()) < 0.1, errors


@pytest.mark.parametrize("options", [{"fc_norm": True}, {"norm_before_fc": True}, {"norm_output": True}])
def test_gradients_reach_the_norms_before_fc(options: dict[str, bool]) -> None:
    batch = make_batch([[make_document([0] * 5 + [1] * 60, 1)]])
    model = make_model(make_config(**options))
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(0.5 if value.ndim == 2 else 1)
    settings = TTTSettings(3, chunk=100)
    exact = gradients(model, run_loss(model, batch, settings).loss)
    for name, value in gradients(model, run_loss(model, batch, replace(settings, float8=True)).loss).items():
        assert (value - exact[name]).norm() < 0.15 * exact[name].norm(), name


def test_random_batches_go_through_in_float8_too() -> None:
    for seed in range(6):
        batch = make_batch([random_documents(5, seed, longest=30)], padding=seed % 3)
        settings = TTTSettings([1, 2, 4][seed % 3], chunk=5 + seed, float8=True)
        model = wide_model(seed)
        output = run_loss(model, batch, settings)
        slopes = gradients(model, output.loss)
        exact = gradients(model, run_loss(model, batch, replace(settings, float8=False)).loss)
        for name, value in exact.items():
            assert (slopes[name] - value).norm() <= 0.15 * value.norm() + 1e-6, (seed, name)


def test_weights_are_rounded_once_while_they_are_kept_and_anew_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model, settings = wide_model(), TTTSettings(3, chunk=40, float8=True)
    batch = make_batch([random_documents(4, 1, longest=30)])
    module = TTTLoss(model, make_vocab(), settings)
    counts = count_terms(batch, make_head(), make_vocab(), settings)
    seen: list[int] = []
    original = plain.quantize_rows

    def counting(x: torch.Tensor, out: Quantized | None = None) -> Quantized:
        if any(x.data_ptr() == value.data_ptr() for value in model.parameters()):
            seen.append(x.data_ptr())
        return original(x, out)

    monkeypatch.setattr(plain, "quantize_rows", counting)
    with module.keeping_weights():
        losses = [module(batch, counts, counts.in_vocab).loss.item() for _ in range(3)]
    assert len(seen) == len(set(seen)) == 5 and len(set(losses)) == 1  # o, gate, up, down, head
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    after = module(batch, counts, counts.in_vocab).loss.item()
    assert len(seen) == 10 and after != losses[0]
    assert after == run_loss(model, batch, settings).loss.item()


def test_it_needs_the_fused_step() -> None:
    with pytest.raises(ProblemsError, match=r"ttt\.float8.*ttt\.chunk is null"):
        TTTSettings(chunk=None, float8=True)
    with pytest.raises(ProblemsError, match=r"ttt\.float8"):
        TTTSettings(float8="yes")  # type: ignore[arg-type]


def test_only_the_heads_gradients_are_summed_up_precisely(monkeypatch: pytest.MonkeyPatch) -> None:
    model, settings = wide_model(), TTTSettings(2, chunk=40, float8=True)
    head, vocab = model.lm_head.weight, model.config.draft_vocab_size
    seen: list[tuple[bool, tuple[int, int, int]]] = []
    original = plain.scaled_product

    def watching(
        a: Quantized, b: Quantized, dtype: torch.dtype, out: torch.Tensor | None = None, precise: bool = True
    ) -> torch.Tensor:
        seen.append((precise, (len(a.values), len(b.values), a.values.shape[1])))
        return original(a, b, dtype, out, precise)

    monkeypatch.setattr(plain, "scaled_product", watching)
    gradients(model, run_loss(model, make_batch([random_documents(4, 1, longest=30)]), settings).loss)
    precise = [shape for exact, shape in seen if exact]
    backward = [summed == vocab for _, _, summed in precise]  # rows [N, D] x [D, H]
    gradient = [(rows, columns) == tuple(head.shape) for rows, columns, _ in precise]
    assert sum(backward) == sum(gradient) == len(precise) / 2 > 0
    assert len(precise) < len(seen) / 4
