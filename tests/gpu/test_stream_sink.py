"""States that leave the GPU through pinned buffers, beside its work, are those that were handed over."""

from __future__ import annotations

import pytest
import torch

from eagle3.data.shard_file import StateKey
from eagle3.target.stream_sink import Part, ShardSink, stager
from tests.unit.data.cases import HIDDEN, contract

pytestmark = pytest.mark.gpu


class Rows:
    """A shard in memory, written slowly."""

    def __init__(self, rows: int) -> None:
        self.states = torch.full((rows, HIDDEN), float("nan"))

    def claim(self, key: StateKey, begin: int, count: int) -> bool:
        return False

    def write(self, key: StateKey, begin: int, rows: torch.Tensor, sums: torch.Tensor) -> None:
        assert rows.device.type == sums.device.type == "cpu"
        assert torch.allclose(sums, rows.sum(dim=1))
        self.states[begin : begin + len(rows)] = rows


def test_pieces_arrive_as_they_were_though_their_memory_is_used_again_at_once() -> None:
    sizes = [70_000, 1, 130_000, 40_000] * 8
    shard = Rows(sum(sizes))
    matrix = torch.randn(4096, 4096, device="cuda")
    with ShardSink([Part(0, sum(sizes), shard)], contract(dtype="float32"), stager(matrix.device)) as sink:  # type: ignore[arg-type]
        begin = 0
        piece = torch.empty(max(sizes), HIDDEN, device="cuda")
        for size in sizes:
            for _ in range(3):
                matrix = matrix @ matrix / 64  # so that the piece is not there yet when it is handed over
            rows = torch.arange(begin, begin + size, device="cuda", dtype=torch.float32)
            piece[:size] = rows[:, None] + matrix[0, 0].isnan() * 0
            sink.put(1, begin, piece[:size])
            piece.fill_(-1)
            begin += size
    assert torch.equal(shard.states, torch.arange(sum(sizes), dtype=torch.float32)[:, None].expand(-1, HIDDEN))
