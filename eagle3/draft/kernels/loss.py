"""A row's loss with its gradient and the greedy token, in two passes over the row (LK losses: three), and what the
target's logits say. `eagle3.draft.objective` has the formulas.

Legend: R rows, D draft vocab, V target vocab.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from eagle3.draft.config import Objective
from eagle3.draft.objective import LEAST_ACCEPTANCE, left_out

_BLOCK = 4096


def row_losses(
    logits: torch.Tensor, teacher: torch.Tensor, rows: torch.Tensor, scales: torch.Tensor, objective: Objective
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `plain.row_losses`; all contiguous."""
    count, width = logits.shape
    losses = torch.empty(count, dtype=torch.float32, device=logits.device)
    greedy = torch.empty(count, dtype=torch.int64, device=logits.device)
    block = min(_BLOCK, triton.next_power_of_2(width))
    out = left_out(teacher.dtype) / 2
    _row_losses[(count,)](
        logits, teacher, rows, scales, losses, greedy, width, block,
        objective.kind, objective.weight, objective.eta, LEAST_ACCEPTANCE, out, num_warps=8,
    )  # fmt: skip
    return losses, greedy


def greedy_and_chosen(logits: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The greatest of each row of logits [R, V] (the first of equals), int64 [R], and those at ascending ids [D]."""
    count, width = logits.shape
    greedy = torch.empty(count, dtype=torch.int64, device=logits.device)
    chosen = torch.empty(count, len(ids), dtype=logits.dtype, device=logits.device)
    places = torch.full((width,), -1, dtype=torch.int32, device=logits.device)
    places[ids] = torch.arange(len(ids), dtype=torch.int32, device=logits.device)
    block = min(_BLOCK // 2, triton.next_power_of_2(width))
    if count:
        _greedy_and_chosen[(count,)](logits, places, greedy, chosen, width, len(ids), block, num_warps=4)
    return greedy, chosen


@triton.jit
def _greedy_and_chosen(
    logits, places, greedy, chosen, width: tl.constexpr, chosen_width: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    chosen += row * chosen_width
    lane = tl.arange(0, block)
    peak = tl.full((block,), -float("inf"), tl.float32)
    best = tl.zeros((block,), tl.int32)
    for first in range(0, width, block):
        inside = first + lane < width
        value = tl.load(logits + first + lane, mask=inside, other=-float("inf"))
        place = tl.load(places + first + lane, mask=inside, other=-1)
        tl.store(chosen + place, value, mask=place >= 0)
        best = tl.where(value > peak, first + lane, best)
        peak = tl.maximum(peak, value.to(tl.float32))
    tl.store(greedy + row, tl.min(tl.where(peak == tl.max(peak, axis=0), best, width - 1), axis=0))


@triton.jit
def _row_losses(
    logits, teacher, rows, scales, losses, greedy, width: tl.constexpr, block: tl.constexpr,
    kind: tl.constexpr, weight: tl.constexpr, eta: tl.constexpr, least: tl.constexpr, left_out: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    teacher += tl.load(rows + row).to(tl.int64) * width
    lane = tl.arange(0, block)
    peak, target_peak = -float("inf"), -float("inf")
    total, target_total, mixed = 0.0, 0.0, 0.0
    taught_peak, taught_total, gaps = -3.0e38, 0.0, 0.0  # reverse_kl: of the draft's logits where the teacher has any
    best = 0
    for first in range(0, width, block):
        inside = first + lane < width
        own = tl.load(logits + first + lane, mask=inside, other=-float("inf")).to(tl.float32)
        target = tl.load(teacher + first + lane, mask=inside, other=-float("inf")).to(tl.float32)
        top = tl.max(own, axis=0)
        best = tl.where(top > peak, first + tl.argmax(own, axis=0), best)
        high = tl.maximum(peak, top)
        total = total * tl.exp(peak - high) + tl.sum(tl.exp(own - high), axis=0)
        peak = high
        high = tl.maximum(target_peak, tl.max(target, axis=0))
        fade, chances = tl.exp(target_peak - high), tl.exp(target - high)
        target_total = target_total * fade + tl.sum(chances, axis=0)
        if kind == "cross_entropy":
            mixed = mixed * fade + tl.sum(tl.where(inside, chances * own, 0.0), axis=0)
        elif kind != "reverse_kl":
            mixed = mixed * fade + tl.sum(tl.where(inside, chances * (own - target), 0.0), axis=0)
        target_peak = high
        if kind == "reverse_kl":
            taught = target > left_out
            high = tl.maximum(taught_peak, tl.max(tl.where(taught, own, -float("inf")), axis=0))
            fade, chances = tl.exp(taught_peak - high), tl.exp(tl.where(taught, own, -float("inf")) - high)
            taught_total = taught_total * fade + tl.sum(chances, axis=0)
            gaps = gaps * fade + tl.sum(tl.where(taught, chances * (own - target), 0.0), axis=0)
            taught_peak = high
    log_sum = peak + tl.log(total)
    acceptance, below, share = 0.0, 0.0, 0.0
    if kind == "cross_entropy":
        tl.store(losses + row, log_sum - mixed / target_total)
    elif kind == "reverse_kl":
        taught_sum, target_sum = taught_peak + tl.log(taught_total), target_peak + tl.log(target_total)
        loss = gaps / taught_total - taught_sum + target_sum
        tl.store(losses + row, loss + log_sum - taught_sum)
    else:
        divergence = log_sum - target_peak - tl.log(target_total) - mixed / target_total
        if kind == "kl":
            tl.store(losses + row, divergence)
        else:
            for first in range(0, width, block):
                inside = first + lane < width
                own = tl.load(logits + first + lane, mask=inside, other=-float("inf")).to(tl.float32)
                target = tl.load(teacher + first + lane, mask=inside, other=-float("inf")).to(tl.float32)
                drafted, chances = tl.exp(own - log_sum), tl.exp(target - target_peak) / target_total
                acceptance += tl.sum(tl.minimum(drafted, chances), axis=0)
                below += tl.sum(tl.where(drafted < chances, drafted, 0.0), axis=0)
            acceptance = tl.maximum(acceptance, least)
            if kind == "lk_alpha":
                tl.store(losses + row, -tl.log(acceptance))
            else:
                share = weight * tl.exp(-eta * acceptance)
                tl.store(losses + row, share * divergence + (1.0 - share) * (1.0 - acceptance))
    tl.store(greedy + row, best)
    scale = tl.load(scales + row)
    for first in range(0, width, block):
        inside = first + lane < width
        own = tl.load(logits + first + lane, mask=inside, other=0.0).to(tl.float32)
        target = tl.load(teacher + first + lane, mask=inside, other=0.0).to(tl.float32)
        if kind == "cross_entropy" or kind == "kl":
            slope = tl.exp(own - log_sum) - tl.exp(target - target_peak) / target_total
        elif kind == "reverse_kl":
            within = tl.where(target > left_out, tl.exp(own - taught_sum), 0.0)
            gap = tl.where(target > left_out, own - taught_sum - target + target_sum, 0.0)
            slope = within * (gap - loss) - within + tl.exp(own - log_sum)
        else:
            drafted, chances = tl.exp(own - log_sum), tl.exp(target - target_peak) / target_total
            slope = drafted * below - tl.where(drafted < chances, drafted, 0.0)
            if kind == "lk_alpha":
                slope = slope / acceptance
            else:
                slope = share * (drafted - chances) + (1.0 - share) * slope
        tl.store(logits + first + lane, (slope * scale).to(logits.dtype.element_ty), mask=inside)
