"""What one forward pass reads.

Shapes: B rows, T tokens, A aux layers, H target hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class DraftBatch:
    """Rows of tokens with the target's states; several documents may share a row.

    Attributes:
        input_ids: int64 [B, T].
        loss_mask: bool [B, T], true at supervised tokens.
        aux: [B, T, A * H], the captured layers, concatenated in ascending order.
        last_hidden: [B, T, H], the last hidden states; `TargetHead.kind` says whether they are normed.
        document_ids: int64 [B, T]; each document is one run of equal ids >= 0, padding is -1.
        position_ids: int64 [B, T], the tokens' positions in their documents.
        sample_ids: the samples inside, for messages.
    """

    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    aux: torch.Tensor
    last_hidden: torch.Tensor
    document_ids: torch.Tensor
    position_ids: torch.Tensor
    sample_ids: list[str]

    def __post_init__(self) -> None:
        shape = self.input_ids.shape
        for tensor in (
            self.loss_mask,
            self.document_ids,
            self.position_ids,
            self.aux[..., 0],
            self.last_hidden[..., 0],
        ):
            assert tensor.shape == shape, (tensor.shape, shape)
        assert self.loss_mask.dtype == torch.bool, self.loss_mask.dtype

    def to(self, device: torch.device | str, non_blocking: bool = False) -> DraftBatch:
        """The same batch on `device`."""
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=non_blocking) if isinstance(value, torch.Tensor) else value
            for name, value in vars(self).items()
        }
        return DraftBatch(**moved)
