"""States that leave the GPU through pinned buffers, beside its work, are those that were handed over."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from eagle3.data.batch_plan import BatchPlan
from eagle3.data.chat import TokenSample
from eagle3.data.loader import collate, load_windows
from eagle3.data.shard_file import ShardFile, StateKey
from eagle3.data.store import StoreReader
from eagle3.data.target_argmax import BLOCK_ROWS, greedy_tokens
from eagle3.draft.loss import TargetHead
from eagle3.target.stream_sink import Part, ShardSink, stager
from tests.unit.data.cases import HIDDEN, VOCAB, contract, layout, sample, writer

pytestmark = pytest.mark.gpu


def head_on(device: str) -> TargetHead:
    """One to which all tokens are equal."""
    weights = torch.zeros(VOCAB, HIDDEN, device=device), torch.ones(HIDDEN, device=device)
    return TargetHead(*weights, eps=1e-6, kind="post_norm")


class Rows:
    """A shard in memory, written slowly."""

    samples = ()

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
    of = layout("all", dtype="float32")
    with ShardSink([Part(0, sum(sizes), shard)], of, stager(matrix.device), lambda: head_on("cuda")) as sink:  # type: ignore[arg-type]
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


def test_fp8_states_of_the_gpu_are_byte_for_byte_those_of_the_cpu(tmp_path: Path) -> None:
    """Quantized on the card: the same values and scales as on the CPU, for every exponent."""
    of = layout(dtype="float8_e4m3fn")
    samples = [TokenSample("s", [1] * 4000, [place % 3 > 0 for place in range(4000)])]
    generator = torch.Generator().manual_seed(0)
    exponents = torch.logspace(-37, 37, 4000)[:, None]
    states = (torch.randn(4000, HIDDEN, generator=generator) * exponents).bfloat16()
    states[7] = 0
    written = []
    for device in ("cuda", "cpu"):
        (tmp_path / device).mkdir()
        file = ShardFile(tmp_path / device / "shard-00000.safetensors", samples, of)
        with ShardSink([Part(0, 4000, file)], of, stager(torch.device(device)), partial(head_on, device)) as sink:
            for key in (*of.contract.output_indices, "last"):
                sink.put(key, 0, states.to(device))  # type: ignore[arg-type]
        file.close()
        written.append(file.path.read_bytes())
    assert written[0] == written[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_batches_on_the_gpu_hold_what_the_store_holds(tmp_path: Path, dtype: str) -> None:
    """Read into pinned memory, and dequantized on the card."""
    with writer(tmp_path / "store", contract=contract(dtype=dtype)) as store:
        store.write_shard([sample(f"s{number}", tokens=50 + number, start=number) for number in range(4)])
    reader = StoreReader(tmp_path / "store")
    windows = BatchPlan(0, [item.tokens for item in reader.samples], 128, pack=True).epoch(0)
    for window, [batch] in zip(windows, load_windows(reader, windows, range(4), 128), strict=True):
        [[rows]] = window
        expected = collate([[reader.read(index) for index in row] for row in rows], 128)
        places = torch.arange(batch.input_ids.numel())
        assert batch.aux.is_pinned() and batch.last_hidden.is_pinned()
        moved = batch.to("cuda")
        assert torch.equal(moved.aux_rows(places.cuda()).cpu(), expected.aux_rows(places))
        assert torch.equal(moved.last_rows(places.cuda()).cpu(), expected.last_rows(places))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_tokens_on_the_gpu_are_the_first_of_the_largest_logits(dtype: torch.dtype) -> None:
    """In 16 bits many are equal."""
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(40_000, HIDDEN, generator=generator).to("cuda", dtype)
    target = TargetHead(head, torch.ones(HIDDEN, device="cuda"), eps=1e-6, kind="post_norm")
    states = torch.randn(3000, HIDDEN, generator=generator).to("cuda", dtype)
    found = greedy_tokens(states, target)
    for begin in range(0, 3000, BLOCK_ROWS):
        logits = target.logits(states[begin : begin + BLOCK_ROWS])
        expected = (logits == logits.amax(-1, keepdim=True)).cpu().numpy().argmax(-1)
        assert found[begin : begin + BLOCK_ROWS].tolist() == expected.tolist()
