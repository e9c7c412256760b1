"""float8 (e4m3) with one scale a row, or a column, of a matrix.

Legend: R rows, W width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from eagle3.draft.fused.quantized import LARGEST_EXPONENT, MULTIPLE, ROUND_UP, SMALLEST_PEAK, Quantized

_BLOCK = 16384
_PEAK_ROWS, _PEAK_COLUMNS = 64, 128
_TILE_ROWS, _TILE_COLUMNS = 256, 32
_SPLITS = 8
"""Parts of the rows in which a column's greatest value is sought. All are the fastest of those tried on an H200."""


def quantized_room(rows: int, width: int, like: torch.Tensor) -> Quantized:
    """As `plain.quantized_room`."""
    values = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=like.device)
    return Quantized(values, torch.empty(rows, dtype=torch.float32, device=like.device))


def quantize_rows(x: torch.Tensor, out: Quantized | None = None) -> Quantized:
    """As `plain.quantize_rows`; rows may lie apart, those of `out` may not.

    The result's scales are in memory of their own besides: cuBLAS wants them to begin at 16 bytes.
    """
    rows, width = x.shape
    out = quantized_room(rows, width, x) if out is None else out
    scales = torch.empty_like(out.scales)
    if rows:
        block = min(_BLOCK, triton.next_power_of_2(width))
        _quantize_rows[(rows,)](
            x, out.values, out.scales, scales, x.stride(0), width, ROUND_UP, LARGEST_EXPONENT, SMALLEST_PEAK, block,
            num_warps=max(4, block // 1024),
        )  # fmt: skip
    return Quantized(out.values, scales)


def quantize_columns(x: Quantized) -> Quantized:
    """As `plain.quantize_columns`; the rows are filled up with zeros to a multiple of `MULTIPLE`."""
    rows, width = x.values.shape
    padded = -(-rows // MULTIPLE) * MULTIPLE
    out = quantized_room(width, padded, x.values)
    peaks = torch.empty(_SPLITS, width, dtype=torch.float32, device=x.values.device)
    _column_peaks[(triton.cdiv(width, _PEAK_COLUMNS), _SPLITS)](
        x.values, x.scales, peaks, rows, width, _SPLITS, _PEAK_ROWS, _PEAK_COLUMNS, num_warps=4
    )
    _quantize_columns[(triton.cdiv(padded, _TILE_ROWS), triton.cdiv(width, _TILE_COLUMNS))](
        x.values, x.scales, peaks, out.values, out.scales, rows, padded, width, ROUND_UP, LARGEST_EXPONENT,
        SMALLEST_PEAK, _SPLITS, _TILE_ROWS, _TILE_COLUMNS, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def scale_and_inverse(peak, round_up: tl.constexpr, largest: tl.constexpr, smallest: tl.constexpr):
    """The power of two that brings `peak` to 448 or below, NaN if it is infinite, and 1 / that."""
    exponent = ((tl.maximum(peak, smallest).to(tl.int32, bitcast=True) + round_up) >> 23) - largest
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return tl.where(peak < float("inf"), scale, float("nan")), inverse


@triton.jit
def _quantize_rows(
    x, values, kept_scales, scales, x_row,
    width: tl.constexpr, round_up: tl.constexpr, largest: tl.constexpr, smallest: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x += row * x_row
    values += row * width
    lane = tl.arange(0, block)
    if width <= block:
        value = tl.load(x + lane, mask=lane < width, other=0.0).to(tl.float32)
        scale, inverse = scale_and_inverse(tl.max(tl.abs(value), axis=0), round_up, largest, smallest)
        tl.store(values + lane, (value * inverse).to(values.dtype.element_ty), mask=lane < width)
    else:
        peak = tl.zeros((block,), tl.float32)
        for first in range(0, width, block):
            inside = first + lane < width
            peak = tl.maximum(peak, tl.abs(tl.load(x + first + lane, mask=inside, other=0.0).to(tl.float32)))
        scale, inverse = scale_and_inverse(tl.max(peak, axis=0), round_up, largest, smallest)
        for first in range(0, width, block):
            inside = first + lane < width
            value = tl.load(x + first + lane, mask=inside, other=0.0).to(tl.float32)
            tl.store(values + first + lane, (value * inverse).to(values.dtype.element_ty), mask=inside)
    tl.store(kept_scales + row, scale)
    tl.store(scales + row, scale)


@triton.jit(do_not_specialize=["rows"])
def _column_peaks(
    x, row_scales, peaks, rows,
    width: tl.constexpr, splits: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * tile_columns + tl.arange(0, tile_columns)
    part = tl.program_id(1)
    share = tl.cdiv(tl.cdiv(rows, splits), tile_rows) * tile_rows
    peak = tl.zeros((tile_rows, tile_columns), tl.float32)
    for first in range(part * share, tl.minimum((part + 1) * share, rows), tile_rows):
        row = first + tl.arange(0, tile_rows)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        value = tl.load(x + row.to(tl.int64)[:, None] * width + column[None, :], mask=inside, other=0.0)
        by = tl.load(row_scales + row, mask=row < rows, other=1.0)
        peak = tl.maximum(peak, tl.abs(value.to(tl.float32)) * by[:, None])
    tl.store(peaks + part * width + column, tl.max(peak, axis=0), mask=column < width)


@triton.jit(do_not_specialize=["rows", "padded"])
def _quantize_columns(
    x, row_scales, peaks, values, scales, rows, padded,
    width: tl.constexpr, round_up: tl.constexpr, largest: tl.constexpr, smallest: tl.constexpr, splits: tl.constexpr,
    tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    column = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    part = tl.arange(0, splits)
    found = tl.load(peaks + part[:, None] * width + column[None, :], mask=(column < width)[None, :], other=0.0)
    scale, inverse = scale_and_inverse(tl.max(found, axis=0), round_up, largest, smallest)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    value = tl.load(x + row.to(tl.int64)[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
    by = tl.load(row_scales + row, mask=row < rows, other=1.0)
    result = (value * by[:, None] * inverse[None, :]).to(values.dtype.element_ty)
    at = column.to(tl.int64)[:, None] * padded + row[None, :]
    tl.store(values + at, tl.trans(result), mask=(column < width)[:, None] & (row < padded)[None, :])
    if tl.program_id(0) == 0:
        tl.store(scales + column, scale, mask=column < width)
