"""The memory ledger: against peaks measured on a GPU, and against the storages that the step's own code makes."""

from __future__ import annotations

import ast
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from eagle3.draft.batch import DraftBatch
from eagle3.draft.chains import ChainPlan, plan_chains
from eagle3.draft.config import DraftConfig, Objective, RopeConfig, TTTSettings
from eagle3.draft.fused import chunk, function, linear, memory, products, weights
from eagle3.draft.fused.layout import Chunk, make_chunks
from eagle3.draft.fused.ledger import PHASES, Phase
from eagle3.draft.fused.memory import Sizes, Types, step_ledger
from eagle3.draft.loss import TargetHead, read_teacher
from eagle3.draft.model import DraftModel
from eagle3.draft.ttt import TTTLoss
from eagle3.draft.vocab import DraftVocab

from .meta_ops import Ops
from .storages import StorageCount, autocast_on_meta

KERNELS = Path(function.__file__).parents[1] / "kernels"
GIB = 2**30
KIMI = DraftConfig(
    hidden_size=7168, intermediate_size=40960, num_attention_heads=56, num_key_value_heads=8, head_dim=128,
    vocab_size=163840, draft_vocab_size=32000, num_aux=3, target_hidden_size=7168, rms_norm_eps=1e-5,
    max_position_embeddings=131072, rope=RopeConfig(rope_theta=50000.0),
)  # fmt: skip
BF16, MIXED = Types(2, 2), Types(4, 2)
FLOAT8, MIXED_FLOAT8 = (replace(types, float8=True) for types in (BF16, MIXED))
WIDTHS = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32}


def plan_of(tokens: int, documents: int, fraction: float, answer: int = 250) -> tuple[ChainPlan, int]:
    """Documents of answers of about 250 tokens behind prompts that make them this share; the supervised tokens."""
    place, length = torch.arange(tokens), tokens // documents
    round_ = length / max(round(length * fraction / answer), 1)
    mask = (place % length) % round_ >= round_ * (1 - fraction)
    return plan_chains(mask[None], (place // length)[None], 7, "served"), int(mask.sum())


# benchmarks/train_step.py on an H200: tokens, documents, share supervised, peak GiB
@pytest.mark.parametrize(
    ("types", "tokens", "documents", "fraction", "measured"),
    [
        (BF16, 4096, 1, 1.0, 15.07),
        (BF16, 4096, 1, 0.379, 13.31),
        (BF16, 4096, 1, 0.081, 9.71),
        (BF16, 16384, 4, 1.0, 18.46),
        (MIXED, 4096, 1, 1.0, 23.48),
        (FLOAT8, 4096, 1, 1.0, 18.98),
        (FLOAT8, 4096, 1, 0.397, 16.68),
    ],
)
def test_peaks_are_those_measured_for_kimis_drafter(
    types: Types, tokens: int, documents: int, fraction: float, measured: float
) -> None:
    plan, supervised = plan_of(tokens, documents, fraction)
    ledger = step_ledger(KIMI, replace(types, argmax=True), Sizes.of(plan, tokens, supervised, 2304))
    assert ledger.peak / GIB == pytest.approx(measured, rel=0.02)


def product_on_a_gpu(total: torch.Tensor, grad: torch.Tensor, rows: torch.Tensor, more: bool) -> None:
    """`gemm.sum_up` by its branch for a GPU, without the numbers."""
    if total.dtype != grad.dtype:
        found = total.new_empty(total.shape)
        total.copy_(found)


@pytest.fixture
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device has a GPU's operations, under autocast."""
    autocast_on_meta(monkeypatch)
    for module in (function, linear):
        monkeypatch.setattr(module, "choose_ops", lambda like: Ops())


def run_on_meta(
    monkeypatch: pytest.MonkeyPatch, config: DraftConfig, plan: ChainPlan, most: int, types: Types
) -> tuple[dict[Phase, int], StorageCount]:
    """Most bytes that the fused step's own code has in each of its phases, beside weights and inputs."""
    for module in (products, weights):
        monkeypatch.setattr(module, "sum_up", product_on_a_gpu)
    count, peaks = StorageCount(), dict[Phase, int]()

    def ends(phase: Phase) -> None:
        peaks[phase], count.peak = max(peaks.get(phase, 0), count.peak), count.alive

    def watch(owner: type, name: str, before: Phase | None, after: Phase) -> None:
        original = getattr(owner, name)

        def watched(*args, **kwargs):  # type: ignore[no-untyped-def]
            if before:
                ends(before)
            result = original(*args, **kwargs)
            ends(after)
            return result

        monkeypatch.setattr(owner, name, watched)

    watch(function.Step, "__init__", None, "share")
    watch(chunk.ChunkStep, "__init__", "sums", "forward")  # by then the chunk before is gone
    watch(chunk.ChunkStep, "_head", "forward", "head")
    watch(Ops, "attend_grad_sources", "backward", "sums")
    watch(function.Step, "_finish", "sums", "finish")
    with torch.device("meta"):
        model = DraftModel(config).to(WIDTHS[types.weights])
        hidden, embedded = (torch.empty(len(plan.sources), config.hidden_size, dtype=torch.bfloat16) for _ in "ab")
        teacher = torch.empty(len(plan.chains), config.draft_vocab_size, dtype=torch.bfloat16)
        known, scales = torch.empty(len(plan.chains), dtype=torch.bool), torch.empty(len(plan.active))
    chunks = [
        replace(part, **{f.name: getattr(part, f.name).to("meta") for f in fields(Chunk) if f.name != "counts"})
        for part in make_chunks(plan, most)
    ]
    sources, chains = plan.sources.to("meta"), plan.chains.to("meta")
    hidden.requires_grad_()
    count.know([*model.parameters(), hidden, embedded, teacher])
    with count:
        kept = weights.KeptWeights(types.float8)
        terms = function.fused_terms(
            model, hidden, embedded, sources, chains, chunks, teacher, known, scales, kept, Objective()
        )
        terms.loss.backward()
    return peaks, count


def expected(config: DraftConfig, types: Types, sizes: Sizes) -> dict[Phase, int]:
    """The ledger without what `run_on_meta` does not make."""
    given = {"trained weights", "frozen embedding", "target's head", "fc's copy", "fc's gradient"}
    given |= {"cuBLAS", "aux and last states", "ids, positions, loss mask", "the target's logits on the draft vocab"}
    given |= {"aux states of the sources", "step 0's states, the tokens' embeddings"}
    entries = [entry for entry in step_ledger(config, types, sizes).entries if entry.name not in given]
    return {phase: sum(entry.size for entry in entries if phase in entry.phases) for phase in PHASES}


@pytest.mark.parametrize("norm_output", [False, True])
@pytest.mark.parametrize(
    ("tokens", "documents", "fraction", "most"),
    # the last two: the head in two and in four pieces
    [(4096, 1, 0.38, 2304), (16384, 4, 1.0, 2304), (4096, 1, 1.0, 4096), (8192, 1, 1.0, 8192)],
)
@pytest.mark.parametrize("types", [BF16, MIXED, FLOAT8, MIXED_FLOAT8])
@pytest.mark.usefixtures("like_a_gpu")
def test_the_steps_own_code_has_the_ledgers_bytes_alive_in_each_phase(
    monkeypatch: pytest.MonkeyPatch, types: Types, tokens: int, documents: int, fraction: float, most: int,
    norm_output: bool,
) -> None:  # fmt: skip
    config = replace(KIMI, norm_output=norm_output)
    plan, supervised = plan_of(tokens, documents, fraction)
    peaks, count = run_on_meta(monkeypatch, config, plan, most, types)
    ledger = expected(config, types, Sizes.of(plan, tokens, supervised, most))
    for phase in ("share", "forward", "head", "backward", "sums", "finish"):
        assert peaks[phase] == pytest.approx(ledger[phase], rel=0.002), phase
    assert count.alive < 0.001 * count.peak, "nothing is left behind"


@pytest.mark.parametrize("argmax", [False, True])
@pytest.mark.parametrize("types", [BF16, Types(states=1, scaled=True), Types(states=4), Types(head=4)])
def test_counting_and_reading_the_teacher_takes_what_the_ledger_says(types: Types, argmax: bool) -> None:
    types = replace(types, argmax=argmax)
    plan, supervised = plan_of(4096, 1, 0.5)
    batch = meta_batch(KIMI, types, 4096, supervised)
    places, count = plan.teacher_places.to("meta"), StorageCount()
    rows = KIMI.draft_vocab_size if argmax else KIMI.vocab_size
    head = torch.empty(rows, KIMI.hidden_size, dtype=WIDTHS[types.head], device="meta")
    ids = torch.empty(KIMI.draft_vocab_size, dtype=torch.int64, device="meta")
    count.know([head, ids, *tensors_of(batch)])
    with count:
        if types.head == 4:  # which autocast would cast, for each piece
            head = head.bfloat16()
        target = TargetHead(head, head[0], 1e-5, "post_norm", ids if argmax else None)
        teacher = read_teacher(target, batch.last_rows(places), ids, batch.argmax_rows(places))
    sizes = Sizes.of(plan, 4096, supervised, 2304)
    entries = {entry.name: entry.size for entry in step_ledger(KIMI, types, sizes).entries}
    expected_teacher = entries["the target's logits on the draft vocab"]
    reading = entries["the teacher's reading"] + expected_teacher
    if types.head == 4 and argmax:  # autocast also casts the states, which is not done here
        reading -= len(places) * KIMI.hidden_size * 6
    assert count.peak == pytest.approx(reading, rel=0.05)
    assert sum(part.untyped_storage().nbytes() for part in teacher) == pytest.approx(expected_teacher, rel=0.001)


@pytest.mark.parametrize("names", [(), ("fc_norm",), ("norm_before_fc",), ("fc_norm", "norm_before_fc")])
@pytest.mark.parametrize("types", [BF16, Types(2, 2, states=1, scaled=True), Types(2, 2, states=4), FLOAT8])
@pytest.mark.usefixtures("like_a_gpu")
def test_fusing_the_layers_takes_what_the_ledger_says(types: Types, names: tuple[str, ...]) -> None:
    config = replace(KIMI, **dict.fromkeys(names, True))  # type: ignore[arg-type]
    plan, supervised = plan_of(4096, 1, 0.5)
    batch = meta_batch(config, types, 4096, supervised)
    with torch.device("meta"):
        model = DraftModel(config).bfloat16()
        vocab = DraftVocab(torch.arange(config.draft_vocab_size, device="cpu"), config.vocab_size)
    module = TTTLoss(model, vocab, TTTSettings(float8=types.float8))
    sources, count = plan.sources.to("meta"), StorageCount()
    count.know([*model.parameters(), *tensors_of(batch)])
    with count:
        hidden = module._fuse(batch.aux_rows(sources))
        kept, peak = count.alive, count.peak
        grad = torch.empty_like(hidden)
        count.peak = count.alive
        hidden.backward(grad)
    entries = step_ledger(config, types, Sizes.of(plan, 4096, supervised, 2304)).entries
    sizes = {entry.name: entry.size for entry in entries if {"fuse", "autograd"} & set(entry.phases)}
    state = sizes["step 0's states, the tokens' embeddings"] // 2
    found = sizes["aux states of the sources"] + sizes.get("what fc_norm and norm_before_fc keep", 0)
    assert kept == pytest.approx(found + state, rel=0.02)
    expected_peak = found + state + sizes["reading and casting states"]
    assert peak <= expected_peak
    assert names or peak > 0.85 * expected_peak
    backward = [sizes["fc's gradient"], sizes.get("fc's rows in float8", 0)]
    backward += [sizes.get("backward through fc_norm and norm_before_fc", 0)]
    assert count.peak - kept - state <= 1.001 * sum(backward)
    assert count.peak - kept - state > (0.4 if names else 0.999) * sum(backward)


def meta_batch(config: DraftConfig, types: Types, tokens: int, supervised: int) -> DraftBatch:
    """One row on the meta device."""
    width, states = config.target_hidden_size, WIDTHS[types.states]
    with torch.device("meta"):
        ids = torch.empty(1, tokens, dtype=torch.int64)
        return DraftBatch(
            input_ids=ids, loss_mask=ids.bool(), aux=torch.empty(1, tokens, config.num_aux * width, dtype=states),
            last_hidden=torch.empty(supervised, width, dtype=states), document_ids=ids, position_ids=ids,
            sample_ids=[], aux_scales=torch.empty(1, tokens, config.num_aux) if types.scaled else None,
            last_scales=torch.empty(supervised) if types.scaled else None,
            target_argmax=torch.empty(supervised, dtype=torch.int64) if types.argmax else None,
        )  # fmt: skip


def tensors_of(batch: DraftBatch) -> list[torch.Tensor]:
    return [value for value in vars(batch).values() if isinstance(value, torch.Tensor)]


def test_a_bound_holds_for_any_mask() -> None:
    generator = torch.Generator().manual_seed(0)
    for rule in ("served", "shifted"):
        for _ in range(50):
            tokens = int(torch.randint(5, 400, (1,), generator=generator))
            mask = torch.rand(1, tokens, generator=generator) < torch.rand(1, generator=generator)
            plan = plan_chains(mask, torch.zeros(1, tokens, dtype=torch.int64), 4, rule)
            ttt, supervised = TTTSettings(4, 0.8, rule, 50), int(mask.sum())
            for types in (MIXED, MIXED_FLOAT8):
                found = step_ledger(KIMI, types, Sizes.of(plan, tokens, supervised, 50))
                bound = step_ledger(KIMI, types, Sizes.at_most(tokens, supervised, ttt))
                assert all(found.at(phase) <= bound.at(phase) for phase in PHASES)


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [("attention_grad.py", "_PROGRAMS", memory._PROGRAMS), ("norm.py", "PROGRAMS", memory._NORM_PROGRAMS)],
)
def test_the_kernels_have_as_many_programs_as_the_ledger_says(file: str, name: str, value: int) -> None:
    """Read, since the kernels import Triton."""
    tree = ast.parse((KERNELS / file).read_text(encoding="utf-8"))
    assigned = [(target, node.value) for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    found = {target.id: of for target, of in assigned if isinstance(target, ast.Name)}
    assert ast.literal_eval(found[name]) == value
