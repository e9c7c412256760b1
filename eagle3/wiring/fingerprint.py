"""Compares given hidden states with given hidden states: how far each slot is from each of the target's states.

The one file of `wiring` that uses torch, and only inside functions: importing it needs the standard library alone.
What the numbers mean is said in `diagnosis.py`.

Legend: R rows of a slot, T rows of the target, C channels (the hidden size, or a subset of it).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from eagle3.wiring.diagnosis import ROUNDING, Boundary, Measured, Shift

if TYPE_CHECKING:
    import torch

_MAX_SHIFT = 8
_SEARCH_CHANNELS = 256
_MIN_LEVELS = 1024  # values that it takes to tell few levels from few values


def measure(
    slot: str,
    expected: Boundary,
    found: torch.Tensor,
    reference: Mapping[Boundary, torch.Tensor],
    *,
    allowed: float,
    sample: str = "",
    found_rows: Sequence[int] | None = None,
    reference_rows: Sequence[int] | None = None,
) -> Measured:
    """The errors of one slot of one sample against every state of the target that is given.

    The error of a row is the norm of the difference over the norm of the target's row; a slot's error is the median
    over its rows. If none is within `allowed`, the slot is also compared with the target's rows up to 8 tokens
    before and after.

    Args:
        slot: what to call it, e.g. `slot 0`.
        expected: the boundary that it should equal.
        found: [R, C], any floating type.
        reference: the target's states [T, C] by boundary; `expected` must be among them.
        allowed: error of equal states, see `diagnosis.allowed_error`.
        sample: what to call the sample.
        found_rows, reference_rows: token positions of the rows; default: from 0.
    """
    import torch

    rows = list(range(len(found)) if found_rows is None else found_rows)
    places = {position: row for row, position in enumerate(reference_rows or range(len(reference[expected])))}
    wide = found.to(torch.float32)
    pairs = [(row, places[position]) for row, position in enumerate(rows) if position in places]
    errors = {boundary: _row_errors(wide, states, pairs) for boundary, states in reference.items()}
    medians = {boundary: _median(values) for boundary, values in errors.items()}
    shift = None if min(medians.values()) <= allowed else _best_shift(wide, reference, rows, places)
    return Measured(
        sample=sample,
        slot=slot,
        expected=expected,
        errors=medians,
        row_errors={rows[row]: error for (row, _), error in zip(pairs, errors[expected].tolist(), strict=True)},
        shift=shift,
        precision=coarsest_type(found),
    )


def coarsest_type(values: torch.Tensor) -> str:
    """The coarsest floating type that holds all these values: a store may say more than its numbers carry.

    A tensor of fp8 values times one scale is known by its few levels, if it has enough values to tell.
    """
    import torch

    wide = values.to(torch.float32)
    few_levels = wide.numel() >= _MIN_LEVELS and wide.abs().unique().numel() <= 127
    fits = {name: bool((wide.to(getattr(torch, name)).float() == wide).all()) for name in ROUNDING}
    fits["float8_e4m3fn"] |= few_levels
    return max((name for name, fit in fits.items() if fit), key=ROUNDING.__getitem__, default="float32")


def _row_errors(found: torch.Tensor, states: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Relative error of each pair of rows [len(pairs)]; infinite where a value is not finite."""
    import torch

    mine, theirs = (list(side) for side in zip(*pairs, strict=True))
    wanted = states[theirs].to(torch.float32)
    errors = (found[mine] - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    return errors.nan_to_num(nan=float("inf"), posinf=float("inf"))


def _median(values: torch.Tensor) -> float:
    return float(values.median())


def _best_shift(
    found: torch.Tensor, reference: Mapping[Boundary, torch.Tensor], rows: Sequence[int], places: Mapping[int, int]
) -> Shift | None:
    """The best match of row t with the target's row t + k, over k (not 0) and all boundaries."""
    step = max(1, found.shape[-1] // _SEARCH_CHANNELS)
    narrow = found[:, ::step]
    best: Shift | None = None
    for distance in range(1, _MAX_SHIFT + 1):
        for tokens in (distance, -distance):
            pairs = [(row, places[at + tokens]) for row, at in enumerate(rows) if at + tokens in places]
            if len(pairs) < max(2, min(len(rows), len(places)) // 2):
                continue
            for boundary, states in reference.items():
                error = _median(_row_errors(narrow, states[:, ::step], pairs))
                if best is None or error < best.error:
                    best = Shift(tokens, boundary, error)
    return best
