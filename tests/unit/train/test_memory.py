"""What several micro-batches, DDP and AdamW add, against the storages that they make."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from eagle3.config import OptimSection
from eagle3.draft.batch import DraftBatch
from eagle3.draft.config import TTTSettings
from eagle3.draft.fused.memory import Sizes, Types
from eagle3.draft.loss import TargetHead
from eagle3.draft.model import DraftModel
from eagle3.draft.ttt import TTTLoss, unroll
from eagle3.draft.vocab import DraftVocab
from eagle3.train.memory import Place, Run, moment_bytes, run_ledger, unrolled_bytes
from eagle3.train.optim import make_optimizer
from eagle3.train.window import accumulate_window
from tests.unit.draft.cases import make_batch, make_config, make_document
from tests.unit.draft.storages import StorageCount
from tests.unit.draft.test_memory import KIMI, meta_batch, plan_of, tensors_of

LARGE = make_config(
    hidden_size=256, target_hidden_size=256, intermediate_size=4096, head_dim=64, vocab_size=600, draft_vocab_size=512
)
"""Weights that weigh more than anything that a few tokens need."""
NOTHING = Sizes(0, 0, 0, 0, [])


def make_module() -> TTTLoss:
    model = DraftModel(LARGE)
    model.init_weights(0)
    return TTTLoss(model, DraftVocab(torch.arange(512), 600), TTTSettings(2, chunk=8))


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("ddp", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gradients_exist_as_often_as_the_ledger_says(ddp: bool, micro_batches: int, one_process: None) -> None:
    module, batch, count = make_module(), make_one_row([0, 0, 1, 1, 1, 1]), StorageCount()
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), num_processes=1, autocast=nullcontext, reduce=lambda value, reduction: value,
        no_sync=lambda model: model.no_sync() if ddp else nullcontext(), backward=lambda loss: loss.backward(),
    )  # fmt: skip
    head = TargetHead(torch.randn(600, 256), torch.ones(256), 1e-5, "post_norm")
    given = [*module.parameters(), *module.buffers(), head.lm_head, head.norm_weight, *vars(batch).values()]
    count.know([value for value in given if isinstance(value, torch.Tensor)])
    with count:
        model = DistributedDataParallel(module, gradient_as_bucket_view=True) if ddp else module
        for _ in range(2):  # DDP makes its buckets anew after the first step
            module.zero_grad()
            count.peak = count.alive
            accumulate_window(model, module, [batch] * micro_batches, head, accelerator)  # type: ignore[arg-type]
    run = Run(LARGE, module.ttt, Types(), processes=2 if ddp else 1)
    ledger = run_ledger(run, NOTHING, Place(micro_batches, NOTHING))
    gradients = sum(e.size for e in ledger.entries if e.group == "gradients" and "sums" in e.phases)
    gradients -= next(e.size for e in ledger.entries if e.name == "parts of the norms' gradients")
    attention = module.model.midlayer.self_attn
    copies = sum(part.weight.nbytes for part in (attention.q_proj, attention.k_proj, attention.v_proj))
    assert count.peak == pytest.approx(gradients + copies, rel=0.05)
    kept = sum(e.size for e in ledger.entries if e.group == "gradients" and "update" in e.phases)
    assert count.alive == pytest.approx(kept, rel=0.02)


@pytest.mark.parametrize(("documents", "fraction"), [(2, 0.4), (2, 1.0), (8, 0.4)])
def test_an_evaluation_takes_about_what_is_said(documents: int, fraction: float) -> None:
    """Its bfloat16 code without numbers; autocast's casts of activations come on top, and are not many."""
    tokens = 8192
    plan, supervised = plan_of(tokens, documents, fraction)
    batch, count = meta_batch(KIMI, Types(), tokens, supervised), StorageCount()
    with torch.device("meta"):
        model = DraftModel(KIMI).bfloat16()
    count.know([*model.parameters(), *tensors_of(batch)])
    with torch.no_grad(), count:
        for output in islice(unroll(model, batch, plan.to(torch.device("meta"))), 3):
            model.logits(output).argmax(-1)
    said = unrolled_bytes(
        Run(KIMI, TTTSettings(), Types()), [(tokens // documents, supervised // documents)] * documents
    )
    found = count.peak + batch.aux.nbytes
    assert found < said < (1.35 if documents == 2 else 2) * found


def test_moments_are_as_large_as_the_table_says() -> None:
    module = make_module()
    optimizer = make_optimizer(module.model, OptimSection(), fused=False)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    found = sum(state[name].nbytes for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq"))
    assert moment_bytes(LARGE.parameter_counts()["trainable"], "float32") == found


def make_one_row(mask: list[int]) -> DraftBatch:
    batch = make_batch([[make_document(mask)]])
    return replace(batch, aux=torch.randn(1, len(mask), 3 * 256), last_hidden=torch.randn(sum(mask), 256))
