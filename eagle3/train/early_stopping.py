"""Early stopping: a run ends once the acceptance length on held-out samples has not improved for some evaluations.

Every process has the same evaluation, so all of them end after the same step; where it stands is part of a checkpoint.
"""

from __future__ import annotations

from eagle3.config import EarlyStoppingSection
from eagle3.train.checkpoint import Plateau


def after_evaluation(plateau: Plateau | None, length: float | None, section: EarlyStoppingSection) -> Plateau:
    """Where it stands after an evaluation.

    Args:
        plateau: before it; None where it is the first.
        length: its acceptance length; None, without a round, is no improvement.
    """
    if plateau is None:
        return Plateau(length, 0)
    best = plateau.acceptance_length
    if length is not None and (best is None or length > best + section.min_delta):
        return Plateau(length, 0)
    return Plateau(best, plateau.evaluations + 1)


def reason_to_stop(plateau: Plateau | None, section: EarlyStoppingSection | None) -> str | None:
    """Why the run ends here, or None if it goes on."""
    if section is None or plateau is None or plateau.evaluations < section.patience:
        return None
    best = plateau.acceptance_length
    above = f" by more than {section.min_delta:g}" if section.min_delta else ""
    was = "there was none to measure" if best is None else f"{best:.4f}{above}"
    return f"acceptance length has not risen above {was} for {plateau.evaluations} evaluations"
