"""The fused step's operations in plain torch, for any device and type; `cuda` has the same functions.

Shapes: R rows, H width of a norm, h query heads, v key/value heads, d head width, S sources, K TTT steps, N rows of all
steps, D draft vocab.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from eagle3.draft.config import Objective
from eagle3.draft.fused.layout import Chunk
from eagle3.draft.fused.quantized import LARGEST_EXPONENT, ROUND_UP, SMALLEST_PEAK, Quantized
from eagle3.draft.objective import losses_and_slopes

Turn = tuple[torch.Tensor, torch.Tensor]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type that sums are kept in."""
    return torch.promote_types(dtype, torch.float32)


def norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm (arXiv 1910.07467) of x [R, H], and the factors [R] that the rows were multiplied with."""
    values = x.to(wide(x.dtype))
    factor = torch.rsqrt(values.square().mean(-1) + eps)
    normed = (values * factor[:, None] * weight).to(x.dtype)
    return (normed if out is None else out.copy_(normed)), factor


def norm_sums(width: int, like: torch.Tensor) -> torch.Tensor:
    """Where `norm_grad` adds up the weight's gradient; its sum over rows is the gradient."""
    return torch.zeros(1, width, dtype=wide(like.dtype), device=like.device)


def norm_grad(
    x: torch.Tensor,
    factor: torch.Tensor,
    weight: torch.Tensor,
    grad: torch.Tensor,
    sums: torch.Tensor,
    add: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gradient [R, H] of a norm's input; NaN where the mean square had overflowed, so that nobody trains on that.

    Args:
        x: [R, H], the input.
        factor: [R], from `norm`.
        weight: [H].
        grad: [R, H], of the output; may be `out`.
        sums: the weight's gradient is added to it.
        add: [R' <= R, H], added to the first rows of the result.
        out: [R, H].
    """
    slope = grad.to(wide(x.dtype))
    factor = factor.masked_fill(factor == 0, torch.nan)
    unit = x.to(slope.dtype) * factor[:, None]
    sums += (slope * unit).sum(0)
    slope = slope * weight
    result = (slope - unit * (slope * unit).mean(-1, keepdim=True)) * factor[:, None]
    if add is not None:
        result[: len(add)] += add
    return result.to(x.dtype) if out is None else out.copy_(result)


def unnormed_grad(total: torch.Tensor, matrix: torch.Tensor, weight: torch.Tensor, sums: torch.Tensor) -> None:
    """From the gradient of a matrix whose rows were normed, but not multiplied by the norm's weight, to the true one.

    Args:
        total: [out, in], that gradient; multiplied by the weight in place.
        matrix: [out, in].
        weight: [in], the norm's.
        sums: its gradient is added to it.
    """
    sums[0] += (total * matrix).sum(0, dtype=sums.dtype)
    total *= weight


def rotate_in(
    projected: torch.Tensor,
    shared: torch.Tensor,
    rows: torch.Tensor,
    shift: int,
    turn: Turn,
    rotated: int,
    out: torch.Tensor,
) -> torch.Tensor:
    """out[r] = the sum of projected[r] and shared[rows[r] + shift], its first heads rotated.

    Args:
        projected: [R, heads * d].
        shared: [.., heads * d].
        rows: int32 [R].
        shift: see above.
        turn: cosines and sines [R, d / 2].
        rotated: number of heads to rotate.
        out: [R, heads, d].
    """
    heads = (projected.to(wide(out.dtype)) + shared[rows.long() + shift]).view(out.shape)
    out.copy_(torch.cat([_turned(heads[:, :rotated], turn, 1), heads[:, rotated:]], 1))
    return out


def rotate_out(
    grad: torch.Tensor,
    rows: torch.Tensor,
    shift: int,
    turn: Turn,
    rotated: int,
    shared_grad: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """Reverse of `rotate_in`: the gradient [R, heads * d] of `projected`, also added to shared_grad[rows + shift].

    Args:
        grad: [R, heads, d], of `rotate_in`'s result.
        rows, shift, turn, rotated: as there; no row comes twice.
        shared_grad: [.., heads * d], in the type that sums are kept in.
        out: [R, heads * d].
    """
    heads = grad.to(wide(out.dtype))
    turned = torch.cat([_turned(heads[:, :rotated], turn, -1), heads[:, rotated:]], 1).flatten(1)
    shared_grad[rows.long() + shift] += turned
    return out.copy_(turned)


def _turned(heads: torch.Tensor, turn: Turn, sign: int) -> torch.Tensor:
    cos, sin = (part.to(heads.dtype)[:, None] for part in turn)
    left, right = heads.chunk(2, -1)
    return torch.cat([left * cos - sign * right * sin, right * cos + sign * left * sin], -1)


def swiglu(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out = silu(gate) * up (arXiv 2002.05202)."""
    inner = gate.to(wide(gate.dtype))
    return out.copy_(inner * inner.sigmoid() * up)


def swiglu_grad(gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor) -> None:
    """Puts the gradients of gate and up in their places."""
    inner, other, slope = (part.to(wide(gate.dtype)) for part in (gate, up, grad))
    share = inner.sigmoid()
    found = slope * other * share * (1 + inner * (1 - share)), slope * inner * share
    gate.copy_(found[0])
    up.copy_(found[1])


def swiglu_rounded(gate: torch.Tensor, up: torch.Tensor, out: Quantized) -> Quantized:
    """`swiglu` of gate and up [R, W], rounded by rows into `out` and returned."""
    inner = gate.to(wide(gate.dtype))
    return quantize_rows(inner * inner.sigmoid() * up, out)


def swiglu_grad_rounded(
    gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor, gate_out: Quantized, up_out: Quantized
) -> tuple[Quantized, Quantized]:
    """`swiglu_grad` of [R, W] each, rounded by rows into `gate_out` and `up_out` and returned."""
    gate, up = (part.to(wide(part.dtype), copy=True) for part in (gate, up))
    swiglu_grad(gate, up, grad)
    return quantize_rows(gate, gate_out), quantize_rows(up, up_out)


def attend(
    query: torch.Tensor,
    keys_values: torch.Tensor,
    own: torch.Tensor,
    begins: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
) -> None:
    """Attention of one step: a row attends to sources begins .. ends and to its own keys.

    Args:
        query: [R, h, d].
        keys_values: [S, 2v, d], keys then values of step 0.
        own: [k, R' >= R, 2v, d], those of steps 1 .. k.
        begins, ends: int32 [R].
        out: [R, h, d].
        sums: [R, h], for backward: the logarithms of the softmaxes' denominators.
    """
    scores, values = _scores(query, keys_values, own, begins, ends)
    sums.copy_(scores.logsumexp(-1).movedim(-1, 0).flatten(1))
    weights = scores.softmax(-1)
    count = len(keys_values)
    result = torch.einsum("vgrs,svd->rvgd", weights[..., :count], values[0])
    result = result + torch.einsum("vgrk,krvd->rvgd", weights[..., count:], values[1])
    out.copy_(result.flatten(1, 2))


def _scores(
    query: torch.Tensor, keys_values: torch.Tensor, own: torch.Tensor, begins: torch.Tensor, ends: torch.Tensor
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Scores [v, g, R, S + k], and the values of both parts."""
    dtype = wide(query.dtype)
    keys, values = keys_values.to(dtype).chunk(2, 1)
    own_keys, own_values = own[:, : len(query)].to(dtype).chunk(2, 2)
    grouped = query.to(dtype).unflatten(1, (keys.shape[1], -1)) * query.shape[-1] ** -0.5
    places = torch.arange(len(keys), device=query.device)
    hidden = (places < begins[:, None]) | (places > ends[:, None])
    past = torch.einsum("rvgd,svd->vgrs", grouped, keys).masked_fill(hidden, float("-inf"))
    return torch.cat([past, torch.einsum("rvgd,krvd->vgrk", grouped, own_keys)], -1), (values, own_values)


def _slopes(
    query: torch.Tensor,
    keys_values: torch.Tensor,
    own: torch.Tensor,
    begins: torch.Tensor,
    ends: torch.Tensor,
    grad: torch.Tensor,
    sums: torch.Tensor,
    means: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax weights and gradients of the scores, [v, g, R, S + k] each."""
    scores, (values, own_values) = _scores(query, keys_values, own, begins, ends)
    heads = values.shape[1]
    weights = (scores - _by_head(sums, heads)).exp()
    slope = grad.to(values.dtype).unflatten(1, (heads, -1))
    past = torch.einsum("rvgd,svd->vgrs", slope, values)
    reached = torch.cat([past, torch.einsum("rvgd,krvd->vgrk", slope, own_values)], -1)
    return weights, weights * (reached - _by_head(means, heads))


def _by_head(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """[R, h] as [v, g, R, 1]."""
    return rows.unflatten(1, (heads, -1)).movedim(0, -1)[..., None]


def attend_grad_query(
    query: torch.Tensor,
    keys_values: torch.Tensor,
    own: torch.Tensor,
    begins: torch.Tensor,
    ends: torch.Tensor,
    output: torch.Tensor,
    grad: torch.Tensor,
    sums: torch.Tensor,
    means: torch.Tensor,
) -> torch.Tensor:
    """Gradient [R, h, d] of one step's queries.

    Args:
        output, grad: [R, h, d], of `attend` and its gradient.
        means: [R, h], for the other gradients: the mean of the gradient over each softmax; written.
        query, keys_values, own, begins, ends, sums: see `attend`.
    """
    means.copy_((output.to(means.dtype) * grad).sum(-1))
    slopes = _slopes(query, keys_values, own, begins, ends, grad, sums, means)[1]
    count, dtype = len(keys_values), slopes.dtype
    keys, own_keys = keys_values.chunk(2, 1)[0], own[:, : len(query)].chunk(2, 2)[0]
    result = torch.einsum("vgrs,svd->rvgd", slopes[..., :count], keys.to(dtype))
    result = result + torch.einsum("vgrk,krvd->rvgd", slopes[..., count:], own_keys.to(dtype))
    return (result.flatten(1, 2) * query.shape[-1] ** -0.5).to(query.dtype)


def attend_grad_own(
    step: int,
    query: torch.Tensor,
    own: torch.Tensor,
    grad: torch.Tensor,
    sums: torch.Tensor,
    means: torch.Tensor,
    chunk: Chunk,
) -> torch.Tensor:
    """Gradient [R of that step, 2v, d] of the keys and values that a step added.

    Args:
        step: from 1 on.
        query, grad: [N, h, d], of all steps.
        own: [K - 1, R of step 0, 2v, d].
        sums, means: [N, h].
        chunk: of the rows.
    """
    rows, offsets = chunk.counts[step], chunk.offsets
    dtype = wide(query.dtype)
    keys, values = (part.to(dtype) for part in own[step - 1, :rows].chunk(2, 1))
    result = torch.zeros_like(own[step - 1, :rows], dtype=dtype)
    for first, last in list(pairwise(offsets))[step:]:
        count, heads = last - first, keys.shape[1]
        turned, slope = (part[first:last].to(dtype).unflatten(1, (heads, -1)) for part in (query, grad))
        log_sums, mean = (part[first:last].unflatten(1, (heads, -1)) for part in (sums, means))
        scale = query.shape[-1] ** -0.5
        weights = (torch.einsum("rvgd,rvd->rvg", turned, keys[:count]) * scale - log_sums).exp()
        slopes = weights * (torch.einsum("rvgd,rvd->rvg", slope, values[:count]) - mean) * scale
        found = torch.cat([torch.einsum("rvg,rvgd->rvd", a, b) for a, b in ((slopes, turned), (weights, slope))], 1)
        result[:count] += found
    return result.to(query.dtype)


def source_sums(sources: int, key_heads: int, group: int, head_dim: int, like: torch.Tensor) -> torch.Tensor:
    """Where `attend_grad_sources` adds up; the sum over its first dimension, [S, 2v, d], is the gradient."""
    return torch.zeros(1, sources, 2 * key_heads, head_dim, dtype=wide(like.dtype), device=like.device)


def attend_grad_sources(
    query: torch.Tensor,
    keys_values: torch.Tensor,
    grad: torch.Tensor,
    sums: torch.Tensor,
    means: torch.Tensor,
    chunk: Chunk,
    total: torch.Tensor,
) -> None:
    """Adds the gradient of step 0's keys and values by all rows of a chunk to `total`, see `source_sums`.

    Args:
        query, grad: [N, h, d], of all steps.
        keys_values: [S, 2v, d].
        sums, means: [N, h].
    """
    heads = keys_values.shape[1] // 2
    own = keys_values.new_empty(0, len(query), 2 * heads, keys_values.shape[2])
    weights, slopes = _slopes(query, keys_values, own, chunk.begins, chunk.ends, grad, sums, means)
    grouped, slope = (part.to(weights.dtype).unflatten(1, (heads, -1)) for part in (query, grad))
    total[0, :, :heads] += torch.einsum("vgrs,rvgd->svd", slopes, grouped) * query.shape[-1] ** -0.5
    total[0, :, heads:] += torch.einsum("vgrs,rvgd->svd", weights, slope)


def row_losses(
    logits: torch.Tensor, teacher: torch.Tensor, rows: torch.Tensor, scales: torch.Tensor, objective: Objective
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss [R] of each row, unscaled, and its greedy draft token int64 [R].

    Args:
        logits: [R, D], the draft's; overwritten with the gradient of sum(scales * result).
        teacher: [.., D], the target's on the draft vocab.
        rows: int32 [R], each row's teacher.
        scales: [R].
        objective: which loss.
    """
    greedy = logits.argmax(-1)
    losses, slopes = losses_and_slopes(logits, teacher[rows.long()], objective)
    logits.copy_(slopes.mul_(scales[:, None]))
    return losses, greedy


def scale_all(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiplies tensors in place by a scalar tensor. Only on a CPU, where that waits for nothing, is it looked at."""
    if factor.device.type != "cpu" or float(factor) != 1:
        torch._foreach_mul_(list(tensors), factor)


def quantized_room(rows: int, width: int, like: torch.Tensor) -> Quantized:
    """Room for a matrix [R, W]."""
    values = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=like.device)
    return Quantized(values, torch.empty(rows, dtype=wide(like.dtype), device=like.device))


def quantize_rows(x: torch.Tensor, out: Quantized | None = None) -> Quantized:
    """x [R, W] with a scale for each row."""
    peaks = x.abs().amax(1).float()
    exponents = ((peaks.clamp(min=SMALLEST_PEAK).view(torch.int32) + ROUND_UP) >> 23) - LARGEST_EXPONENT
    scales = (exponents << 23).view(torch.float32).masked_fill(~peaks.isfinite(), torch.nan)
    out = quantized_room(len(x), x.shape[1], x) if out is None else out
    out.values.copy_(x / scales.to(x.dtype)[:, None])
    out.scales.copy_(scales)
    return out


def quantize_columns(x: Quantized) -> Quantized:
    """x [R, W] turned, [W, R], with a scale for each column of x; on a GPU zeros may follow."""
    return quantize_rows((x.values.to(x.scales.dtype) * x.scales[:, None]).T)


def scaled_product(
    a: Quantized, b: Quantized, dtype: torch.dtype, out: torch.Tensor | None = None, precise: bool = True
) -> torch.Tensor:
    """a [M, K] times b [N, K] turned, [M, N] in `dtype`.

    Args:
        precise: sum up in float32; a GPU may be faster with fewer bits.
    """
    left, right = (part.values.to(part.scales.dtype) * part.scales[:, None] for part in (a, b))
    found = (left @ right.T).to(dtype)
    return found if out is None else out.copy_(found)
