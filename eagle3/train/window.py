"""One optimiser step: count the terms of all its micro-batches on all ranks, then run them with those denominators.

Each TTT step's loss is a sum over terms divided by the number of terms in the whole window, so a token weighs the same
whichever rank, micro-batch or row it is in (arXiv 2503.01840 for the loss; docs/training.md for the denominators).

Shapes: K TTT steps.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eagle3.draft.batch import DraftBatch
from eagle3.draft.loss import TargetHead
from eagle3.draft.ttt import TermCounts, TTTLoss, TTTOutput, count_terms
from eagle3.train.engines.base import Ranks


@dataclass(frozen=True)
class Totals:
    """Sums over ranks and batches, [K] each, float64 on the CPU.

    Attributes:
        loss_sums: loss over the terms whose target argmax is in the draft vocab.
        in_vocab: number of those terms.
        correct: terms where the draft's greedy token is the target's.
        active: number of all terms.
        raised: what the ranks' `flag` gave, added up.
    """

    loss_sums: Tensor
    in_vocab: Tensor
    correct: Tensor
    active: Tensor
    raised: float = 0.0

    def loss(self, decay: float) -> float:
        """Sum over k of decay^k times the mean of step k; NaN without a term."""
        if not self.in_vocab.any():
            return math.nan
        weights = decay ** torch.arange(len(self.loss_sums), dtype=torch.float64)
        return float((weights * self.loss_sums / self.in_vocab.clamp(min=1)).sum())

    def by_step(self) -> dict[str, list[float | None]]:
        """The fields of a record that have a value for each TTT step; None where there is no term."""
        shares = {"step_loss": (self.loss_sums, self.in_vocab), "in_vocab": (self.in_vocab, self.active)}
        found = {name: _shares(part, whole) for name, (part, whole) in shares.items()}
        return {**found, "step_accuracy": self.step_accuracy()}

    def step_accuracy(self) -> list[float | None]:
        """Share of all active terms that are right, at each TTT step; None where there is none."""
        return _shares(self.correct, self.active)


def accumulate_window(
    model: Callable[..., TTTOutput],
    module: TTTLoss,
    batches: Sequence[DraftBatch],
    head: TargetHead,
    accelerator: Ranks,
    meanwhile: Callable[[], None],
    flag: Callable[[], float] = lambda: 0.0,
) -> Totals:
    """Adds up the gradients of a window, which are zero where it has no term on any rank.

    Nothing waits for a GPU before the window's last batch is on its way there.

    Args:
        model: `module` as the engine prepared it.
        module: the drafter with its loss.
        batches: this rank's micro-batches, as many as on every other rank; they may be empty ones.
        head: the target's head, on the engine's device.
        accelerator: the run's engine, or an `Accelerator`.
        meanwhile: called once the device has work of the window: what it does runs beside that.
        flag: a number that the ranks add up, by a reduction that they make anyway; called once the device has all work.
    """
    device = accelerator.device
    moved = [batch.to(device, non_blocking=True) if len(batches) == 1 else batch for batch in batches]
    with accelerator.autocast():
        counts = [
            count_terms(batch.without_aux().to(device, non_blocking=True), head, module.vocab, module.ttt)
            for batch in moved
        ]
    local = torch.stack([torch.stack([count.in_vocab, count.active]) for count in counts]).sum(0)
    in_vocab, active = accelerator.reduce(local, reduction="sum")
    if device.type == "cpu":  # there is no later: a micro-batch is done when its call returns
        meanwhile()
    with module.keeping_weights():
        sums = _run_window(model, moved, counts, in_vocab, accelerator, meanwhile, flag)
    totals = make_totals(sums[0], in_vocab, sums[1], active)
    return replace(totals, raised=float(sums[2, 0]))


def _run_window(
    model: Callable[..., TTTOutput],
    batches: Sequence[DraftBatch],
    counts: Sequence[TermCounts],
    in_vocab: Tensor,
    accelerator: Ranks,
    meanwhile: Callable[[], None],
    flag: Callable[[], float] = lambda: 0.0,
) -> Tensor:
    """Runs every micro-batch on every rank, so that all stay in step; gradients are exchanged after the last one.

    Every engine averages gradients over ranks; the loss is multiplied by their number, since `in_vocab` is global.

    Returns:
        float64 [3, K]: loss_sums and correct, summed over micro-batches and ranks, and the ranks' `flag`, K times.
    """
    sums = []
    for number, (batch, count) in enumerate(zip(batches, counts, strict=True)):
        last = number == len(batches) - 1
        with contextlib.nullcontext() if last else accelerator.no_sync(model):
            output = model(batch.to(accelerator.device, non_blocking=True), count, in_vocab)
            accelerator.backward(output.loss * accelerator.num_processes)
        if number == 0 and accelerator.device.type != "cpu":
            meanwhile()
        sums.append(torch.stack([output.loss_sums.double(), output.correct.double()]))
    local = torch.stack(sums).sum(0)
    reduced: Tensor = accelerator.reduce(torch.cat([local, torch.full_like(local[:1], flag())]), reduction="sum")
    return reduced


def _shares(part: Tensor, whole: Tensor) -> list[float | None]:
    return [a / b if b else None for a, b in zip(part.tolist(), whole.tolist(), strict=True)]


def make_totals(loss_sums: Tensor, in_vocab: Tensor, correct: Tensor, active: Tensor) -> Totals:
    loss_sums, in_vocab, correct, active = (part.double().cpu() for part in (loss_sums, in_vocab, correct, active))
    return Totals(loss_sums, in_vocab, correct, active)
