"""What is in a slot, told from how far it is from each of the target's states. Numbers in, sentences out.

A boundary is 0 for the embedding, i + 1 for the output of decoder layer i, and `POST_NORM` for the last hidden states
after the final norm. Standard library only; the numbers come from `fingerprint.py`.

Legend: N decoder layers of the target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from statistics import median
from typing import Any

POST_NORM = "post_norm"
Boundary = int | str

ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8, "float8_e4m3fn": 2.0**-4}
"""Largest relative error of rounding a value to a type (in its normal range)."""

# What two runs of one target differ by, besides rounding what they store: the order of summation in that type, through
# all layers. Measured: at most 2e-6 in float32; up to 3.5% (the median row) between float32 and bfloat16.
_COMPUTING = {"float32": 5e-4, "float16": 2e-2, "bfloat16": 6e-2}
_UNRELATED = 0.5  # no precision and no fine-tune brings equal states this far apart
_NOISY = 1e-2  # from here on, a single row may be off by chance
_FADING, _SLOPE = 1.8, 1.4  # least error of the first three rows, and that of the first quarter, over the last quarter
_VAGUE = ("other_weights", "other_target", "other_states")
_CLEARLY = 0.5  # the best match has at most this share of the next one's error


def allowed_error(stored: str, computed: str) -> float:
    """Largest error of a slot that holds the right states.

    Args:
        stored: type of the stored states.
        computed: the coarser of the types in which the two sides were computed.
    """
    return ROUNDING[stored] + _COMPUTING[computed]


def coarser(one: str, other: str) -> str:
    """Of two types, the one that rounds more."""
    return max(one, other, key=ROUNDING.__getitem__)


@dataclass(frozen=True)
class Shift:
    """Row t equals the target's row t + `tokens` at `boundary` within `error`."""

    tokens: int
    boundary: Boundary
    error: float


@dataclass(frozen=True)
class Measured:
    """How far one slot of one sample is from the target's states.

    Attributes:
        sample, slot: their names.
        expected: the boundary that it should equal.
        errors: median over rows of the relative error, by boundary.
        row_errors: error of each row against `expected`, by token position.
        shift: the best match at other tokens; None if a direct match is good enough, or none can be tried.
        precision: the coarsest type that holds its values.
    """

    sample: str
    slot: str
    expected: Boundary
    errors: Mapping[Boundary, float]
    row_errors: Mapping[int, float]
    shift: Shift | None
    precision: str

    @property
    def closest(self) -> Boundary:
        return min(self.errors, key=self.errors.__getitem__)


@dataclass(frozen=True)
class Verdict:
    """One slot of one sample, diagnosed.

    Attributes:
        cause: `right`, or the last part of a problem's kind.
        found: the boundary that it holds, where that is known.
        tokens: row t holds token t + `tokens` (0 unless misaligned).
        rows: half-open range of the token positions that are wrong, where only some are.
    """

    measured: Measured
    cause: str
    found: Boundary | None = None
    tokens: int = 0
    rows: tuple[int, int] | None = None

    @property
    def error(self) -> float:
        """The error of what it holds; of the closest boundary where that is not known."""
        if self.tokens and self.measured.shift is not None:
            return self.measured.shift.error
        return self.measured.errors[self.measured.closest if self.found is None else self.found]

    @property
    def next_error(self) -> float:
        """The smallest error of any other boundary."""
        held = self.measured.closest if self.found is None and not self.tokens else self.found
        others = [error for boundary, error in self.measured.errors.items() if boundary != held or self.tokens]
        return min(others, default=float("inf"))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, without the errors of single rows; an error that is not finite is null."""
        return {
            "sample": self.measured.sample,
            "slot": self.measured.slot,
            "expected": self.measured.expected,
            "cause": self.cause,
            "found": self.found,
            "tokens": self.tokens,
            "rows": None if self.rows is None else list(self.rows),
            "precision": self.measured.precision,
            "error": _finite(self.error),
            "next_error": _finite(self.next_error),
            "errors": {str(boundary): _finite(error) for boundary, error in self.measured.errors.items()},
        }


def diagnose(samples: Sequence[Sequence[Measured]], allowed: float, precision: str = "float8_e4m3fn") -> list[Verdict]:
    """The verdicts on all slots of all samples.

    Args:
        samples: the slots of each sample.
        allowed: see `allowed_error`.
        precision: the type that the values should carry; coarser values are a problem of their own.
    """
    grouped = [_sample_verdicts(sample, allowed, precision) for sample in samples]
    verdicts = [verdict for group in grouped for verdict in group]
    shallow = [min(group, key=lambda verdict: _depth(verdict.measured.expected)) for group in grouped]
    if _fade([verdict.measured.row_errors for verdict in shallow if verdict.cause in _VAGUE]):
        verdicts = [replace(item, cause="padding") if item.cause in _VAGUE else item for item in verdicts]
    return verdicts


def _sample_verdicts(sample: Sequence[Measured], allowed: float, precision: str) -> list[Verdict]:
    verdicts = [_verdict(slot, allowed, precision) for slot in sample]
    moved = [item for item in verdicts if item.found not in (None, item.measured.expected) and not item.tokens]
    if len(moved) > 1 and {item.found for item in moved} == {item.measured.expected for item in moved}:
        verdicts = [replace(item, cause="permuted") if item in moved else item for item in verdicts]
    return verdicts


def _verdict(slot: Measured, allowed: float, precision: str) -> Verdict:
    best = slot.errors[slot.closest]
    if slot.shift is not None and _is_match(slot.shift.error, best, allowed):
        return Verdict(slot, "misaligned", slot.shift.boundary, tokens=slot.shift.tokens)
    found = _identified(slot, allowed)
    if found not in (None, slot.expected):
        return Verdict(slot, _relocation(slot, found), found)
    coarse = ROUNDING[slot.precision] > ROUNDING[precision]
    bound = allowed + ROUNDING[slot.precision] * coarse
    if rows := _wrong_rows(slot.row_errors, bound):
        return Verdict(slot, "rows", slot.expected, rows=rows)
    if found is not None and (coarse or best <= allowed):
        return Verdict(slot, "precision" if coarse else "right", found)
    if isinstance(slot.expected, int) and not slot.errors.keys() & {slot.expected - 1, slot.expected + 1}:
        return Verdict(slot, "other_states")
    close = slot.closest == slot.expected and best < _UNRELATED
    return Verdict(slot, "other_weights" if close else "other_target", slot.expected if close else None)


def _identified(slot: Measured, allowed: float) -> Boundary | None:
    """The boundary that the slot holds, if one stands out; the expected one if it is as close as the closest."""
    best = slot.errors[slot.closest]
    if slot.errors[slot.expected] <= min(allowed, 2 * best + ROUNDING["float32"]):
        return slot.expected
    others = [error for boundary, error in slot.errors.items() if boundary != slot.closest]
    if _is_match(best, min(others, default=float("inf")), allowed):
        return slot.closest
    return None


def _is_match(error: float, other: float, allowed: float) -> bool:
    return error <= allowed or (error <= _CLEARLY * other and error < _UNRELATED)


def _relocation(slot: Measured, found: Boundary | None) -> str:
    if found == POST_NORM:
        return "post_norm"
    if found == 0:
        return "embedding"
    if slot.expected == POST_NORM:
        last = max(boundary for boundary in slot.errors if isinstance(boundary, int))
        return "pre_norm" if found == last else "other_layer"
    assert isinstance(slot.expected, int) and isinstance(found, int)
    return {-1: "one_early", 1: "one_late"}.get(found - slot.expected, "other_layer")


def _wrong_rows(row_errors: Mapping[int, float], allowed: float) -> tuple[int, int] | None:
    """The range of wrong rows if they stand in one piece at one end, and the others are right.

    Where many rows are noisy (a router of experts that falls the other way), wrong ones lie scattered: no range.
    """
    positions = sorted(row_errors)
    wrong = [position for position in positions if row_errors[position] > 4 * allowed]
    good = [position for position in positions if row_errors[position] <= allowed]
    if not wrong or not good:
        return None
    within = [position for position in positions if wrong[0] <= position <= wrong[-1]]
    outside = len(positions) - len(within)
    if allowed > _NOISY and len(wrong) < 2:
        return None
    in_one_piece = len(wrong) >= 0.8 * len(within) and len(good) >= 0.9 * outside
    at_an_end = wrong[0] == positions[0] or wrong[-1] == positions[-1]
    if not in_one_piece or not at_an_end:
        return None
    return wrong[0], wrong[-1] + 1


def _depth(boundary: Boundary) -> float:
    """Orders slots by how well they show padding: the embedding sees no other token, deep layers blur it."""
    return boundary if isinstance(boundary, int) and boundary > 0 else float("inf")


def _fade(samples: Sequence[Mapping[int, float]]) -> bool:
    """True if, in the samples at large, the first rows are far off and later ones ever closer.

    They attended to something in front of them, which counts less and less as the sample goes on. Other weights show
    no such slope. Padding longer than the sample does not either: then no row comes close.
    """
    first, quarters = [], []
    for row_errors in samples:
        errors = [row_errors[position] for position in sorted(row_errors)]
        quarter = len(errors) // 4
        if quarter:
            end = max(median(errors[-quarter:]), ROUNDING["float32"])
            first.append(min(errors[:3]) / end)
            quarters.append(median(errors[:quarter]) / end)
    return bool(first) and median(first) >= _FADING and median(quarters) >= _SLOPE


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None
