"""Each fault, planted in the real states of real (tiny) targets, is named; right states never are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eagle3.wiring.diagnosis import POST_NORM, ROUNDING
from eagle3.wiring.fingerprint import coarsest_type, measure
from tests.unit.wiring.probe_cases import NAMES, States, Target, causes, make_target, verdicts

AUX = ("slot 0", "slot 1", "slot 2")
SLOTS = (*AUX, "last")


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Callable[[str], Target]:
    """Targets by name, made once; SmolLM2, which takes a while, is kept from run to run (and needs pytest's cache)."""
    made: dict[str, Target] = {}

    def get(name: str) -> Target:
        if name not in made:
            made[name] = make_target(name, folder(name))
        return made[name]

    def folder(name: str) -> Path:
        if name != "smollm2":
            return tmp_path_factory.mktemp(name)
        if not hasattr(request.config, "cache"):
            pytest.skip("pytest runs without its cache")
        return request.config.cache.mkdir("smollm2") / "target"

    return get


@pytest.fixture(params=NAMES)
def target(request: pytest.FixtureRequest, targets: Callable[[str], Target]) -> Target:
    return targets(request.param)


def assert_causes(found: dict[str, set[str]], aux: str, last: str) -> None:
    assert found == {**{slot: {aux} for slot in AUX}, "last": {last}}


@pytest.mark.parametrize(
    ("computed", "stored"),
    [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")],
)
def test_right_states_raise_no_alarm(target: Target, computed: str, stored: str) -> None:
    def rounded(states: States) -> list[torch.Tensor]:
        return [slot.to(getattr(torch, stored)) for slot in target.right(states)]

    found = verdicts(target, rounded, computed, stored)

    assert_causes(causes(found), "right", "right")
    assert all(item.found == item.measured.expected for item in found)
    assert all(item.error <= max(ROUNDING[stored], 1e-5) for item in found), "in a batch or alone: only rounding"


@pytest.mark.parametrize("name", ["llama", "qwen3", "smollm2"])
def test_states_of_a_bfloat16_run_are_right_for_a_float32_one(name: str, targets: Callable[[str], Target]) -> None:
    target = targets(name)
    other = target.states(target.samples(), "bfloat16")

    found = verdicts(target, target.right, "float32", "bfloat16", states=other)
    assert {item.cause for item in found} == {"other_weights"}, "too far for float32 alone"
    for item in found:
        assert item.error < 0.06
    # The same states, compared as what they are: two computations, the coarser in bfloat16.
    [truth] = target.states(target.samples()[:1])
    slot = measure("slot", target.wired[2], other[0][target.wired[2]], truth, allowed=0.064)
    assert slot.closest == target.wired[2]


@pytest.mark.parametrize(("step", "cause"), [(-1, "one_early"), (1, "one_late")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_layer_off_is_named_with_its_direction(target: Target, step: int, cause: str, dtype: str) -> None:
    found = verdicts(
        target, lambda states: [*(states[at + step] for at in target.wired), states[POST_NORM]], dtype, dtype
    )

    assert_causes(causes(found), cause, "right")
    assert all(item.found == item.measured.expected + step for item in found if item.measured.slot != "last")


def test_an_added_embedding_is_named(target: Target) -> None:
    first, second, _ = target.wired
    found = verdicts(target, lambda states: [states[0], states[first], states[second], states[POST_NORM]])

    assert causes(found) == {
        "slot 0": {"embedding"},
        "slot 1": {"other_layer"},
        "slot 2": {"other_layer"},
        "last": {"right"},
    }
    assert [item.found for item in found[:3]] == [0, first, second]


def test_permuted_slots_are_named_as_such(target: Target) -> None:
    first, second, third = target.wired
    found = verdicts(target, lambda states: [states[third], states[first], states[second], states[POST_NORM]])
    assert_causes(causes(found), "permuted", "right")

    found = verdicts(target, lambda states: [states[second], states[first], states[third], states[POST_NORM]])
    assert causes(found)["slot 0"] == causes(found)["slot 1"] == {"permuted"}
    assert causes(found)["slot 2"] == {"right"}

    found = verdicts(target, lambda states: [states[second], states[second], states[third], states[POST_NORM]])
    assert causes(found)["slot 0"] == {"other_layer"}, "one layer twice is no permutation"


def test_pre_norm_and_post_norm_are_told_apart_both_ways(target: Target) -> None:
    def pre_norm(states: States) -> list[torch.Tensor]:
        return [*target.right(states)[:3], states[target.layers]]

    assert_causes(causes(verdicts(target, pre_norm)), "right", "pre_norm")
    assert_causes(causes(verdicts(target, target.right, last=target.layers)), "right", "post_norm")
    assert_causes(causes(verdicts(target, pre_norm, last=target.layers)), "right", "right")


@pytest.mark.parametrize(("tokens", "dtype"), [(1, "float32"), (-1, "bfloat16"), (3, "bfloat16")])
def test_misaligned_rows_are_named_with_their_distance(target: Target, tokens: int, dtype: str) -> None:
    found = verdicts(target, lambda states: [slot.roll(-tokens, 0) for slot in target.right(states)], dtype, dtype)

    assert_causes(causes(found), "misaligned", "misaligned")
    assert {item.tokens for item in found} == {tokens}
    assert all(item.found == item.measured.expected for item in found), "right layer, other tokens"


def test_misaligned_rows_of_another_layer_are_both(target: Target) -> None:
    found = verdicts(target, lambda states: [*(states[at - 1].roll(-1, 0) for at in target.wired), states[POST_NORM]])

    assert_causes(causes(found), "misaligned", "right")
    assert [item.found for item in found[:3]] == [at - 1 for at in target.wired]


@pytest.mark.parametrize("noise", [0.02, 0.05])
def test_other_weights_are_not_taken_for_another_layer(target: Target, noise: float) -> None:
    with target.other_weights(noise):
        other = target.states(target.samples())

    found = {item.cause for item in verdicts(target, target.right, states=other)}

    # The tiny Kimi's random router sends tokens elsewhere after the smallest change, so nothing of it stays close.
    assert found == {"other_weights"} or (target.layers == 61 and found == {"other_weights", "other_target"})


@pytest.mark.parametrize("name", ["llama", "qwen3", "kimi"])
def test_another_model_resembles_nothing(name: str, targets: Callable[[str], Target], tmp_path: Path) -> None:
    from eagle3.target import tiny

    target = targets(name)
    other = Target(getattr(tiny, f"make_tiny_{name}")(tmp_path / "other", seed=9), target.wired)

    found = verdicts(target, target.right, states=other.states(target.samples()))

    assert_causes(causes(found), "other_target", "other_target")
    assert all(item.found is None for item in found)


def padded(target: Target, batch: list[list[int]], padding: int) -> list[States]:
    """States of a run with padding on the left that nothing masks, without the padding's own."""
    states = target.states([[2] * padding + sample for sample in batch])
    return [
        {at: rows[padding : padding + len(sample)] for at, rows in item.items()}
        for item, sample in zip(states, batch, strict=True)
    ]


@pytest.mark.parametrize("padding", [1, 4])
def test_unmasked_left_padding_is_named(target: Target, padding: int) -> None:
    batch = target.samples((60, 120, 200))

    found = verdicts(target, target.right, batch=batch, states=padded(target, batch, padding))

    assert_causes(causes(found), "padding", "padding")


def test_padding_of_some_samples_only_is_told_from_the_right_ones(targets: Callable[[str], Target]) -> None:
    target = targets("llama")
    batch = target.samples((100, 120, 140))
    states = [*padded(target, batch[:1], 2), *target.states(batch[1:])]

    found = verdicts(target, target.right, batch=batch, states=states)

    assert {item.cause for item in found if item.measured.sample == "s0"} == {"padding"}
    assert {item.cause for item in found if item.measured.sample != "s0"} == {"right"}


@pytest.mark.parametrize(
    ("begin", "end", "rows"),
    [(0, 1, (0, 1)), (0, 3, (0, 3)), (-1, None, (23, 24)), (15, None, (15, 24))],
)
def test_rows_that_are_not_this_samples_are_named(
    target: Target, begin: int, end: int | None, rows: tuple[int, int]
) -> None:
    batch = target.samples((24,))
    [other] = target.states([batch[0][::-1]])

    def mixed(states: States) -> list[torch.Tensor]:
        result = [slot.clone() for slot in target.right(states)]
        for slot, wrong in zip(result, target.right(other), strict=True):
            slot[begin:end] = wrong.flip(0)[begin:end] * 1.5
        return result

    found = verdicts(target, mixed, batch=batch)

    assert_causes(causes(found), "rows", "rows")
    assert {item.rows for item in found} == {rows}


@pytest.mark.parametrize(
    ("dtype", "scaled"),
    [("float16", False), ("bfloat16", False), ("float8_e4m3fn", False), ("float8_e4m3fn", True)],
)
def test_lost_precision_is_named_within_its_bound(target: Target, dtype: str, scaled: bool) -> None:
    def rounded(slot: torch.Tensor) -> torch.Tensor:
        scale = 448 / slot.abs().max() if scaled else torch.tensor(1.0)
        return (slot * scale).to(getattr(torch, dtype)).float() / scale

    found = verdicts(target, lambda states: [rounded(slot) for slot in target.right(states)])

    assert_causes(causes(found), "precision", "precision")
    assert {item.measured.precision for item in found} == {dtype}
    if scaled or slot_range(target) < 448:
        assert all(item.error <= ROUNDING[dtype] for item in found)


def slot_range(target: Target) -> float:
    """Largest value in any slot: fp8 without a scale ends at 448."""
    return max(float(slot.abs().max()) for states in target.states(target.samples()) for slot in target.right(states))


def test_a_layer_off_is_still_named_in_fp8(target: Target) -> None:
    def early(states: States) -> list[torch.Tensor]:
        slots = [*(states[at - 1] for at in target.wired), states[POST_NORM]]
        scales = [448 / slot.abs().max() for slot in slots]
        return [(slot * s).to(torch.float8_e4m3fn).float() / s for slot, s in zip(slots, scales, strict=True)]

    assert_causes(causes(verdicts(target, early, stored="bfloat16")), "one_early", "precision")


def test_the_coarsest_type_of_values() -> None:
    values = torch.randn(2000, generator=torch.Generator().manual_seed(0))

    assert coarsest_type(values) == "float32"
    assert coarsest_type(values.half()) == "float16"
    assert coarsest_type(values.bfloat16()) == "bfloat16"
    assert coarsest_type(values.to(torch.float8_e4m3fn)) == "float8_e4m3fn"
    assert coarsest_type(values.to(torch.float8_e4m3fn).float() * 0.3) == "float8_e4m3fn"
    assert coarsest_type(values[:100].to(torch.float8_e4m3fn).float() * 0.3) == "float32", "too few to tell"


def test_of_equal_matches_the_nearest_tokens_are_named() -> None:
    truth = {0: torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).repeat(5, 1)}

    slot = measure("slot", 0, truth[0].roll(-1, 0), truth, allowed=1e-3)

    assert slot.shift is not None and slot.shift.tokens == 1, "not 5 or -3, where the same tokens come again"


def test_few_common_rows_are_no_match() -> None:
    generator = torch.Generator().manual_seed(0)
    truth = {0: torch.randn(8, 8, generator=generator)}
    found = torch.cat([truth[0][7:], torch.randn(7, 8, generator=generator)])

    slot = measure("slot", 0, found, truth, allowed=1e-3)

    assert slot.shift is not None and slot.shift.error > 0.5, "one row of eight equals another, no more"


def test_values_that_are_not_finite_are_infinitely_far() -> None:
    truth = {0: torch.ones(4, 2), 1: torch.zeros(4, 2)}

    slot = measure("slot", 0, torch.full((4, 2), float("nan")), truth, allowed=1e-3)

    assert set(slot.errors.values()) == {float("inf")}
