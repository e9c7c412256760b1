"""What is compared with what: rows, channels, distances. The whole of it on real states: `test_fingerprint.py`."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from eagle3.wiring.diagnosis import Measured
from eagle3.wiring.fingerprint import coarsest_type, measure


def noise(rows: int, channels: int = 8, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, channels, generator=torch.Generator().manual_seed(seed))


def measured(found: torch.Tensor, truth: torch.Tensor, allowed: float = 1e-3, **rows: list[int]) -> Measured:
    return measure("slot", 0, found, {0: truth}, allowed=allowed, **rows)  # type: ignore[arg-type]


def test_rows_are_compared_by_their_token() -> None:
    """A store's fingerprint holds a few rows, a server's answer all of them, and the reverse."""
    truth, places = noise(20), [0, 3, 7, 12, 19]

    few = measured(truth[places], truth, found_rows=places)
    assert (few.errors[0], list(few.row_errors)) == (0.0, places)
    every = measured(truth, truth[places], reference_rows=places)
    assert (every.errors[0], list(every.row_errors)) == (0.0, places)


def test_the_error_is_the_median_rows() -> None:
    truth = torch.ones(5, 4)
    found = truth * torch.tensor([1.0, 1.125, 1.25, 1.5, 2.0])[:, None]

    slot = measured(found, truth)

    assert slot.errors == {0: 0.25}
    assert list(slot.row_errors.values()) == [0.0, 0.125, 0.25, 0.5, 1.0]


def test_other_tokens_are_tried_only_where_the_same_ones_do_not_match() -> None:
    truth = torch.ones(8, 4)

    assert measured(truth * 1.25, truth, allowed=0.25).shift is None
    shift = measured(truth * 1.25, truth, allowed=0.125).shift
    assert shift is not None and (shift.tokens, shift.error) == (1, 0.25), "never 0"


@pytest.mark.parametrize("tokens", [1, 8, -8])
def test_tokens_are_looked_for_up_to_eight_away(tokens: int) -> None:
    truth = noise(40)

    shift = measured(truth.roll(-tokens, 0), truth).shift

    assert shift is not None and (shift.tokens, shift.error) == (tokens, 0.0)


@pytest.mark.parametrize("tokens", [9, -9])
def test_but_no_further(tokens: int) -> None:
    truth = noise(40)

    shift = measured(truth.roll(-tokens, 0), truth).shift

    assert shift is not None and shift.error > 0.5


@pytest.mark.parametrize(
    ("rows", "tokens", "enough"),
    [(8, 4, True), (8, 5, False), (9, 5, True), (9, 6, False), (3, 1, True), (3, 2, False), (2, 1, False)],
)
def test_half_of_the_rows_and_two_at_least_must_be_common(rows: int, tokens: int, enough: bool) -> None:
    truth = noise(rows)
    found = torch.cat([truth[tokens:], noise(tokens, seed=1)])

    shift = measured(found, truth).shift

    assert (shift is not None and shift.tokens == tokens and shift.error == 0.0) == enough


@pytest.mark.parametrize("channels", [2, 511, 512, 1024])
def test_of_very_many_channels_some_are_enough_to_find_the_tokens(channels: int) -> None:
    """Up to 511 all of them: every second one of 512, every fourth of 1024."""
    truth = noise(20, channels)
    step = max(1, channels // 256)
    found = truth.roll(-3, 0)
    found[:, step - 1] += 100.0 if step > 1 else 0.0  # a channel that is left out

    shift = measured(found, truth).shift

    assert shift is not None and (shift.tokens, shift.error) == (3, 0.0)
    found[:, 1 if step == 1 else step] += 100.0  # one that is not
    shift = measured(found, truth).shift
    assert shift is None or shift.error > 0.5


def test_few_levels_of_many_values_are_fp8_times_a_scale() -> None:
    def levels(count: int, values: int) -> torch.Tensor:
        return (torch.arange(values) % count + 1) * 0.3

    assert coarsest_type(levels(127, 1024)) == "float8_e4m3fn"
    assert coarsest_type(levels(128, 1024)) == "float32"
    assert coarsest_type(levels(127, 1023)) == "float32"


def test_importing_it_does_not_import_torch() -> None:
    script = "import sys, eagle3.wiring.fingerprint; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
