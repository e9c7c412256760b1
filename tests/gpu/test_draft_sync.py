"""The training step never makes the CPU wait for the GPU."""

from __future__ import annotations

import pytest
import torch

from eagle3.draft.config import TTTSettings
from eagle3.draft.ttt import TTTLoss, count_terms
from tests.unit.draft.cases import make_batch, make_document, make_head, make_model, make_vocab

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("rule", ["served", "shifted"])
def test_forward_and_backward_do_not_synchronise(rule: str) -> None:
    settings = TTTSettings(3, 0.8, rule)
    batch = make_batch([[make_document([0, 1, 1, 1, 1]), make_document([1, 1, 1])], [make_document([0, 1, 1, 0])]])
    head = make_head().to("cuda")
    module = TTTLoss(make_model().cuda(), make_vocab().to("cuda"), settings)
    moved = batch.to("cuda")
    counts = count_terms(moved, head, module.vocab, settings)
    module(moved, counts, counts.in_vocab).loss.backward()  # warms up what allocates or synchronises once
    torch.cuda.set_sync_debug_mode("error")
    try:
        output = module(moved, counts, counts.in_vocab)
        output.loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert output.loss.isfinite()
