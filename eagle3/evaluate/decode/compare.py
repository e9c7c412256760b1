"""Greedy answers held against the target's own, token by token; what differs is told with its place and logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

NEAR = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2**-7, torch.bfloat16: 2**-4}
"""Share of the larger logit's magnitude by which the same logit may differ when other rows are computed with it: a few
times what a type's rounding adds up to over a target's layers."""


@dataclass(frozen=True)
class Deviation:
    """The first token of an answer that is not the target's own.

    Attributes:
        set, id: the answer.
        place: of the token, from 0.
        own, said: the target's own token, and the one in its place; None where an answer ended before it.
        gap: by how much the target's logit for its own exceeds that for the other, in a pass over the text alone.
        allowed: the gap that rounding may bring about.
    """

    set: str
    id: str
    place: int
    own: int | None
    said: int | None
    gap: float | None
    allowed: float | None

    @property
    def near_tie(self) -> bool:
        """Whether rounding may have chosen between the two."""
        return self.gap is not None and self.allowed is not None and abs(self.gap) <= self.allowed

    def render(self) -> str:
        where = f"{self.set}: {self.id}, token {self.place}: {self.said} in place of the target's own {self.own}"
        if self.gap is None:
            return f"{where}: one of the answers ended there"
        kind = "a near tie" if self.near_tie else "NOT a near tie"
        return f"{where}; its logits differ by {self.gap:.3g}, {kind} (rounding allows {self.allowed:.3g})"


@torch.inference_mode()
def find_deviation(
    model: PreTrainedModel,
    where: tuple[str, str],
    prompt: Sequence[int],
    said: Sequence[int],
    own: Sequence[int],
    tolerance: float | None,
) -> Deviation | None:
    """Where an answer leaves the target's own, or None.

    Args:
        where: set and id.
        prompt: token ids that both answer.
        tolerance: of the gap; None: `NEAR` of the model's type.
    """
    if list(said) == list(own):
        return None
    shared = min(len(said), len(own))
    place = next((i for i in range(shared) if said[i] != own[i]), shared)
    if place == shared:
        theirs, ours = (ids[place] if place < len(ids) else None for ids in (own, said))
        return Deviation(*where, place, theirs, ours, None, None)
    text = torch.tensor([[*prompt, *own[:place]]], device=model.device)
    logits = model(text, use_cache=False, logits_to_keep=1).logits[0, -1].float()
    one, other = float(logits[own[place]]), float(logits[said[place]])
    allowed = NEAR[model.dtype] * max(abs(one), abs(other)) if tolerance is None else tolerance
    return Deviation(*where, place, own[place], said[place], one - other, allowed)
