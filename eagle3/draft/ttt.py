"""Training-time test: the draft model unrolled over its own outputs, and its loss (arXiv 2503.01840).

`docs/training-step.md` says which terms count and how they are averaged. Only the rows that reach the loss are
computed (`eagle3.draft.chains`).

Shapes: B rows, T tokens, H hidden, D draft vocab, V target vocab, K TTT steps, S sources, R chains of one step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn

from eagle3.draft.attention import attend
from eagle3.draft.batch import DraftBatch
from eagle3.draft.chains import ChainPlan, plan_chains
from eagle3.draft.config import TTTSettings
from eagle3.draft.fused.function import fused_terms
from eagle3.draft.fused.layout import Chunk
from eagle3.draft.fused.linear import float8_gradient_linear
from eagle3.draft.fused.weights import KeptWeights
from eagle3.draft.loss import TEACHER_ROWS, TargetHead, read_teacher, row_losses
from eagle3.draft.model import DraftModel
from eagle3.draft.objective import keep_greatest
from eagle3.draft.planned import plan_batch
from eagle3.draft.rope import cos_sin
from eagle3.draft.vocab import DraftVocab


@dataclass(frozen=True, eq=False)
class TermCounts:
    """What the denominators of an optimiser step need of one batch, before any backward pass.

    Attributes:
        active: int64 [K], active terms.
        in_vocab: int64 [K], those whose target argmax is in the draft vocab: the loss's denominators.
        target_argmax: int64 [R of step 0], the target's greedy token over the full vocab at the plan's teacher places.
        teacher: [R of step 0, D], the target's logits on the draft vocab there, as the loss takes them.
        plan: what to compute.
        chunks: the plan as the fused step computes it; None leaves it to autograd.
    """

    active: torch.Tensor
    in_vocab: torch.Tensor
    target_argmax: torch.Tensor
    teacher: torch.Tensor
    plan: ChainPlan
    chunks: list[Chunk] | None = None


@dataclass(frozen=True, eq=False)
class TTTOutput:
    """One batch's loss and its parts; all but `loss` are detached.

    Attributes:
        loss: scalar, sum over k of decay^k * loss_sums[k] / denominators[k].
        loss_sums: [K], loss summed over active terms whose target argmax is in the draft vocab.
        correct: int64 [K], active terms where the draft's greedy token is the target's.
        active: int64 [K], active terms: the denominators of step accuracy.
        in_vocab: int64 [K], the terms in `loss_sums`.
    """

    loss: torch.Tensor
    loss_sums: torch.Tensor
    correct: torch.Tensor
    active: torch.Tensor
    in_vocab: torch.Tensor


def count_terms(batch: DraftBatch, head: TargetHead, vocab: DraftVocab, ttt: TTTSettings) -> TermCounts:
    """Counts a batch's terms, and plans it if nobody did; reads the teacher at the needed rows only.

    Args:
        head: on the batch's device; of the draft vocab alone where the batch has the target's greedy tokens.
    """
    planned = batch.planned or plan_batch(batch.loss_mask, batch.document_ids, ttt)
    planned = planned.to(batch.input_ids.device)
    plan, active = planned.plan, planned.active
    places = plan.teacher_places
    argmax, teacher = read_teacher(head, batch.last_rows(places), vocab.ids, batch.argmax_rows(places))
    if ttt.teacher_top_k is not None:
        teacher = keep_greatest(teacher, ttt.teacher_top_k)
    known = vocab.to_draft(argmax) >= 0
    return TermCounts(
        active=active.sum(1),
        in_vocab=torch.stack([(row & known.roll(-k)).sum() for k, row in enumerate(active)]),
        target_argmax=argmax,
        teacher=teacher,
        plan=plan,
        chunks=planned.chunks,
    )


class TTTLoss(nn.Module):
    """The draft model and its loss as one module, so that DDP and FSDP see one forward pass."""

    draft_ids: torch.Tensor

    def __init__(self, model: DraftModel, vocab: DraftVocab, ttt: TTTSettings) -> None:
        super().__init__()
        self.model = model
        self.ttt = ttt
        self._kept = KeptWeights(ttt.float8)
        self.register_buffer("draft_ids", vocab.ids, persistent=False)

    @property
    def vocab(self) -> DraftVocab:
        """The draft vocab on the module's device."""
        return DraftVocab(self.draft_ids, self.model.config.vocab_size)

    def keeping_weights(self) -> AbstractContextManager[None]:
        """Within, weights do not change, so that what the step computes with is made of them once, at its first call.

        Those are copies in the type to compute in, or in float8.
        """
        return self._kept.keeping()

    def forward(self, batch: DraftBatch, counts: TermCounts, denominators: torch.Tensor) -> TTTOutput:
        """Loss of one batch.

        Args:
            batch: the rows.
            counts: `count_terms` of this batch.
            denominators: [K], `in_vocab` summed over every batch and rank of the optimiser step, times whatever
                the caller's reduction of gradients divides by. A step with 0 contributes nothing.

        Returns:
            With no active term the loss is 0, and still connected to every trainable parameter.
        """
        if not counts.plan.document_sources:
            return self._nothing(counts)
        if counts.chunks is not None:
            return self._fused(batch, counts, counts.chunks, denominators)
        vocab, targets = self.vocab, counts.target_argmax
        known = vocab.to_draft(targets) >= 0
        losses, correct = [], []
        for rows, output in zip(counts.plan.steps, unroll(self.model, batch, counts.plan), strict=True):
            logits = self.model.logits(output)
            terms = row_losses(logits, counts.teacher.index_select(0, rows.ahead), self.ttt.objective)
            losses.append(terms.masked_fill(~(rows.active & known[rows.ahead]), 0).sum())
            hits = vocab.to_target(logits.detach().argmax(-1)) == targets[rows.ahead]
            correct.append((hits & rows.active).sum())
        loss_sums = torch.stack(losses)
        loss = (loss_sums * self._scales(loss_sums, denominators)).sum()
        return TTTOutput(loss, loss_sums.detach(), torch.stack(correct), counts.active, counts.in_vocab)

    def _fused(
        self,
        batch: DraftBatch,
        counts: TermCounts,
        chunks: list[Chunk],
        denominators: torch.Tensor,
    ) -> TTTOutput:
        model, plan, vocab, targets = self.model, counts.plan, self.vocab, counts.target_argmax
        hidden = self._fuse(batch.aux_rows(plan.sources))
        embedded = model.embed_tokens(batch.input_ids.flatten()[plan.sources + 1]).detach().to(hidden.dtype)
        terms = fused_terms(
            model, hidden, embedded, batch.position_ids.flatten()[plan.sources], plan.chains, chunks,
            counts.teacher, vocab.to_draft(targets) >= 0, self._scales(hidden, denominators), self._kept,
            self.ttt.objective,
        )  # fmt: skip
        correct = torch.zeros_like(counts.active)
        for rows in terms.rows:
            hits = (vocab.to_target(rows.greedy) == targets.index_select(0, rows.chunk.teachers)) & rows.chunk.active
            correct += torch.stack([part.sum() for part in hits.split(rows.chunk.counts)])
        return TTTOutput(terms.loss, terms.loss_sums, correct, counts.active, counts.in_vocab)

    def _fuse(self, aux: torch.Tensor) -> torch.Tensor:
        """`DraftModel.fuse`, its gradients in float8 where that is wanted."""
        if not self.ttt.float8:
            return self.model.fuse(aux)
        kind = aux.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.model.fc.weight.dtype
        return float8_gradient_linear(self.model.fc_input(aux).to(dtype), self.model.fc.weight)

    def _scales(self, like: torch.Tensor, denominators: torch.Tensor) -> torch.Tensor:
        """[K], what the sum of each step's terms is multiplied with; in at least float32."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        powers = torch.arange(self.ttt.steps, dtype=dtype, device=like.device)
        return self.ttt.decay**powers / denominators.clamp(min=1)

    def _nothing(self, counts: TermCounts) -> TTTOutput:
        zero = torch.stack([value.sum() for value in self.model.parameters() if value.requires_grad]).sum() * 0
        loss_sums = zero.detach().expand(self.ttt.steps)
        return TTTOutput(zero, loss_sums, torch.zeros_like(counts.active), counts.active, counts.in_vocab)


def unroll(model: DraftModel, batch: DraftBatch, plan: ChainPlan) -> Iterator[torch.Tensor]:
    """The layer's outputs h' [R, H] of step 0, 1, .. for the plan's chains; the plan must have a chain."""
    layer, attention, config = model.midlayer, model.midlayer.self_attn, model.config
    embedded = model.embed_tokens(batch.input_ids.flatten()[plan.sources + 1])
    positions = batch.position_ids.flatten()[plan.sources]
    turn = cos_sin(config.rope, config.head_dim, positions)
    hidden = model.fuse(batch.aux_rows(plan.sources))
    x = layer.join(embedded, hidden)
    keys, values = attention.key_value(x, turn)
    own_keys = own_values = keys.new_empty(len(keys), 0, *keys.shape[1:])
    for k, rows in enumerate(plan.steps):
        hidden, own_keys, own_values = (part.index_select(0, rows.kept) for part in (hidden, own_keys, own_values))
        if k == 0:
            x, turn = x.index_select(0, rows.sources), (turn[0][rows.sources], turn[1][rows.sources])
        else:
            x = layer.join(embedded.index_select(0, rows.sources + k), hidden)
            turn = cos_sin(config.rope, config.head_dim, positions[rows.sources] + k)
            key, value = attention.key_value(x, turn)
            own_keys = torch.cat([own_keys, key[:, None]], 1)
            own_values = torch.cat([own_values, value[:, None]], 1)
        attended = attend(attention.query(x, turn), keys, values, own_keys, own_values, plan, rows)
        output = layer.finish(hidden, attended)
        yield output
        hidden = model.handed_on(output)


def draft_matches(model: DraftModel, batch: DraftBatch, vocab: DraftVocab, steps: int) -> torch.Tensor:
    """bool [K, B, T]: the greedy draft at step k of chain i is token i + 2 + k, reading the batch's own tokens.

    Chains that serving does not start are false. Up to its first false, a chain is what serving drafts there.
    """
    drafts, ids = draft_tokens(model, batch, vocab, steps).flatten(1), batch.input_ids.flatten()
    matches = torch.zeros_like(drafts, dtype=torch.bool)
    for k in range(steps):
        matches[k, : -2 - k] = drafts[k, : -2 - k] == ids[2 + k :]
    return matches.view(steps, *batch.input_ids.shape)


@torch.no_grad()
def draft_tokens(model: DraftModel, batch: DraftBatch, vocab: DraftVocab, steps: int) -> torch.Tensor:
    """int64 [K, B, T]: the greedy draft at step k of chain i, reading the batch's own tokens; -1 where none is."""
    plan = plan_chains(batch.loss_mask, batch.document_ids, steps, "served")
    shape = (steps, *batch.input_ids.shape)
    drafts = torch.full((steps, batch.input_ids.numel()), -1, device=batch.input_ids.device)
    if plan.document_sources:
        for k, (rows, output) in enumerate(zip(plan.steps, unroll(model, batch, plan), strict=True)):
            greedy = torch.cat([model.logits(some).argmax(-1) for some in output.split(TEACHER_ROWS)])
            drafts[k, plan.sources[rows.sources]] = vocab.to_target(greedy)
    return drafts.view(shape)
