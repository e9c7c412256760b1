"""Every threshold of a diagnosis, on both sides, in numbers that float arithmetic holds exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from eagle3.wiring.diagnosis import POST_NORM, ROUNDING, Boundary, Measured, Shift, Verdict, allowed_error, diagnose

ALLOWED = 2.0**-7
COARSE, FINE = "float8_e4m3fn", "bfloat16"
FAR = {2: 0.5, 3: 0.4}  # the expected layer, of other weights


def measured(errors: Mapping[Boundary, float], expected: Boundary = 3, rows: Sequence[float] = (), **values: object):  # type: ignore[no-untyped-def]
    row_errors = dict(enumerate(rows or [errors[expected]] * 8))
    fields = {"sample": "a", "slot": "slot", "shift": None, "precision": FINE, "row_errors": row_errors, **values}
    return Measured(expected=expected, errors=errors, **fields)  # type: ignore[arg-type]


def verdict(slot: Measured, allowed: float = ALLOWED) -> Verdict:
    [found] = diagnose([[slot]], allowed, FINE)
    return found


def test_the_bounds_of_the_types_are_those_of_rounding_to_nearest() -> None:
    assert ROUNDING == {"float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8, "float8_e4m3fn": 2**-4}
    assert allowed_error("float16", "float16") == pytest.approx(0.0205, rel=0.01)


@pytest.mark.parametrize(
    ("errors", "cause", "found"),
    [
        # the expected layer, up to what is allowed, if no other is more than twice as close
        ({2: 0.5, 3: ALLOWED}, "right", 3),
        ({2: 0.75 * ALLOWED, 3: ALLOWED}, "right", 3),
        ({2: 0.25 * ALLOWED, 3: 0.75 * ALLOWED}, "one_early", 2),
        ({2: 0.0, 3: 2.0**-25}, "right", 3),
        ({2: 0.0, 3: 2.0**-23}, "one_early", 2),
        # another one, if it is at most half as far as the next, and below what is unrelated
        ({2: 0.25, 3: 0.5, 4: 0.9}, "one_early", 2),
        ({2: 0.375, 3: 0.5, 4: 0.9}, "other_target", None),
        ({2: 0.9, 3: 1.0, 4: 0.4375}, "one_late", 4),
        ({2: 0.5, 3: 1.0, 4: 1.25}, "other_target", None),
        ({2: 0.625, 3: 1.5, 4: 1.5}, "other_target", None),
        # the expected one is the closest, but too far
        ({2: 0.625, 3: 0.375, 4: 0.625}, "other_weights", 3),
        ({2: 0.625, 3: 0.5, 4: 0.625}, "other_target", None),
        # its neighbours are not there to say which
        ({3: 0.375, 4: 1.5}, "other_weights", 3),
        ({3: 0.375, 2: 1.5}, "other_weights", 3),
        ({3: 0.375, 5: 1.5, 1: 1.5}, "other_states", None),
    ],
)
def test_errors_are_judged_against_what_is_allowed_and_against_each_other(
    errors: Mapping[Boundary, float], cause: str, found: Boundary | None
) -> None:
    result = verdict(measured(errors))

    assert (result.cause, result.found) == (cause, found)


def test_last_states_of_an_inner_layer_are_not_pre_norm() -> None:
    assert verdict(measured({30: 0.0, 61: 0.9, POST_NORM: 0.9}, POST_NORM)).cause == "other_layer"
    assert verdict(measured({30: 0.9, 61: 0.0, POST_NORM: 0.9}, POST_NORM)).cause == "pre_norm"


@pytest.mark.parametrize(
    ("error", "cause"),
    [(ALLOWED, "misaligned"), (2 * ALLOWED, "other_weights"), (0.2, "misaligned"), (0.21, "other_weights")],
)
def test_other_tokens_are_held_to_the_same_bounds(error: float, cause: str) -> None:
    errors = FAR if error > 0.1 else {2: 1.9 * ALLOWED, 3: 1.5 * ALLOWED}
    assert verdict(measured(errors, shift=Shift(1, 3, error))).cause == cause


def test_the_error_is_that_of_what_is_held_and_the_next_that_of_any_other() -> None:
    right = verdict(measured({2: 0.75 * ALLOWED, 3: ALLOWED, 4: 0.5}))
    assert (right.error, right.next_error) == (ALLOWED, 0.75 * ALLOWED)

    unknown = verdict(measured({2: 0.75, 3: 1.0, 4: 0.875}))
    assert (unknown.found, unknown.error, unknown.next_error) == (None, 0.75, 0.875)

    moved = verdict(measured({2: 0.75, 3: 1.0}, shift=Shift(-2, 3, 0.125)))
    assert (moved.error, moved.next_error) == (0.125, 0.75)


def test_a_coarser_type_is_only_named_for_states_that_are_known() -> None:
    assert verdict(measured({2: 0.5, 3: 0.05}, precision=COARSE)).cause == "precision"
    assert verdict(measured({2: 1.4, 3: 1.2}, precision=COARSE)).cause == "other_target"
    assert verdict(measured({2: 0.5, 3: 0.05}, rows=[0.9, 0.9, *[0.05] * 6], precision=COARSE)).cause == "rows"
    assert verdict(measured({2: 0.5, 3: 0.05}, rows=[0.25, 0.25, *[0.05] * 6], precision=COARSE)).cause == "precision"


A = ALLOWED


@pytest.mark.parametrize(
    ("rows", "allowed", "expected"),
    [
        # wrong is what is over four times as far as allowed
        ([4 * A, *[0.0] * 7], A, None),
        ([4.5 * A, *[0.0] * 7], A, (0, 1)),
        ([0.9, *[A] * 7], A, (0, 1)),
        # one row may be off by chance where the type is coarse
        ([0.9, *[0.0] * 7], 0.01, (0, 1)),
        ([0.9, *[0.0] * 7], 0.02, None),
        ([0.9, 0.9, *[0.0] * 6], 0.02, (0, 2)),
        # four of five in the piece, nine of ten outside
        ([0.9, 0.9, 0.9, 0.0, 0.9, *[0.0] * 5], A, (0, 5)),
        ([0.9, 0.9, 0.0, 0.9, *[0.0] * 6], A, None),
        ([0.9, 0.9, *[0.0] * 9, 2 * A], A, (0, 2)),
        ([0.9, 0.9, *[0.0] * 8, 2 * A, 2 * A], A, None),
        # at either end, not between
        ([*[0.0] * 6, 0.9, 0.9], A, (6, 8)),
        ([*[0.0] * 4, 0.9, 0.9, *[0.0] * 4], A, None),
    ],
)
def test_wrong_rows_are_one_piece_at_an_end(
    rows: Sequence[float], allowed: float, expected: tuple[int, int] | None
) -> None:
    found = verdict(measured({2: 0.5, 3: 0.0}, rows=rows), allowed)

    assert (found.cause, found.rows) == ("right" if expected is None else "rows", expected)
    assert found.to_dict()["rows"] == (None if expected is None else list(expected))


@pytest.mark.parametrize(
    ("rows", "fades"),
    [
        # the first three rows: 1.8 times as far as the last quarter
        ([0.9] * 3 + [0.5] * 5, True),
        ([0.875] * 3 + [0.5] * 5, False),
        ([0.9, 0.9, 0.875] + [0.5] * 5, False),
        ([0.9] * 3 + [0.2] + [0.5] * 4, True),
        # the first quarter: 1.4 times
        ([0.9] * 3 + [0.7] * 5 + [0.5] * 24, True),
        ([0.9] * 3 + [0.6875] * 5 + [0.5] * 24, False),
        ([0.9] * 3 + [0.5, 0.625, 0.5], True),
        # four rows are enough, three are not
        ([0.9, 0.9, 0.9, 0.5], True),
        ([0.9, 0.5, 0.5], False),
    ],
)
def test_padding_is_a_slope_down_from_the_first_rows(rows: Sequence[float], fades: bool) -> None:
    assert verdict(measured(FAR, rows=rows)).cause == ("padding" if fades else "other_weights")
    assert verdict(measured({3: 0.375, 9: 1.0}, rows=rows)).cause == ("padding" if fades else "other_states")


@pytest.mark.parametrize(("boundaries", "expected"), [((0, 3), "padding"), ((31, 1), "padding"), ((1, 31), "padding")])
def test_padding_is_told_from_the_shallowest_layer_that_sees_other_tokens(
    boundaries: tuple[int, int], expected: str
) -> None:
    """The embedding sees none, and deep layers blur it."""
    fading, flat = [0.9] * 3 + [0.5] * 5, [0.5] * 8
    slots = [
        measured(
            {at: 0.0} if at == 0 else {at - 1: 0.5, at: 0.4, at + 1: 0.5},
            at,
            [0.0] * 8 if at == 0 else fading if at in (1, 3) else flat,
        )
        for at in boundaries
    ]

    found = [item.cause for item in diagnose([slots], ALLOWED, FINE)]

    assert found == ["right" if at == 0 else expected for at in boundaries]


def test_slots_of_other_tokens_are_not_permuted() -> None:
    slots = [
        measured({3: 0.9, 31: 0.9}, 3, shift=Shift(1, 31, 0.0)),
        measured({3: 0.9, 31: 0.9}, 31, shift=Shift(1, 3, 0.0)),
    ]

    assert [item.cause for item in diagnose([slots], ALLOWED, FINE)] == ["misaligned", "misaligned"]


def test_slots_that_resemble_nothing_do_not_hide_permuted_ones() -> None:
    slots = [
        measured({3: 0.9, 31: 0.0, 59: 0.9}, 3),
        measured({3: 0.0, 31: 0.9, 59: 0.9}, 31),
        measured({3: 1.2, 31: 1.2, 58: 1.2, 59: 1.2}, 59),
    ]

    assert [item.cause for item in diagnose([slots], ALLOWED, FINE)] == ["permuted", "permuted", "other_target"]
