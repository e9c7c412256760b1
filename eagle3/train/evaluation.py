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
from eagle3.evaluate.acceptance import samples_by_source, walk_samples
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
        acceptance_by_depth: [depths] of the rounds that reach a depth, the share that accepts the draft there, with so
            many drafts a round; None where no round does.
        acceptance_by_source: acceptance length by where the samples' prompts come from; empty where none says so.
    """

    loss: float | None
    step_accuracy: list[float | None]
    acceptance_length: float | None
    acceptance_rate: float | None
    acceptance_by_depth: list[float | None]
    acceptance_by_source: dict[str, float | None]


@torch.no_grad()
def evaluate(
    module: TTTLoss,
    head: TargetHead,
    samples: SampleSet,
    batch_size: int,
    accelerator: Ranks,
    depths: int | None = None,
) -> Evaluation:
    """Evaluates the drafter; call it on every rank.

    Args:
        module: the drafter with its loss, not wrapped and with whole parameters, on the engine's device.
        samples: held-out samples.
        batch_size: rows of a forward pass.
        accelerator: the run's engine, or an `Accelerator`.
        depths: how deep `acceptance_by_depth` goes; default: the TTT steps.
    """
    share = samples.indices[accelerator.process_index :: accelerator.num_processes]
    loss_parts = torch.zeros(4, module.ttt.steps, dtype=torch.float64, device=accelerator.device)
    with module.keeping_weights():
        for batch in _batches(samples, share, batch_size):
            loss_parts += _loss_parts(module, head, batch.to(accelerator.device), accelerator)
    loss_parts = accelerator.reduce(loss_parts, reduction="sum")
    totals = make_totals(*loss_parts)
    drafts = min(ACCEPTANCE_STEPS, module.ttt.steps)
    full, reached, taken, sources = _acceptance_counts(module, samples, share, accelerator, drafts, depths)
    rounds, committed, accepted = full
    loss = totals.loss(module.ttt.decay)
    return Evaluation(
        loss=None if math.isnan(loss) else loss,
        step_accuracy=totals.step_accuracy(),
        acceptance_length=_ratio(committed, rounds),
        acceptance_rate=_ratio(accepted, rounds * drafts),
        acceptance_by_depth=list(map(_ratio, taken, reached)),
        acceptance_by_source={name: _ratio(committed, rounds) for name, (rounds, committed) in sources.items()},
    )


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


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
    module: TTTLoss, samples: SampleSet, share: list[int], accelerator: Ranks, drafts: int, depths: int | None
) -> tuple[list[int], list[int], list[int], dict[str, list[int]]]:
    """Over all ranks: rounds, committed tokens and accepted drafts with `drafts` a round; with `depths` a round, the
    rounds that reach each depth, and those that accept there; rounds and committed tokens of each source.
    """
    depths = module.ttt.steps if depths is None else depths
    sources = samples_by_source(samples.reader.samples, samples.indices)
    with accelerator.autocast():
        found = walk_samples(module.model, samples.reader, module.vocab, max(drafts, depths), share)
    all_drafts, deep = found.pooled(drafts), found.pooled(depths)
    of_sources = [found.pooled(drafts, indices) for indices in sources.values()]
    counts = [all_drafts.rounds, all_drafts.committed, all_drafts.accepted, *deep.reached, *deep.taken]
    counts += [number for item in of_sources for number in (item.rounds, item.committed)]
    total = accelerator.reduce(torch.tensor(counts, device=accelerator.device), reduction="sum").tolist()
    rest = total[3 + 2 * depths :]
    pairs = [rest[begin : begin + 2] for begin in range(0, len(rest), 2)]
    return total[:3], total[3 : 3 + depths], total[3 + depths : 3 + 2 * depths], dict(zip(sources, pairs, strict=True))
