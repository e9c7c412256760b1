"""The fused step as one operation of autograd.

Gradients are computed in the forward pass, since nothing that comes after a loss changes more than their scale; the
backward pass hands them out.

Shapes: S sources, C chains, K TTT steps, H hidden, D draft vocab.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from eagle3.draft.config import DraftConfig, Objective
from eagle3.draft.fused import plain
from eagle3.draft.fused.chunk import Rows
from eagle3.draft.fused.layout import Chunk
from eagle3.draft.fused.step import Inputs, Step
from eagle3.draft.fused.weights import Gradients, KeptWeights, Weights, parameters_of
from eagle3.draft.model import DraftModel


@dataclass(frozen=True, eq=False)
class Terms:
    """A batch's loss and its rows.

    Attributes:
        loss: scalar, connected to the drafter's weights and to `hidden`.
        loss_sums: [K], each step's sum over the terms that count.
        rows: of each chunk.
    """

    loss: torch.Tensor
    loss_sums: torch.Tensor
    rows: list[Rows]


def fused_terms(
    model: DraftModel,
    hidden: torch.Tensor,
    embedded: torch.Tensor,
    positions: torch.Tensor,
    chains: torch.Tensor,
    chunks: list[Chunk],
    teacher: torch.Tensor,
    known: torch.Tensor,
    scales: torch.Tensor,
    kept: KeptWeights,
    objective: Objective,
) -> Terms:
    """The loss of one batch.

    Args:
        model: the drafter.
        hidden: [S, H], step 0's states, in the type to compute in.
        embedded: [S, H], of that type.
        positions, chains, chunks, teacher, known, scales, objective: see `Inputs`.
        kept: where the weights' copies are taken from.
    """
    inputs = Inputs(hidden.detach(), embedded, positions, chains, chunks, teacher, known, scales, objective)
    rows: list[Rows] = []
    loss, loss_sums = _Fused.apply(model.config, inputs, kept, rows, hidden, *parameters_of(model))
    return Terms(loss, loss_sums, rows)


def choose_ops(like: torch.Tensor) -> ModuleType:
    """The operations for a tensor's device and type: Triton's for bfloat16 on a GPU."""
    if like.is_cuda and like.dtype == torch.bfloat16:
        from eagle3.draft.fused import cuda

        return cuda
    return plain


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        config: DraftConfig,
        inputs: Inputs,
        kept: KeptWeights,
        found: list[Rows],
        hidden: torch.Tensor,
        *values: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype, ops = inputs.hidden.dtype, choose_ops(inputs.hidden)
        with torch.autocast(inputs.hidden.device.type, enabled=False):
            parameters = list(values)
            weights = kept.get(lambda: Weights.of(config, parameters, dtype, ops, kept.float8))
            gradients = Gradients(weights, parameters, ops) if any(ctx.needs_input_grad) else None
            step = Step(ops, config, weights, inputs, gradients)
            sums = torch.zeros(len(inputs.scales), dtype=ops.wide(dtype), device=hidden.device)
            for rows in step.run():
                sums += torch.stack([part.sum() for part in rows.losses.split(rows.chunk.counts)])
                found.append(rows)
        ctx.ops = ops
        ctx.gradients = None if gradients is None else [step.hidden_grad.to(hidden.dtype), *gradients.in_order()]
        ctx.mark_non_differentiable(sums)
        return (sums * inputs.scales).sum(), sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "the fused step goes backward once"
        ctx.ops.scale_all(gradients, grad)
        return (None, None, None, None, *gradients)
