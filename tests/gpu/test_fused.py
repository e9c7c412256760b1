"""The fused step's kernels on a GPU against plain torch in float64 on the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import get_args

import pytest
import torch

from eagle3.draft.config import LossKind, Objective, TTTSettings
from eagle3.draft.fused import function, plain
from eagle3.draft.fused.layout import Chunk
from eagle3.draft.loss import TargetHead, read_teacher
from eagle3.draft.noise import add_noise, noise_keys
from eagle3.draft.objective import keep_greatest
from eagle3.draft.planned import plan_batch
from eagle3.draft.ttt import TTTLoss, count_terms
from eagle3.draft.vocab import DraftVocab
from tests.unit.draft import cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPES = [(8, 2, 64), (14, 2, 128), (8, 8, 80)]  # query heads, key/value heads, head width
ONE_ROUNDING = 0.004  # of bfloat16, relative to a row's norm


@pytest.fixture
def cuda() -> ModuleType:
    from eagle3.draft.fused import cuda as ops

    return ops


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").bfloat16()


def poison(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device="cuda")


def assert_near(found: torch.Tensor, expected: torch.Tensor, bound: float = 2 * ONE_ROUNDING) -> None:
    """Every row is near."""
    found, expected = (part.double().flatten(1) for part in (found, expected))
    errors = (found - expected).norm(dim=1) / (expected.norm(dim=1) + 1e-3 * expected.norm() / len(expected) ** 0.5)
    assert errors.max() < bound, float(errors.max())


def make_chunk(seed: int) -> tuple[Chunk, int]:
    """A chunk that begins and ends inside documents, and the number of sources."""
    lengths = (700, 5, 130, 900)
    generator = torch.Generator().manual_seed(seed)
    masks = [torch.rand(length, generator=generator) < 0.97 for length in lengths]
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    planned = plan_batch(torch.cat(masks)[None], documents[None], TTTSettings(4, chunk=700)).to(torch.device("cuda"))
    assert planned.chunks is not None
    return planned.chunks[1], len(planned.plan.sources)


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_forward_and_backward(shape: tuple[int, int, int], cuda: ModuleType) -> None:
    assert_attention_is_near(shape, cuda)


def assert_attention_is_near(shape: tuple[int, int, int], cuda: ModuleType) -> None:
    heads, key_heads, width = shape
    chunk, sources = make_chunk(1)
    rows, offsets = chunk.offsets[-1], chunk.offsets
    query, grad = randn(rows, heads, width, seed=1), randn(rows, heads, width, seed=2)
    pairs = randn(sources, 2 * key_heads, width, seed=3)
    own = randn(3, chunk.counts[0], 2 * key_heads, width, seed=4)
    out, sums, means = poison(rows, heads, width), *(poison(rows, heads, dtype=torch.float32) for _ in range(2))
    exact = [part.double() for part in (query, grad, pairs, own)]
    exact_out, exact_sums, exact_means = out.double(), sums.double(), means.double()
    for k in range(4):
        at = slice(offsets[k], offsets[k + 1])
        bounds = chunk.begins[at], chunk.ends[at]
        cuda.attend(query[at], pairs, own[:k], *bounds, out[at], sums[at])
        plain.attend(exact[0][at], exact[2], exact[3][:k], *bounds, exact_out[at], exact_sums[at])
        assert_near(out[at], exact_out[at])
        found = cuda.attend_grad_query(query[at], pairs, own[:k], *bounds, out[at], grad[at], sums[at], means[at])
        expected = plain.attend_grad_query(
            exact[0][at], exact[2], exact[3][:k], *bounds, exact_out[at], exact[1][at], exact_sums[at], exact_means[at]
        )
        assert_near(found, expected, 0.02)
    for k in (1, 2, 3):
        found = cuda.attend_grad_own(k, query, own, grad, sums, means, chunk)
        expected = plain.attend_grad_own(k, exact[0], exact[3], exact[1], exact_sums, exact_means, chunk)
        assert_near(found, expected, 0.02)
    group = heads // key_heads
    total = cuda.source_sums(sources, key_heads, group, width, query)
    exact_total = plain.source_sums(sources, key_heads, group, width, exact[0])
    for _ in range(2):  # it adds
        cuda.attend_grad_sources(query, pairs, grad, sums, means, chunk, total)
        plain.attend_grad_sources(exact[0], exact[2], exact[1], exact_sums, exact_means, chunk, exact_total)
    assert_near(total.sum(0), exact_total.sum(0), 0.02)


@pytest.mark.parametrize("width", [7168, 576, 100])
def test_norm(width: int, cuda: ModuleType) -> None:
    x, weight, grad, add = randn(613, width), randn(width, seed=1), randn(613, width, seed=2), randn(400, width, seed=3)
    normed, factor = cuda.norm(x, weight, 1e-5)
    expected, exact_factor = plain.norm(x.double(), weight.double(), 1e-5)
    assert_near(normed, expected)
    sums, exact_sums = cuda.norm_sums(width, x), plain.norm_sums(width, x.double())
    found = cuda.norm_grad(x, factor, weight, grad, sums, add, grad.clone())
    exact = plain.norm_grad(x.double(), exact_factor, weight.double(), grad.double(), exact_sums, add.double())
    assert_near(found, exact)
    assert_near(sums.sum(0)[None], exact_sums.sum(0)[None], 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [7168, 576, 100])
def test_a_gradient_without_the_norms_weight(width: int, dtype: torch.dtype, cuda: ModuleType) -> None:
    wide, matrix, weight = randn(613, 2 * width).to(dtype), randn(613, 2 * width, seed=1), randn(width, seed=2)
    sums = torch.ones_like(cuda.norm_sums(width, wide))
    exact, exact_sums = wide.double(), sums.double().sum(0)[None]
    right = wide[:, width:].clone()
    plain.unnormed_grad(exact[:, :width], matrix[:, :width].double(), weight.double(), exact_sums)
    cuda.unnormed_grad(wide[:, :width], matrix[:, :width], weight, sums)
    assert_near(wide[:, :width], exact[:, :width])
    assert_near(sums.sum(0)[None], exact_sums, 1e-4)
    assert torch.equal(wide[:, width:], right)


@pytest.mark.parametrize("shape", SHAPES)
def test_rotation(shape: tuple[int, int, int], cuda: ModuleType) -> None:
    heads, rotated, width = shape
    rows = torch.randperm(600, device="cuda")[:500].int()
    angles = torch.rand(500, width // 2, device="cuda", dtype=torch.float64) * 6
    turn, exact_turn = (angles.cos().float(), angles.sin().float()), (angles.cos(), angles.sin())
    projected, shared = randn(500, heads * width + 32), randn(610, heads * width, seed=1)
    found = cuda.rotate_in(projected[:, : heads * width], shared, rows, 3, turn, rotated, poison(500, heads, width))
    exact = plain.rotate_in(
        projected[:, : heads * width].double(), shared.double(), rows, 3, exact_turn, rotated, found.double()
    )
    assert_near(found, exact)
    sums = torch.ones(610, heads * width, device="cuda")
    wide = poison(500, heads * width + 32)
    back = cuda.rotate_out(found, rows, 3, turn, rotated, sums, wide[:, : heads * width])
    exact_sums = torch.ones_like(sums).double()
    expected = plain.rotate_out(found.double(), rows, 3, exact_turn, rotated, exact_sums, back.double())
    assert_near(back, expected)
    assert_near(sums, exact_sums, 1e-5)
    assert wide[:, heads * width :].isnan().all()


@pytest.mark.parametrize("width", [4096, 331])
def test_swiglu(width: int, cuda: ModuleType) -> None:
    gate, up, grad = (randn(77, width, seed=seed) for seed in range(3))
    exact = [part.double() for part in (gate, up, grad)]
    assert_near(cuda.swiglu(gate, up, poison(77, width)), plain.swiglu(exact[0], exact[1], torch.empty_like(exact[0])))
    cuda.swiglu_grad(gate, up, grad)
    plain.swiglu_grad(*exact)
    assert_near(gate, exact[0])
    assert_near(up, exact[1])


@pytest.mark.parametrize("width", [40960, 4096, 336])
def test_swiglu_rounded(width: int, cuda: ModuleType) -> None:
    gate, up, grad = (3 * randn(77, width, seed=seed) for seed in range(3))
    rooms = [cuda.quantized_room(100, width, gate).part(slice(3, 80)) for _ in range(3)]
    exact = [part.double() for part in (gate, up, grad)]
    act = plain.swiglu(exact[0], exact[1], torch.empty_like(exact[0]))
    found = [cuda.swiglu_rounded(gate, up, rooms[0]), *cuda.swiglu_grad_rounded(gate, up, grad, *rooms[1:])]
    plain.swiglu_grad(*exact)
    for rounded, room, expected in zip(found, rooms, (act, exact[0], exact[1]), strict=True):
        assert torch.equal(rounded.scales, room.scales) and rounded.values.data_ptr() == room.values.data_ptr()
        values = rounded.values.double() * rounded.scales.double()[:, None]
        assert ((values - expected).abs() <= expected.abs() / 15 + rounded.scales.double()[:, None] * 2**-9).all()
        peaks, scales = expected.abs().amax(1), rounded.scales.double()
        assert (peaks <= 448.1 * scales).all() and (peaks > 223.9 * scales).all()


@pytest.mark.parametrize("top", [None, 1, 50])
@pytest.mark.parametrize("kind", get_args(LossKind))
@pytest.mark.parametrize("width", [32000, 4096, 517])
def test_a_rows_loss_its_gradient_and_the_greedy_token(
    width: int, kind: LossKind, top: int | None, cuda: ModuleType
) -> None:
    logits, teacher = 3 * randn(300, width), 3 * randn(90, width, seed=1)
    teacher = teacher if top is None else keep_greatest(teacher, top)
    rows = torch.randint(0, 90, (300,), device="cuda").int()
    scales = torch.rand(300, device="cuda")
    scales[5] = 0
    exact, objective = logits.double(), Objective(kind, 0.9, 2.0)
    expected, greedy = plain.row_losses(exact, teacher.double(), rows, scales.double(), objective)
    losses, found = cuda.row_losses(logits, teacher, rows, scales, objective)
    assert_near(losses[:, None], expected[:, None], 1e-4)
    assert torch.equal(found, greedy)
    assert_near(logits, exact)


def test_noise_on_the_gpu_is_that_of_the_cpu() -> None:
    aux, keys, places = randn(300, 96), noise_keys(["a", "b"], 1, 2), torch.arange(300)
    found = add_noise(aux.clone(), 3, 0.2, keys.cuda()[places.cuda() % 2], places.cuda())
    expected = add_noise(aux.cpu(), 3, 0.2, keys[places % 2], places)
    torch.testing.assert_close(found.cpu(), expected, rtol=0.008, atol=1e-3)  # one rounding of bfloat16


def test_teacher_on_the_gpu_is_that_of_the_cpu() -> None:
    weight, states = randn(5000, 64), randn(2100, 64, seed=1)
    ids = torch.randperm(5000)[:700].sort().values
    head = TargetHead(weight, torch.ones(64, device="cuda"), 1e-5, "post_norm")
    greedy, chosen = read_teacher(head, states, ids.cuda())
    logits = head.logits(states)
    assert torch.equal(logits.gather(1, greedy[:, None])[:, 0], logits.amax(1))
    assert torch.equal(chosen, logits[:, ids.cuda()])


@pytest.mark.parametrize("factor", [1.0, -2.5])
def test_scaling_by_one_and_by_others(factor: float, cuda: ModuleType) -> None:
    values = [randn(100, 64), randn(3), torch.randn(5000, device="cuda")]
    expected = [(value.double() * factor).to(value.dtype) for value in values]
    cuda.scale_all(values, torch.tensor(factor, device="cuda"))
    assert all(torch.equal(found, wanted) for found, wanted in zip(values, expected, strict=True))


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    import triton

    seen: list[str] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda *_, **values: seen.append(str(values.get("repr")))
    yield seen
    triton.knobs.runtime.jit_post_compile_hook = None


@pytest.mark.parametrize(("width", "rows"), [(7168, 300), (576, 33), (40960, 17), (100, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_quantizing(width: int, rows: int, dtype: torch.dtype, cuda: ModuleType) -> None:
    sizes = torch.logspace(-9, 9, rows, device="cuda")[:, None]
    x = (torch.randn(rows, width + 16, device="cuda") * sizes).to(dtype)[:, :width]
    x[-1] = 0
    found, expected = cuda.quantize_rows(x), plain.quantize_rows(x)
    assert torch.equal(found.scales, expected.scales)
    assert torch.equal(found.values.view(torch.uint8), expected.values.view(torch.uint8))
    found, expected = cuda.quantize_columns(found), plain.quantize_columns(expected)
    assert torch.equal(found.scales, expected.scales)
    assert found.values.shape == (width, -(-rows // 16) * 16)
    assert torch.equal(found.values[:, :rows].float(), expected.values.float())
    assert not found.values[:, rows:].float().any()


def test_what_is_not_finite_makes_a_row_that_is_not(cuda: ModuleType) -> None:
    x = torch.ones(3, 64, device="cuda")
    x[0, 3], x[1, 5] = torch.nan, torch.inf
    found = cuda.quantize_rows(x)
    rows = found.values.float() * found.scales[:, None]
    assert rows[0].isnan().any() and rows[1].isnan().all() and torch.equal(rows[2], x[2])


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 64, 128), (333, 1024, 7168), (7168, 512, 1008)])
def test_products_in_float8(shape: tuple[int, int, int], out_dtype: torch.dtype, cuda: ModuleType) -> None:
    m, n, k = shape
    a, b = cuda.quantize_rows(randn(m, k)), cuda.quantize_rows(randn(n, k, seed=1))
    exact = plain.scaled_product(a, b, torch.float32)
    assert_near(cuda.scaled_product(a, b, out_dtype), exact)
    assert_near(cuda.scaled_product(a, b, out_dtype, precise=False), exact, 4 * ONE_ROUNDING)
    wide = poison(m, n + 64, dtype=out_dtype)
    cuda.scaled_product(a, b, out_dtype, wide[:, :n])
    assert_near(wide[:, :n], exact)
    assert wide[:, n:].isnan().all()


def test_a_precise_product_keeps_small_values_beside_a_large_one(cuda: ModuleType) -> None:
    """As in a softmax's gradient: half of the sum is in one value, the rest in thousands of small ones."""
    count = 16384
    x = torch.full((64, count), -1 / count, device="cuda")
    x[:, 0] = 1
    a, b = cuda.quantize_rows(x), cuda.quantize_rows(torch.ones(64, count, device="cuda"))
    exact = plain.scaled_product(a, b, torch.float32)
    errors = [
        float((cuda.scaled_product(a, b, torch.float32, precise=precise) - exact).abs().max())
        for precise in (True, False)
    ]
    assert errors[0] < 0.02, errors


@pytest.mark.parametrize(("float8", "bound"), [(False, 0.08), (True, 0.15)])
def test_fifty_random_batches_are_near_float64_and_compile_nothing_anew(
    float8: bool, bound: float, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cases, "HIDDEN", 128)
    monkeypatch.setattr(cases, "VOCAB", 48)
    config = cases.make_config(
        hidden_size=128, target_hidden_size=128, intermediate_size=256, num_attention_heads=8, head_dim=64,
        draft_vocab_size=16,
    )  # fmt: skip
    model = cases.make_model(config).cuda()
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(0.25 if value.ndim == 2 else 1)
    settings, vocab = TTTSettings(4, chunk=150, float8=float8), DraftVocab(torch.arange(0, 48, 3), 48)
    exact_head = cases.make_head()
    head = replace(
        exact_head, lm_head=exact_head.lm_head.bfloat16().cuda(), norm_weight=exact_head.norm_weight.float().cuda()
    )
    low = cases.make_model(config).cuda()
    low.load_state_dict(model.state_dict())
    low.bfloat16()
    model.load_state_dict({name: value.double() for name, value in low.state_dict().items()})
    first_batches = 0
    for seed in range(50):
        batch = cases.make_batch(
            [cases.random_documents(6, seed, longest=90), cases.random_documents(3, seed + 100, 60)]
        )
        batch = replace(batch, aux=batch.aux.bfloat16(), last_hidden=batch.last_hidden.bfloat16()).to("cuda")
        module = TTTLoss(low, vocab, settings).cuda()
        counts = count_terms(batch, head, module.vocab, settings)
        assert function.choose_ops(batch.aux) is not plain
        found = cases.gradients(low, module(batch, counts, counts.in_vocab).loss)
        if seed == 4:
            first_batches = len(compilations)
        if seed % 10 == 0:
            wide = replace(batch, aux=batch.aux.double())
            exact = TTTLoss(model, vocab, replace(settings, float8=False)).cuda()
            wide_counts = replace(counts, teacher=counts.teacher.double())
            slopes = cases.gradients(model, exact(wide, wide_counts, counts.in_vocab).loss)
            errors = [(found[name].double() - slopes[name]).norm() / slopes[name].norm() for name in slopes]
            assert max(errors) < bound, dict(zip(slopes, errors, strict=True))
    assert 0 < first_batches == len(compilations), compilations[first_batches:]


def test_a_step_has_the_same_bits_every_time() -> None:
    model = cases.make_model(cases.make_config(intermediate_size=64)).cuda().bfloat16()
    exact_head = cases.make_head()
    head = replace(
        exact_head, lm_head=exact_head.lm_head.bfloat16().cuda(), norm_weight=exact_head.norm_weight.float().cuda()
    )
    batch = cases.make_batch([cases.random_documents(6, 1, longest=400)])
    batch = replace(batch, aux=batch.aux.bfloat16(), last_hidden=batch.last_hidden.bfloat16()).to("cuda")
    settings = TTTSettings(4, chunk=150)
    module = TTTLoss(model, cases.make_vocab(), settings).cuda()
    runs = []
    for _ in range(3):
        counts = count_terms(batch, head, module.vocab, settings)
        output = module(batch, counts, counts.in_vocab)
        runs.append([output.loss.detach(), *cases.gradients(model, output.loss).values()])
    assert all(torch.equal(first, other) for run in runs[1:] for first, other in zip(runs[0], run, strict=True))


@pytest.mark.parametrize("width", [128, 256])
def test_tiles_for_wide_heads_and_small_shared_memory(
    width: int, cuda: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eagle3.draft.kernels import tiles

    monkeypatch.setattr(tiles, "_shared_memory", lambda device: 100 << 10)
    assert tiles.tile("sources", width, torch.device("cuda")) == tiles._FRUGAL["sources"]
    assert_attention_is_near((8, 2, width), cuda)
