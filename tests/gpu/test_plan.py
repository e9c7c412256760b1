"""What `eagle3 train --plan` reckons against what a GPU was asked for, the optimiser's steps included."""

from __future__ import annotations

import gc

import pytest
import torch

from eagle3.config import MomentKind, OptimSection
from eagle3.draft.batch import DraftBatch
from eagle3.draft.chains import plan_chains
from eagle3.draft.config import DraftConfig, RopeConfig, TTTSettings
from eagle3.draft.fused.memory import Sizes, Types
from eagle3.draft.loss import TargetHead
from eagle3.draft.model import DraftModel
from eagle3.draft.ttt import TTTLoss
from eagle3.draft.vocab import DraftVocab
from eagle3.train.engine import make_accelerator
from eagle3.train.memory import Place, Run, run_ledger
from eagle3.train.optim import make_optimizer
from eagle3.train.window import accumulate_window

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

HIDDEN, VOCAB, DRAFT, TOKENS = 4096, 64000, 32000, 4096
SHAPE = DraftConfig(
    hidden_size=HIDDEN, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    vocab_size=VOCAB, draft_vocab_size=DRAFT, num_aux=3, target_hidden_size=HIDDEN, rms_norm_eps=1e-5,
    max_position_embeddings=8192, rope=RopeConfig(rope_theta=10000.0),
)  # fmt: skip


def make_batch(seed: int) -> DraftBatch:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(TOKENS) % 400 >= 200
    return DraftBatch(
        input_ids=torch.randint(0, VOCAB, (1, TOKENS), generator=generator),
        loss_mask=mask[None],
        aux=torch.randn(1, TOKENS, 3 * HIDDEN, generator=generator).bfloat16(),
        last_hidden=torch.randn(int(mask.sum()), HIDDEN, generator=generator).bfloat16(),
        document_ids=(torch.arange(TOKENS) // 2048)[None],
        position_ids=(torch.arange(TOKENS) % 2048)[None],
        sample_ids=["random"],
    )


@pytest.mark.parametrize(
    ("moments", "float8", "accumulate"),
    [("float32", False, 1), ("float32", False, 2), ("bfloat16", True, 1), ("float8", True, 2), ("muon", False, 1)],
)
def test_the_plan_is_right_within_five_percent(moments: MomentKind, float8: bool, accumulate: int) -> None:
    gc.collect()  # what the test before held in cycles
    before = torch.cuda.memory_allocated()
    settings = TTTSettings(7, 0.8, float8=float8)
    accelerator = make_accelerator("bf16")
    with torch.device("cuda"):
        module = TTTLoss(DraftModel(SHAPE), DraftVocab(torch.arange(0, VOCAB, 2), VOCAB), settings)
        head = TargetHead(torch.randn(VOCAB, HIDDEN).bfloat16(), torch.ones(HIDDEN), 1e-5, "post_norm")
    optim = OptimSection(name="muon") if moments == "muon" else OptimSection(moments=moments)
    optimizer = make_optimizer(module.model, optim, fused=True)
    model, optimizer = accelerator.prepare(module, optimizer)
    batches = [make_batch(seed) for seed in range(accumulate)]
    parameters = [value for value in model.parameters() if value.requires_grad]
    for step in range(3):
        if step == 2:
            torch.cuda.reset_peak_memory_stats()
        accumulate_window(model, module, batches, head, accelerator, lambda: None)
        accelerator.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    batch = batches[0]
    plan = plan_chains(batch.loss_mask, batch.document_ids, settings.steps, settings.chain_rule)
    assert settings.chunk is not None
    sizes = Sizes.of(plan, TOKENS, int(batch.loss_mask.sum()), settings.chunk)
    others = Sizes(0, 0, 0, 0, []) if accumulate == 1 else sizes
    run = Run(SHAPE, settings, Types(float8=float8), moments=moments)
    planned = run_ledger(run, sizes, Place(accumulate, others)).peak
    found = torch.cuda.max_memory_allocated() - before
    assert abs(planned / found - 1) < 0.05, (planned, found)
