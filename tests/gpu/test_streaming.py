"""The streamed engine's kernels against plain torch, and the engine on a GPU against itself on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.functional import silu

from benchmarks.kimi_layers import write_layers
from eagle3.target.engines.streamed import StreamSizes
from eagle3.target.extract import run_extract
from eagle3.target.selfcheck import self_check_streamed
from eagle3.target.streaming.moe import ExpertGroup, mixture
from eagle3.target.streaming.quantization import unpack_int4
from eagle3.target.tiny import make_tiny_kimi, make_tiny_llama, make_tiny_qwen3
from tests.unit.target.cases import extract_config, relative, write_conversations
from tests.unit.target.streaming.checkpoints import make_tiny_gpt_oss, make_tiny_qwen3_moe, streamed

pytestmark = pytest.mark.gpu

LENGTHS = [5, 1, 300, 128, 129, 64]
DOCUMENTS = [[(7 * place + number) % 500 for place in range(length)] for number, length in enumerate(LENGTHS)]
BF16 = 1e-2


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def cuda(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def test_int4_is_unpacked_to_the_bit() -> None:
    packed = torch.randint(-(2**31), 2**31 - 1, (3, 50, 28), dtype=torch.int32, device="cuda")
    scale = cuda(3, 50, 7)
    fused, plain = torch.full((2, 3, 50, 224), float("nan"), dtype=torch.bfloat16, device="cuda")

    unpack_int4(packed, scale, fused)
    unpack_int4(packed.cpu(), scale.cpu(), (expected := plain.cpu()))

    assert torch.equal(fused.cpu(), expected)


@pytest.mark.parametrize("width", [64, 512, 7168])
def test_norm(width: int) -> None:
    from eagle3.target.streaming.kernels.norm import rms_norm

    states, weight = cuda(37, 2 * width)[:, :width], cuda(width)
    wide = states.float()
    expected = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(torch.bfloat16)

    assert relative(rms_norm(states, weight, 1e-5).float(), expected.float()) < 1e-3


def test_rotation_of_pairs_in_place() -> None:
    from eagle3.target.streaming.kernels.rope import rotate_pairs

    states, angles = cuda(301, 5, 24), torch.rand(301, 16, device="cuda") * 6
    cos, sin = angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)
    first, second = states[..., 8:24:2].float(), states[..., 9:24:2].float()
    c, s = cos[:, None, :8].float(), sin[:, None, :8].float()
    expected = torch.cat([states[..., :8].float(), first * c - second * s, second * c + first * s], -1)

    rotate_pairs(states[..., 8:], cos, sin)

    assert relative(states.float(), expected) < BF16


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize(
    ("heads", "groups", "own", "shared", "width"), [(4, 4, 128, 64, 128), (8, 2, 64, 0, 64), (2, 1, 16, 16, 32)]
)
def test_attention_of_packed_documents(
    heads: int, groups: int, own: int, shared: int, width: int, window: int | None, sinks: bool
) -> None:
    from eagle3.target.streaming.kernels.attention import attention_tiles, packed_attention

    tokens = sum(LENGTHS)
    query, key, value = cuda(tokens, heads, own + shared), cuda(tokens, groups, own), cuda(tokens, groups, width)
    common = cuda(tokens, shared) if shared else None
    sink = cuda(heads) if sinks else None
    tiles = attention_tiles(LENGTHS, torch.device("cuda"))

    found = packed_attention(query, key, value, common, tiles, 0.1, window, sink)

    whole = key if common is None else torch.cat([key, common[:, None].expand(-1, groups, -1)], -1)
    expected = plain_attention(query.double(), whole.double(), value.double(), 0.1, window, sink)
    assert relative(found.double(), expected) < BF16


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    share, outputs, begin = query.shape[1] // key.shape[1], [], 0
    for length in LENGTHS:
        q, k, v = (states[begin : begin + length].transpose(0, 1) for states in (query, key, value))
        scores = q @ k.repeat_interleave(share, 0).transpose(1, 2) * scaling
        distance = torch.arange(length, device="cuda")[:, None] - torch.arange(length, device="cuda")
        scores = scores.masked_fill((distance < 0) | (distance >= (window or length)), float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, length, 1)], -1)
        outputs.append((scores.softmax(-1)[..., :length] @ v.repeat_interleave(share, 0)).transpose(0, 1))
        begin += length
    return torch.cat(outputs)


@pytest.mark.parametrize("size", [16, 5])
def test_mixture_of_experts(size: int) -> None:
    tokens, slots, experts, hidden, width = 333, 4, 16, 256, 128
    states, shared = cuda(tokens, hidden), cuda(tokens, hidden)
    gate_up, down = cuda(experts, 2 * width, hidden) * 0.05, cuda(experts, hidden, width) * 0.05
    index = torch.stack([torch.randperm(experts - 1)[:slots] for _ in range(tokens)]).cuda()
    weights = torch.rand(tokens, slots, device="cuda")
    expected = shared.double()
    for slot in range(slots):
        gate, up = torch.einsum("toh,th->to", gate_up[index[:, slot]].double(), states.double()).chunk(2, -1)
        expected = expected + weights[:, slot, None] * torch.einsum(
            "thi,ti->th", down[index[:, slot]].double(), silu(gate) * up
        )
    groups = [
        ExpertGroup(first, gate_up[first : first + size], down[first : first + size])
        for first in range(0, experts, size)
    ]

    assert relative(mixture(states, index, weights, groups, experts, shared).double(), expected) < BF16


@pytest.fixture(scope="module")
def kimi_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packed INT4, widths that the kernels take."""
    return write_layers(tmp_path_factory.mktemp("layers") / "kimi", "small", 3, torch.device("cpu"))


@pytest.mark.parametrize("group", [None, 5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_self_check_passes_with_every_kernel(kimi_layers: Path, dtype: str, group: int | None) -> None:
    engine = streamed(kimi_layers, [0], StreamSizes(4096, 256, expert_group=group), device="cuda", dtype=dtype)

    self_check_streamed(engine, [str(number) for number in range(len(DOCUMENTS))], DOCUMENTS, torch.float32)


def test_where_the_residual_stream_lies_changes_nothing(kimi_layers: Path) -> None:
    found = [
        streamed(kimi_layers, range(-1, 3), StreamSizes(4096, 256, place), device="cuda", dtype="bfloat16").states(
            DOCUMENTS
        )
        for place in ("device", "host", "file")
    ]

    for first, other in ((found[0], found[1]), (found[0], found[2])):
        assert all(torch.equal(one[key], two[key]) for one, two in zip(first, other, strict=True) for key in one)


@pytest.mark.parametrize(
    "make", [make_tiny_llama, make_tiny_qwen3, make_tiny_qwen3_moe, make_tiny_kimi, make_tiny_gpt_oss]
)
def test_float32_equals_the_cpus(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    folder = make(tmp_path / "target")
    here, there = (
        streamed(folder, [0, 2], StreamSizes(4096, 256), device=device).states(DOCUMENTS) for device in ("cuda", "cpu")
    )

    assert max(relative(one[key], two[key]) for one, two in zip(here, there, strict=True) for key in one) < 1e-3


@pytest.mark.parametrize("make", [make_tiny_llama, make_tiny_kimi])
def test_both_engines_extract_the_same_store(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    from eagle3.data.store import StoreReader

    target = make(tmp_path / "target")
    data = write_conversations(tmp_path / "data.jsonl", 20)
    readers = []
    for engine in ("transformers", "streamed"):
        cfg = extract_config(
            target, data, tmp_path / engine, output_indices=[0, 2], engine=engine, target={"device": "cuda"}
        )
        run_extract(cfg)
        readers.append(StoreReader(cfg.output))

    whole, layers = readers
    assert whole.contract == layers.contract and whole.samples == layers.samples
    for number in range(len(whole)):
        one, other = whole.read(number), layers.read(number)
        assert relative(one.aux_hidden_states, other.aux_hidden_states) < 1e-3
        assert relative(one.last_hidden_states, other.last_hidden_states) < 1e-3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_any_gpu_of_the_machine_will_do(kimi_layers: Path) -> None:
    sizes = StreamSizes(4096, 256)
    first, second = (
        streamed(kimi_layers, [0, 2], sizes, device=f"cuda:{number}", dtype="bfloat16").states(DOCUMENTS)
        for number in range(2)
    )

    assert max(relative(one[0].float(), two[0].float()) for one, two in zip(first, second, strict=True)) < BF16
