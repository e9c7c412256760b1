from __future__ import annotations

import pytest
import torch

from eagle3.draft.states import FP8, are_scales, can_hold, dequantize, has_nan, quantize, rounded


def rows() -> torch.Tensor:
    """Magnitudes all over float32, and rows whose largest is at or beside 448 times a power of two."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(400, 32, generator=generator) * torch.logspace(-34, 36, 400)[:, None]
    edges = torch.zeros(6, 32)
    edges[:, 3] = torch.tensor([448.0, -448.0, 448.1, 447.9, 896.0, 3.2e38])
    return torch.cat([wide, edges])


def test_a_value_is_off_by_a_sixteenth_at_most_and_a_row_by_less() -> None:
    states = rows()
    values, scales = quantize(states)
    found = dequantize(values, scales, torch.float32)
    assert values.dtype == FP8 and scales.shape == states.shape[:1] and are_scales(scales)
    small = states.abs().amax(-1, keepdim=True) * 2**-16  # what is far below the largest loses its digits
    assert ((found - states).abs() <= (states.abs() / 16).maximum(small)).all()
    whole = states[:400]
    error = (found[:400] - whole).norm(dim=1) / whole.norm(dim=1)
    assert 0.02 < error.double().nanmean() < 0.03


def test_the_scale_is_the_least_power_of_two_that_fits() -> None:
    states = rows()
    values, scales = quantize(states)
    assert values.float().abs().amax() == 448
    largest = states.abs().amax(-1)
    assert (largest / scales <= 448).all() and (largest / (scales / 2) > 448).all()
    assert quantize(torch.tensor([[448.0, 1], [449, 1], [447, 1], [0, 0]]))[1].tolist() == [1, 2, 1, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_states_are_the_same_in_either_type_and_stay_when_stored_again(dtype: torch.dtype) -> None:
    values, scales = quantize(rows())
    found = dequantize(values, scales, dtype)
    assert torch.equal(found.float(), values.float() * scales[:, None])
    assert torch.equal(dequantize(*quantize(found), dtype=dtype), found)
    assert torch.equal(rounded(found, FP8), found.float())


def test_states_are_rounded_as_a_store_rounds_them_by_way_of_bfloat16() -> None:
    states = torch.randn(200, 64, generator=torch.Generator().manual_seed(1))
    stored = dequantize(*quantize(states.bfloat16()))
    assert torch.equal(rounded(states, FP8), stored.float())
    assert not torch.equal(dequantize(*quantize(states)), stored), "rounding twice is another thing"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3.4e38])
def test_what_is_not_finite_is_seen_in_scale_and_values(value: float) -> None:
    states = torch.ones(2, 3)
    states[1, 2] = value
    values, scales = quantize(states)
    assert scales[0] == 2**-8 and scales[1].isnan() and not are_scales(scales)
    assert has_nan(values[1]) and not has_nan(values[0])


@pytest.mark.parametrize("scale", [0.0, 3.0, -2.0, float("inf")])
def test_other_numbers_are_no_scales(scale: float) -> None:
    assert are_scales(torch.tensor([1.0, 2**-126])) and not are_scales(torch.tensor([1.0, scale]))


@pytest.mark.parametrize("value", [3.2e38, 3.31e38, 3.4e38, torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, FP8])
def test_a_type_holds_what_comes_back_finite(dtype: torch.dtype, value: float) -> None:
    states = torch.tensor([[1.0, -value]])
    assert can_hold(states, dtype) == bool(torch.isfinite(rounded(states, dtype)).all())
