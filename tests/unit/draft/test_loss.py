"""Active terms at the edges, the teacher's greedy token, and the soft cross-entropy's own gradient."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from eagle3.draft.config import Objective
from eagle3.draft.loss import active_terms, read_teacher, rms_norm, row_losses

from .cases import make_head


def terms(mask: list[int], documents: list[int], steps: int, rule: str = "served") -> list[list[int]]:
    active = active_terms(torch.tensor([mask], dtype=torch.bool), torch.tensor([documents]), steps, rule)
    return [row.nonzero().flatten().tolist() for row in active[:, 0]]


@pytest.mark.parametrize(
    ("mask", "documents", "served", "shifted"),
    [
        # ids 0..9, answer 4..7
        ([0, 0, 0, 0, 1, 1, 1, 1, 0, 0], [0] * 10, [[3, 4, 5], [3, 4], [3]], [[3, 4, 5], [2, 3, 4], [1, 2, 3]]),
        # the answer starts its document: nothing precedes it, so its first chain starts at its own first token
        ([0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [[2, 3], [2], []], [[2, 3], [2], []]),
        # one supervised run over two documents is two answers
        ([0, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1], [[0, 3], [], []], [[0, 3], [], []]),
        # supervised padding never counts
        ([0, 1, 1, 1, 1, 1], [0, 0, 0, 0, -1, -1], [[0, 1], [0], []], [[0, 1], [0], []]),
        # answers of one token have no term: the token after the first is not in the answer
        ([0, 1, 0, 1, 0], [0] * 5, [[], [], []], [[], [], []]),
        # a user turn between two answers ends every served chain; shifted ones run through it
        ([0, 1, 1, 0, 1, 1], [0] * 6, [[0, 3], [], []], [[0, 3], [2], [1]]),
        ([1], [0], [[], [], []], [[], [], []]),
    ],
)
def test_active_terms_by_hand(
    mask: list[int], documents: list[int], served: list[list[int]], shifted: list[list[int]]
) -> None:
    assert terms(mask, documents, 3) == served
    assert terms(mask, documents, 3, "shifted") == shifted


def test_active_terms_leave_their_arguments_alone_and_rows_apart() -> None:
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]], dtype=torch.bool)
    documents = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 0]])
    kept = mask.clone(), documents.clone()
    active = active_terms(mask, documents, 2, "served")
    assert active.int().tolist() == [[[1, 1, 0, 0], [1, 1, 0, 0]], [[1, 0, 0, 0], [1, 0, 0, 0]]]
    assert torch.equal(mask, kept[0]) and torch.equal(documents, kept[1])


def test_soft_cross_entropy_and_its_gradient_equal_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, teacher = (torch.randn(5, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    weights = torch.rand(5, generator=generator, dtype=torch.float64)
    mine, theirs = (logits.clone().requires_grad_() for _ in range(2))
    ours = row_losses(mine, teacher, Objective())
    expected = F.cross_entropy(theirs, teacher.softmax(-1), reduction="none")
    torch.testing.assert_close(ours, expected)
    (ours * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad)


def test_bf16_logits_are_normalised_in_float32() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).mul(5).bfloat16().requires_grad_()
    losses = row_losses(logits, logits.detach(), Objective())
    wide = logits.detach().float()
    torch.testing.assert_close(losses, -(wide.softmax(-1) * wide.log_softmax(-1)).sum(-1))
    losses.sum().backward()
    assert logits.grad is not None and logits.grad.abs().max() < 1e-7, "a draft equal to its teacher has no slope"


def test_rms_norm_of_bf16_is_computed_in_float32() -> None:
    x = torch.randn(4, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = torch.rand(512)
    wide = x.float()
    expected = (wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight).bfloat16()
    result = rms_norm(x, weight, 1e-6)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result, expected, rtol=0.008, atol=0)  # one unit in the last place
    assert (result == expected).float().mean() > 0.999


def test_teacher_is_the_heads_greedy_token_and_its_logits_on_the_draft_vocab(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("eagle3.draft.loss.TEACHER_ROWS", 3)
    head = make_head("pre_norm")
    last = torch.randn(7, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = rms_norm(last, head.norm_weight, head.eps) @ head.lm_head.T
    ids = torch.tensor([1, 5, 20])
    greedy, chosen = read_teacher(head, last, ids)
    assert torch.equal(greedy, expected.argmax(-1))
    torch.testing.assert_close(chosen, expected[:, ids], rtol=1e-12, atol=1e-12)
    greedy, chosen = read_teacher(head, last[:0], ids)
    assert greedy.shape == (0,) and chosen.shape == (0, 3)
