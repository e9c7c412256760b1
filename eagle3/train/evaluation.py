"""Loss, step accuracy and acceptance length on the held-out samples, each rank on its share of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from eagle3.data.loader import collate
from eagle3.draft.batch import DraftBatch
from eagle3.draft.loss import TargetHead
from eagle3.draft.ttt import TTTLoss, count_terms
from eagle3.evaluate.acceptance import acceptance
from eagle3.train.engines.base import Ranks
from eagle3.train.samples import SampleSet
from eagle3.train.window import make_totals

ACCEPTANCE_STEPS = 3
"""Drafts a round in the reported acceptance length (fewer if fewer are trained), as published ones have."""


@dataclass(frozen=True)
class Evaluation:
    """Held-out metrics.

    Attributes:
        loss: as in training, over the held-out samples; None without a term.
        step_accuracy: at each TTT step; None where there is no term.
        acceptance_length: pooled over samples; None without a round.
        acceptance_rate: accepted drafts / drafted tokens; None without a round.
    """

    loss: float | None
    step_accuracy: list[float | None]
    acceptance_length: float | None
    acceptance_rate: float | None


@torch.no_grad()
def evaluate(module: TTTLoss, head: TargetHead, samples: SampleSet, batch_size: int, accelerator: Ranks) -> Evaluation:
    """Evaluates the drafter; call it on every rank.

    Args:
        module: the drafter with its loss, not wrapped and with whole parameters, on the engine's device.
        samples: held-out samples.
        batch_size: rows of a forward pass.
        accelerator: the run's engine, or an `Accelerator`.
    """
    share = samples.indices[accelerator.process_index :: accelerator.num_processes]
    loss_parts = torch.zeros(4, module.ttt.steps, dtype=torch.float64, device=accelerator.device)
    with module.keeping_weights():
        for batch in _batches(samples, share, batch_size):
            loss_parts += _loss_parts(module, head, batch.to(accelerator.device), accelerator)
    loss_parts = accelerator.reduce(loss_parts, reduction="sum")
    totals = make_totals(*loss_parts)
    rounds, committed, accepted = _acceptance_counts(module, samples, share, accelerator)
    loss = totals.loss(module.ttt.decay)
    return Evaluation(
        loss=None if math.isnan(loss) else loss,
        step_accuracy=totals.step_accuracy(),
        acceptance_length=committed / rounds if rounds else None,
        acceptance_rate=accepted / (rounds * _acceptance_steps(module)) if rounds else None,
    )


def _batches(samples: SampleSet, share: list[int], batch_size: int) -> Iterator[DraftBatch]:
    by_length = sorted(share, key=lambda index: samples.reader.samples[index].tokens)
    groups = [by_length[begin : begin + batch_size] for begin in range(0, len(by_length), batch_size)]
    with samples.reader.ahead(groups) as done:
        for group in groups:
            rows = [[samples.reader.read(index)] for index in group]
            done(1)
            yield collate(rows, samples.max_length)


def _loss_parts(module: TTTLoss, head: TargetHead, batch: DraftBatch, accelerator: Ranks) -> torch.Tensor:
    """float64 [4, K]: the fields of `Totals`."""
    with accelerator.autocast():
        counts = count_terms(batch, head, module.vocab, module.ttt)
        output = module(batch, counts, counts.in_vocab)
    parts = (output.loss_sums, output.in_vocab, output.correct, output.active)
    return torch.stack([part.double() for part in parts])


def _acceptance_counts(
    module: TTTLoss, samples: SampleSet, share: list[int], accelerator: Ranks
) -> tuple[int, int, int]:
    """(rounds, committed tokens, accepted drafts) over all ranks."""
    counts = torch.zeros(3, dtype=torch.int64, device=accelerator.device)
    if share:
        with accelerator.autocast():
            found = acceptance(module.model, samples.reader, module.vocab, _acceptance_steps(module), share)
        accepted = sum(number * rounds for number, rounds in enumerate(found.histogram))
        counts += torch.tensor([found.rounds, found.committed, accepted], device=accelerator.device)
    rounds, committed, accepted = accelerator.reduce(counts, reduction="sum").tolist()
    return rounds, committed, accepted


def _acceptance_steps(module: TTTLoss) -> int:
    return min(ACCEPTANCE_STEPS, module.ttt.steps)
