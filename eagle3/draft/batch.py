"""What one forward pass reads.

Shapes: B rows, T tokens, L supervised ones, A aux layers, H target hidden, R chosen ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from eagle3.draft.loss import shifted
from eagle3.draft.noise import add_noise, noise_keys
from eagle3.draft.planned import Planned
from eagle3.draft.states import dequantize


@dataclass(frozen=True)
class DraftBatch:
    """Rows of tokens with the target's states; several documents may share a row.

    Attributes:
        input_ids: int64 [B, T].
        loss_mask: bool [B, T], true at supervised tokens.
        aux: [B, T, A * H], the captured layers, concatenated in ascending order.
        last_hidden: [L, H], the last hidden states of the supervised tokens, in the order of `loss_mask`;
            `TargetHead.kind` says whether they are normed.
        document_ids: int64 [B, T]; each document is one run of equal ids >= 0, padding is -1.
        position_ids: int64 [B, T], the tokens' positions in their documents.
        sample_ids: the samples inside, for messages.
        aux_scales, last_scales: float32 [B, T, A] and [L], where states are fp8 (see `eagle3.draft.states`).
        target_argmax: int64 [L], the target's greedy tokens over the full vocab, by these last hidden states; None: to
            be found with the target's head.
        noise_keys: int64, of each of `sample_ids`, where aux states get noise, see `eagle3.draft.noise`.
        noise_width: of that noise.
        planned: what to compute, where it was planned before the batch's turn; for these very loss mask and documents.
    """

    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    aux: torch.Tensor
    last_hidden: torch.Tensor
    document_ids: torch.Tensor
    position_ids: torch.Tensor
    sample_ids: list[str]
    aux_scales: torch.Tensor | None = None
    last_scales: torch.Tensor | None = None
    target_argmax: torch.Tensor | None = None
    planned: Planned | None = None
    noise_keys: torch.Tensor | None = None
    noise_width: float = 0.0

    def __post_init__(self) -> None:
        shape = self.input_ids.shape
        for tensor in (self.loss_mask, self.document_ids, self.position_ids, self.aux[..., 0]):
            assert tensor.shape == shape, (tensor.shape, shape)
        assert self.loss_mask.dtype == torch.bool, self.loss_mask.dtype
        assert self.last_hidden.ndim == 2, self.last_hidden.shape
        if self.target_argmax is not None:
            assert self.target_argmax.shape == self.last_hidden.shape[:1], self.target_argmax.shape

    def aux_rows(self, places: torch.Tensor) -> torch.Tensor:
        """[R, A * H], the captured layers of tokens at flat places int64 [R] in B * T, with their noise if there is."""
        if self.aux_scales is None:
            states = self.aux.flatten(0, 1).index_select(0, places)
        else:
            scales = self.aux_scales.flatten(0, 1).index_select(0, places)
            rows = _rows(self.aux.flatten(0, 1), places).unflatten(1, (scales.shape[1], -1))
            states = dequantize(rows, scales).flatten(1)
        if self.noise_keys is None:
            return states
        begins = self.document_ids != shifted(self.document_ids, -1, -2)
        samples = (begins & (self.document_ids >= 0)).flatten().cumsum(0)[places] - 1
        slots = states.shape[1] // self.last_hidden.shape[1]
        return add_noise(states, slots, self.noise_width, self.noise_keys[samples], self.position_ids.flatten()[places])

    def with_noise(self, width: float, seed: int, step: int) -> DraftBatch:
        """The same batch with noise of this width on its aux states, that of a step."""
        return replace(self, noise_keys=noise_keys(self.sample_ids, seed, step), noise_width=width)

    def last_rows(self, places: torch.Tensor) -> torch.Tensor:
        """[R, H], the last hidden states of tokens at flat places int64 [R] in B * T; zeros where not supervised."""
        supervised, rows = self._last_places(places)
        if self.last_scales is None:
            states = self.last_hidden.index_select(0, rows)
        else:
            states = dequantize(_rows(self.last_hidden, rows), self.last_scales.index_select(0, rows))
        return states.masked_fill(~supervised[:, None], 0)

    def argmax_rows(self, places: torch.Tensor) -> torch.Tensor | None:
        """`target_argmax` [R] of tokens at flat places int64 [R] in B * T; 0 where not supervised."""
        if self.target_argmax is None:
            return None
        supervised, rows = self._last_places(places)
        return self.target_argmax.index_select(0, rows).masked_fill(~supervised, 0)

    def _last_places(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of tokens at flat places [R]: whether they are supervised, and which row of `last_hidden` is theirs."""
        mask = self.loss_mask.flatten()
        rows = (mask.cumsum(0) - 1).clamp(min=0)
        return mask.index_select(0, places), rows.index_select(0, places)

    def without_aux(self) -> DraftBatch:
        """The same batch with one value a token in place of its captured layers, for who reads the teacher only."""
        return replace(self, aux=self.aux[..., :1], aux_scales=None, noise_keys=None)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> DraftBatch:
        """The same batch on `device`."""
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=non_blocking) if isinstance(value, torch.Tensor) else value
            for name, value in vars(self).items()
        }
        return DraftBatch(**moved)


def _rows(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Rows of an fp8 tensor, which has no `index_select` of its own on every device."""
    return values.view(torch.uint8).index_select(0, places).view(values.dtype)
