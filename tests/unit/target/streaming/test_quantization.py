"""Unpacking against numbers worked out by hand, and against the packing of the tests, value by value."""

from __future__ import annotations

import torch

from eagle3.target.streaming.quantization import dequantize_fp8, unpack_int4
from tests.unit.target.streaming.checkpoints import block_fp8, pack_int4


def test_the_lowest_nibble_comes_first_and_eight_is_zero() -> None:
    packed = torch.tensor([[0x0000_00F8, -1]], dtype=torch.int32)  # nibbles 8, 15, 0, 0 ...; then all 15
    out = torch.empty(1, 16)

    unpack_int4(packed, torch.tensor([[2.0, 0.5]]), out)

    assert out.tolist() == [[0.0, 14.0, *[-16.0] * 6, *[3.5] * 8]]


def test_int4_comes_back_as_it_was_packed() -> None:
    torch.manual_seed(0)
    packed, scale, plain = pack_int4(torch.randn(6, 64))
    for dtype in (torch.bfloat16, torch.float32):
        out = torch.empty(6, 64, dtype=dtype)
        unpack_int4(packed, scale, out)
        assert torch.equal(out, plain.to(dtype))


def test_fp8_blocks_at_the_edge_are_smaller() -> None:
    torch.manual_seed(0)
    weight = torch.randn(2, 50, 90)
    parts = [block_fp8(matrix) for matrix in weight]
    stored, scale, plain = (torch.stack(items) for items in zip(*parts, strict=True))
    out = torch.empty(2, 50, 90)

    dequantize_fp8(stored, scale, (24, 40), out)

    assert torch.equal(out, plain)
    assert (out - weight).abs().max() < 0.2


def test_an_fp8_block_larger_than_the_matrix_is_the_matrix() -> None:
    weight, out = torch.ones(1, 3, 5).to(torch.float8_e4m3fn), torch.empty(1, 3, 5)

    dequantize_fp8(weight, torch.full((1, 1, 1), 2.0), (10**30, 10**30), out)

    assert torch.equal(out, torch.full((1, 3, 5), 2.0))
