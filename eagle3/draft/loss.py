"""Which loss terms count, what the teacher says there, and the loss itself.

Chain i starts from the state of token i and the embedding of token i + 1; at step k it predicts token i + 2 + k.
Term (i, k) is that prediction. `docs/training-step.md` has the definitions.

Shapes: B rows, T tokens, H target hidden, D draft vocab, V target vocab, K TTT steps, R rows of one step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from eagle3.draft.config import ChainRule, Objective
from eagle3.draft.objective import losses_and_slopes

LastHiddenKind = Literal["post_norm", "pre_norm"]
TEACHER_ROWS = 1024
"""Rows whose logits over the full vocab exist at once."""


@dataclass(frozen=True)
class TargetHead:
    """What turns last hidden states into the target's logits.

    Attributes:
        lm_head: [V, H]; the logits are computed in its type.
        norm_weight: [H], the final norm.
        eps: the final norm's epsilon.
        kind: whether the last hidden states are after or before the final norm.
        ids: int64 [D], the draft vocab's target ids, where `lm_head` [D, H] has these rows alone.
    """

    lm_head: torch.Tensor
    norm_weight: torch.Tensor
    eps: float
    kind: LastHiddenKind
    ids: torch.Tensor | None = None

    def only(self, ids: torch.Tensor) -> TargetHead:
        """The rows of these target ids alone, int64 [D] ascending: for batches that have the greedy tokens."""
        assert self.ids is None
        return replace(self, lm_head=self.lm_head[ids.to(self.lm_head.device)], ids=ids)

    def to(self, device: torch.device | str) -> TargetHead:
        """The same on `device`."""
        return replace(self, lm_head=self.lm_head.to(device), norm_weight=self.norm_weight.to(device))

    def logits(self, last_hidden: torch.Tensor) -> torch.Tensor:
        """Target logits [R, V or D] of last hidden states [R, H]."""
        states = post_norm(last_hidden.to(self.lm_head.dtype), self.kind, self.norm_weight, self.eps)
        return F.linear(states, self.lm_head)


def post_norm(last_hidden: torch.Tensor, kind: LastHiddenKind, norm_weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The last hidden states [.., H] as the target's head reads them."""
    if kind == "post_norm":
        return last_hidden
    assert kind == "pre_norm", kind
    return rms_norm(last_hidden, norm_weight, eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm (arXiv 1910.07467) of x [.., H], computed in at least float32, returned in x's type."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def active_terms(loss_mask: torch.Tensor, document_ids: torch.Tensor, steps: int, rule: ChainRule) -> torch.Tensor:
    """bool [K, B, T]: term (i, k) counts, for chains by the position of their own token.

    `served`: tokens i+1 .. i+2+k all belong to one answer, which is what serving drafts.
    `shifted`: tokens i+1+k and i+2+k do (SpecForge shifts the step-0 mask by k).
    Either way token i must be in the same document. An answer is a run of supervised tokens within a document.

    Args:
        loss_mask: bool [B, T].
        document_ids: int64 [B, T], -1 = padding.
        steps: K.
        rule: see above.
    """
    runs = document_runs(document_ids)
    supervised = loss_mask & (document_ids >= 0)
    answers = (supervised & ~shifted(supervised, -1, False)).cumsum(1) * supervised
    terms = []
    for k in range(steps):
        first = shifted(answers, 1 if rule == "served" else 1 + k, 0)
        last = shifted(answers, 2 + k, 0)
        one_document = runs == shifted(runs, 2 + k, -1)  # which also ends answers at their document's end
        terms.append((last > 0) & (first == last) & one_document)
    return torch.stack(terms)


def document_runs(document_ids: torch.Tensor) -> torch.Tensor:
    """int64 [B, T], from 0 up over the whole batch: a number for each run of equal document ids [B, T] in a row."""
    starts = document_ids != shifted(document_ids, -1, -2)
    return (starts.flatten().cumsum(0) - 1).view_as(document_ids)


def shifted(x: torch.Tensor, by: int, fill: int | bool) -> torch.Tensor:
    """x [B, T] read `by` places to the right (column t holds x[:, t + by]), `fill` where there is nothing."""
    result = torch.full_like(x, fill)
    width = max(x.shape[1] - abs(by), 0)
    if by >= 0:
        result[:, :width] = x[:, by : by + width]
    else:
        result[:, -by : -by + width] = x[:, :width]
    return result


@torch.no_grad()
def read_teacher(
    head: TargetHead, last_hidden: torch.Tensor, ids: torch.Tensor, argmax: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the target says at rows [R, H] of its last hidden states.

    Args:
        head: all rows of it, or, where `argmax` is given, it may have those of `ids` alone.
        ids: int64 [D], the draft vocab's target ids, ascending.
        argmax: int64 [R], its greedy tokens over the full vocab, where they are known.

    Returns:
        Its greedy token over the full vocab, int64 [R], and its logits [R, D] on the draft vocab.
    """
    if head.ids is not None:
        assert argmax is not None, "without the greedy tokens it takes all of the target's head"
        return argmax, head.logits(last_hidden)
    found = [_greedy_and_chosen(head.logits(rows), ids) for rows in last_hidden.split(TEACHER_ROWS)]
    greedy, chosen = zip(*found, strict=True)
    return torch.cat(greedy) if argmax is None else argmax, torch.cat(chosen)


def _greedy_and_chosen(logits: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if logits.is_cuda:
        from eagle3.draft.kernels.loss import greedy_and_chosen

        return greedy_and_chosen(logits, ids)
    return logits.argmax(-1), logits.index_select(1, ids)


def row_losses(logits: torch.Tensor, teacher_logits: torch.Tensor, objective: Objective) -> torch.Tensor:
    """The loss of each row, in at least float32.

    Args:
        logits: [R, D], the draft's.
        teacher_logits: [R, D], the target's on the draft vocab; no gradient flows there.
        objective: which loss.

    Returns:
        [R].
    """
    return _RowLosses.apply(logits, teacher_logits, objective)


class _RowLosses(torch.autograd.Function):
    """Keeps one [R, D] tensor for backward, the gradient itself, in the logits' own type."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, teacher_logits: torch.Tensor, objective: Objective) -> torch.Tensor:
        losses, slopes = losses_and_slopes(logits, teacher_logits, objective)
        ctx.save_for_backward(slopes.to(logits.dtype))
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return slope * grad[:, None].to(slope.dtype), None, None
