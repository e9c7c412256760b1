"""float8 (e4m3) with one scale a row, or a column, of a matrix.

Legend: R rows, W width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from eagle3.draft.fused.quantized import LARGEST, MULTIPLE, SMALLEST_PEAK, Quantized

_BLOCK = 16384
_PEAK_ROWS, _PEAK_COLUMNS = 32, 256
_TILE_ROWS, _TILE_COLUMNS = 128, 32
_SPLITS = 8
"""Parts of the rows in which a column's greatest value is sought. All are the fastest of those tried on an H200."""


def quantize_rows(x: torch.Tensor) -> Quantized:
    """As `plain.quantize_rows`; rows may lie apart."""
    rows, width = x.shape
    values = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        block = min(_BLOCK, triton.next_power_of_2(width))
        _quantize_rows[(rows,)](
            x, values, scales, x.stride(0), width, LARGEST, SMALLEST_PEAK, block, num_warps=max(4, block // 1024)
        )
    return Quantized(values, scales)


def quantize_columns(x: torch.Tensor) -> Quantized:
    """As `plain.quantize_columns`; rows may lie apart."""
    rows, width = x.shape
    padded = -(-rows // MULTIPLE) * MULTIPLE
    values = torch.empty(width, padded, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(width, dtype=torch.float32, device=x.device)
    peaks = torch.empty(_SPLITS, width, dtype=torch.float32, device=x.device)
    _column_peaks[(triton.cdiv(width, _PEAK_COLUMNS), _SPLITS)](
        x, peaks, rows, x.stride(0), width, _SPLITS, _PEAK_ROWS, _PEAK_COLUMNS, num_warps=4
    )
    _quantize_columns[(triton.cdiv(padded, _TILE_ROWS), triton.cdiv(width, _TILE_COLUMNS))](
        x, peaks, values, scales, rows, padded, x.stride(0), width, LARGEST, SMALLEST_PEAK, _SPLITS, _TILE_ROWS,
        _TILE_COLUMNS, num_warps=4,
    )  # fmt: skip
    return Quantized(values, scales)


@triton.jit
def _quantize_rows(
    x, values, scales, x_row, width: tl.constexpr, largest: tl.constexpr, smallest: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x += row * x_row
    values += row * width
    lane = tl.arange(0, block)
    if width <= block:
        value = tl.load(x + lane, mask=lane < width, other=0.0).to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(value), axis=0), smallest) / largest
        tl.store(values + lane, (value * (1.0 / scale)).to(values.dtype.element_ty), mask=lane < width)
    else:
        peak = tl.zeros((block,), tl.float32)
        for first in range(0, width, block):
            inside = first + lane < width
            peak = tl.maximum(peak, tl.abs(tl.load(x + first + lane, mask=inside, other=0.0).to(tl.float32)))
        scale = tl.maximum(tl.max(peak, axis=0), smallest) / largest
        for first in range(0, width, block):
            inside = first + lane < width
            value = tl.load(x + first + lane, mask=inside, other=0.0).to(tl.float32)
            tl.store(values + first + lane, (value * (1.0 / scale)).to(values.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


@triton.jit(do_not_specialize=["rows"])
def _column_peaks(
    x, peaks, rows, x_row,
    width: tl.constexpr, splits: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * tile_columns + tl.arange(0, tile_columns)
    part = tl.program_id(1)
    share = tl.cdiv(tl.cdiv(rows, splits), tile_rows) * tile_rows
    peak = tl.zeros((tile_rows, tile_columns), tl.float32)
    for first in range(part * share, tl.minimum((part + 1) * share, rows), tile_rows):
        row = first + tl.arange(0, tile_rows)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        value = tl.load(x + row.to(tl.int64)[:, None] * x_row + column[None, :], mask=inside, other=0.0)
        peak = tl.maximum(peak, tl.abs(value.to(tl.float32)))
    tl.store(peaks + part * width + column, tl.max(peak, axis=0), mask=column < width)


@triton.jit(do_not_specialize=["rows", "padded"])
def _quantize_columns(
    x, peaks, values, scales, rows, padded, x_row,
    width: tl.constexpr, largest: tl.constexpr, smallest: tl.constexpr, splits: tl.constexpr,
    tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    column = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    part = tl.arange(0, splits)
    found = tl.load(peaks + part[:, None] * width + column[None, :], mask=(column < width)[None, :], other=0.0)
    scale = tl.maximum(tl.max(found, axis=0), smallest) / largest
    inside = (row < rows)[:, None] & (column < width)[None, :]
    value = tl.load(x + row.to(tl.int64)[:, None] * x_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
    result = (value * (1.0 / scale)[None, :]).to(values.dtype.element_ty)
    at = column.to(tl.int64)[:, None] * padded + row[None, :]
    tl.store(values + at, tl.trans(result), mask=(column < width)[:, None] & (row < padded)[None, :])
    if tl.program_id(0) == 0:
        tl.store(scales + column, scale, mask=column < width)
