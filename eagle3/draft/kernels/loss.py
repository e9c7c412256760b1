"""Soft cross-entropy with its gradient and the greedy token, in two passes over a row; what the target's logits say.

Legend: R rows, D draft vocab, V target vocab.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096


def cross_entropy(
    logits: torch.Tensor, teacher: torch.Tensor, rows: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `plain.cross_entropy`; all contiguous."""
    count, width = logits.shape
    losses = torch.empty(count, dtype=torch.float32, device=logits.device)
    greedy = torch.empty(count, dtype=torch.int64, device=logits.device)
    block = min(_BLOCK, triton.next_power_of_2(width))
    _cross_entropy[(count,)](logits, teacher, rows, scales, losses, greedy, width, block, num_warps=8)
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
def _cross_entropy(logits, teacher, rows, scales, losses, greedy, width: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    teacher += tl.load(rows + row).to(tl.int64) * width
    lane = tl.arange(0, block)
    peak, target_peak = -float("inf"), -float("inf")
    total, target_total, mixed = 0.0, 0.0, 0.0
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
        mixed = mixed * fade + tl.sum(tl.where(inside, chances * own, 0.0), axis=0)
        target_peak = high
    log_sum = peak + tl.log(total)
    tl.store(losses + row, log_sum - mixed / target_total)
    tl.store(greedy + row, best)
    scale = tl.load(scales + row)
    for first in range(0, width, block):
        inside = first + lane < width
        own = tl.load(logits + first + lane, mask=inside, other=0.0).to(tl.float32)
        target = tl.load(teacher + first + lane, mask=inside, other=0.0).to(tl.float32)
        slope = tl.exp(own - log_sum) - tl.exp(target - target_peak) / target_total
        tl.store(logits + first + lane, (slope * scale).to(logits.dtype.element_ty), mask=inside)
