"""Plans made before a batch's turn, and how they reach a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eagle3.draft import ttt
from eagle3.draft.config import TTTSettings
from eagle3.draft.planned import _pack, _unpack, plan_batch
from eagle3.draft.ttt import TTTLoss, count_terms

from .cases import make_batch, make_document, make_head, make_model, make_vocab, random_documents

SETTINGS = TTTSettings(3, chunk=4)


def test_one_tensor_holds_all_of_a_plan_each_part_at_16_bytes() -> None:
    batch = make_batch([random_documents(5, seed=1, longest=25)])
    parts = plan_batch(batch.loss_mask, batch.document_ids, SETTINGS)._tensors()
    assert {part.dtype for part in parts} == {torch.int64, torch.int32, torch.bool} and len(parts) > 12
    packed = _pack(parts)
    for part, found in zip(parts, _unpack(packed, parts), strict=True):
        assert found.dtype == part.dtype and torch.equal(found, part)
        if part.dtype == torch.int32:  # others are copies
            assert found.storage_offset() % 4 == 0
    assert packed.numel() < sum(part.numel() + 4 for part in parts)


def test_a_planned_batch_is_not_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, head, vocab = make_model(), make_head(), make_vocab()
    batch = make_batch([random_documents(4, seed=2, longest=25)])
    planned = replace(batch, planned=plan_batch(batch.loss_mask, batch.document_ids, SETTINGS))
    module, losses = TTTLoss(model, vocab, SETTINGS), []
    for given in (batch, planned):
        counts = count_terms(given, head, vocab, SETTINGS)
        losses.append(module(given, counts, counts.in_vocab).loss)
        monkeypatch.setattr(ttt, "plan_batch", None)
    assert torch.equal(losses[0], losses[1])


def test_a_batch_without_a_chain_has_no_chunks() -> None:
    batch = make_batch([[make_document([0, 0, 1, 0])]])
    planned = plan_batch(batch.loss_mask, batch.document_ids, SETTINGS)
    assert planned.chunks is None and not planned.active.any()
