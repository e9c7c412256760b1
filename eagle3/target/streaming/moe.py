"""A mixture of experts over many tokens: rows sorted by expert, one grouped matrix product over all experts.

Legend: T tokens, K experts of a token, R = T * K rows, E experts, I expert width, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.nn import functional

# Public from torch 2.10 on.
_grouped_mm: Callable[..., torch.Tensor] = getattr(functional, "grouped_mm", None) or torch._grouped_mm


@dataclass(frozen=True)
class ExpertGroup:
    """Weights of experts `first` and following: gate_up [e, 2 * I, H] (gate first) and down [e, H, I]."""

    first: int
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True)
class Routing:
    """The rows of a micro-batch, sorted by expert.

    Attributes:
        source: int32 [R], the token of each row.
        place: int32 [T, K], the row of each of a token's experts.
        ends: int32 [E], the row after each expert's last.
    """

    source: torch.Tensor
    place: torch.Tensor
    ends: torch.Tensor


def route(index: torch.Tensor, experts: int) -> Routing:
    """Sorts by expert; of one expert's rows those of earlier tokens first.

    Args:
        index: integers [T, K], each token's experts.
        experts: E.
    """
    tokens, slots = index.shape
    keys, order = torch.sort(index.flatten().to(torch.int32), stable=True)
    numbers = torch.arange(experts, device=index.device, dtype=torch.int32)
    ends = torch.searchsorted(keys, numbers, right=True, out_int32=True)
    place = torch.empty(tokens * slots, dtype=torch.int32, device=index.device)
    place[order] = torch.arange(tokens * slots, dtype=torch.int32, device=index.device)
    return Routing((order // slots).to(torch.int32), place.view(tokens, slots), ends)


def mixture(
    states: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    groups: Iterable[ExpertGroup],
    experts: int,
    shared: torch.Tensor | None = None,
) -> torch.Tensor:
    """[T, H]: the weighted sum of each token's experts, summed in float32 and rounded, plus `shared`.

    Args:
        states: [T, H].
        index: integers [T, K].
        weights: [T, K].
        groups: that cover all experts in ascending order; one group is the fast way.
        experts: E.
        shared: [T, H], overwritten with the result.
    """
    routing = route(index, experts)
    weights = weights.to(torch.float32)
    total = None
    bounds: list[int] | None = None
    for group in groups:
        count = len(group.gate_up)
        if count == experts:
            rows = _experts(states, routing.source, routing.ends, group)
            return _combine(rows, routing, weights, shared)
        if total is None or bounds is None:
            total = torch.zeros(states.shape, dtype=torch.float32, device=states.device)
            bounds = [0, *routing.ends.tolist()]
        begin, end = bounds[group.first], bounds[group.first + count]
        if begin < end:
            ends = routing.ends[group.first : group.first + count] - begin
            rows = _experts(states, routing.source[begin:end], ends, group)
            _accumulate(rows, routing, weights, begin, total)
    assert total is not None
    result = total.to(states.dtype)
    return result if shared is None else shared.add_(result)


def _experts(states: torch.Tensor, source: torch.Tensor, ends: torch.Tensor, group: ExpertGroup) -> torch.Tensor:
    """Every row through its expert, [R, H]."""
    rows = _gather(states, source)
    hidden = _grouped(rows, group.gate_up, ends)
    del rows
    gate, up = hidden.chunk(2, dim=-1)
    active = swiglu(gate, up)
    del hidden, gate, up
    return _grouped(active, group.down, ends)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, [rows, I] each."""
    if gate.is_cuda:
        from eagle3.target.streaming.kernels import experts as kernels

        return kernels.swiglu(gate, up)
    return functional.silu(gate) * up


def _grouped(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """rows [R, in], weights [e, out, in] -> [R, out]; expert i's rows end at ends[i]."""
    if rows.is_cuda and rows.dtype == torch.bfloat16:
        return _grouped_mm(rows, weights.transpose(-2, -1), offs=ends)
    out = rows.new_empty(len(rows), weights.shape[1])
    begin = 0
    for weight, end in zip(weights, ends.tolist(), strict=True):
        torch.mm(rows[begin:end], weight.T, out=out[begin:end])
        begin = end
    return out


def _gather(states: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    if states.is_cuda:
        from eagle3.target.streaming.kernels import experts as kernels

        return kernels.gather_rows(states, source, states.new_empty(len(source), states.shape[1]))
    return states[source]


def _combine(rows: torch.Tensor, routing: Routing, weights: torch.Tensor, shared: torch.Tensor | None) -> torch.Tensor:
    tokens, slots = routing.place.shape
    if rows.is_cuda:
        from eagle3.target.streaming.kernels import experts as kernels

        out = rows.new_empty(tokens, rows.shape[1]) if shared is None else shared
        return kernels.combine(rows, routing.place, weights, shared, out)
    chosen = rows[routing.place.flatten()].view(tokens, slots, -1)
    result = (chosen.float() * weights.unsqueeze(-1)).sum(1).to(rows.dtype)
    return result if shared is None else shared.add_(result)


def _accumulate(rows: torch.Tensor, routing: Routing, weights: torch.Tensor, first: int, total: torch.Tensor) -> None:
    if rows.is_cuda:
        from eagle3.target.streaming.kernels import experts as kernels

        kernels.accumulate(rows, routing.place, weights, first, total)
        return
    place = routing.place.flatten()
    slots = routing.place.shape[1]
    here = ((place >= first) & (place < first + len(rows))).nonzero().flatten()
    weighted = rows[place[here] - first].float() * weights.flatten()[here].unsqueeze(-1)
    total.index_add_(0, here // slots, weighted)
