"""What to compute for a batch, made on the CPU before the batch's turn, and moved to a GPU by one copy.

Shapes: S sources, C chains, K TTT steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from eagle3.draft.chains import ChainPlan, plan_chains
from eagle3.draft.config import TTTSettings
from eagle3.draft.fused.layout import Chunk, make_chunks

_CHUNK_TENSORS = [field.name for field in fields(Chunk) if field.name != "counts"]
_ALIGNED = 4
"""Numbers of 4 bytes that begin at 16 bytes: a kernel is compiled anew for pointers that do not."""


@dataclass(frozen=True, eq=False)
class Planned:
    """A batch's plan.

    Attributes:
        plan: the chains; `host` is the plan on the CPU.
        active: bool [K, C], whether a chain's term counts.
        chunks: the plan as the fused step computes it; None leaves it to autograd, or there is no chain.
        packed: all tensors of the others in one, in pinned memory; None where there is no GPU to copy it to.
    """

    plan: ChainPlan
    active: torch.Tensor
    chunks: list[Chunk] | None
    packed: torch.Tensor | None = None

    def to(self, device: torch.device) -> Planned:
        """The same on `device`; nobody waits for the copy."""
        if device.type == "cpu":
            return self
        assert self.packed is not None
        parts = _unpack(self.packed.to(device, non_blocking=True), self._tensors())
        sources, chains, active = (next(parts) for _ in range(3))
        plan = replace(self.plan, sources=sources, chains=chains, host=self.plan)
        return Planned(plan, active, self.chunks and [_moved(chunk, parts) for chunk in self.chunks])

    def _tensors(self) -> list[torch.Tensor]:
        """In the order in which `to` takes them."""
        parts = [self.plan.sources, self.plan.chains, self.active]
        return parts + [getattr(chunk, name) for chunk in self.chunks or [] for name in _CHUNK_TENSORS]


def plan_batch(loss_mask: torch.Tensor, document_ids: torch.Tensor, ttt: TTTSettings) -> Planned:
    """Plans a batch on the CPU.

    Args:
        loss_mask: bool [B, T].
        document_ids: int64 [B, T], -1 = padding.
    """
    plan = plan_chains(loss_mask.cpu(), document_ids.cpu(), ttt.steps, ttt.chain_rule)
    chunks = make_chunks(plan, ttt.chunk) if ttt.chunk is not None and plan.document_sources else None
    planned = Planned(plan, plan.active, chunks)
    return replace(planned, packed=_pack(planned._tensors()).pin_memory()) if torch.cuda.is_available() else planned


def _moved(chunk: Chunk, parts: Iterator[torch.Tensor]) -> Chunk:
    values: dict[str, Any] = {name: next(parts) for name in _CHUNK_TENSORS}
    return replace(chunk, **values)


def _pack(parts: list[torch.Tensor]) -> torch.Tensor:
    padded = [torch.nn.functional.pad(part.flatten().int(), (0, -part.numel() % _ALIGNED)) for part in parts]
    return torch.cat(padded)


def _unpack(packed: torch.Tensor, like: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The parts of `packed`, in shape and type as those of `like`."""
    pieces = packed.split([part.numel() + -part.numel() % _ALIGNED for part in like])
    for part, piece in zip(like, pieces, strict=True):
        yield piece[: part.numel()].view(part.shape).to(part.dtype)
