"""Every loss, by autograd and fused, against the plain reference, by finite differences, and at the edges."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch

from eagle3.draft.config import LossKind, Objective, TTTSettings
from eagle3.draft.fused import plain
from eagle3.draft.loss import row_losses
from eagle3.draft.objective import keep_greatest
from eagle3.draft.reference import draft_logits, term_loss
from eagle3.errors import ProblemsError

from .cases import gradients, make_batch, make_config, make_head, make_model, make_vocab, random_documents, run_loss
from .test_fused import assert_equal
from .test_reference import naive_terms

KINDS: tuple[LossKind, ...] = get_args(LossKind)
TOP = [None, 3]


def randn(*shape: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("top", [None, 1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_have_the_references_loss_and_slope_and_finite_differences(kind: LossKind, top: int | None) -> None:
    logits, teacher, scales = randn(9, 12), randn(5, 12, seed=1), randn(9, seed=2).abs()
    teacher[2, :6] = teacher[2].max()  # more that are equal than the teacher may keep
    rows = torch.tensor([0, 1, 2, 3, 4, 4, 2, 1, 0]).int()
    objective = Objective(kind, 0.7, 1.5)
    mine = logits.clone().requires_grad_()
    expected = torch.stack(
        [term_loss(row, teacher[at], kind, 0.7, 1.5, top) for row, at in zip(mine, rows.tolist(), strict=True)]
    )
    slopes = torch.autograd.grad((expected * scales).sum(), mine)[0]
    kept = teacher.clone() if top is None else keep_greatest(teacher.clone(), top)
    found = logits.clone()
    losses, greedy = plain.row_losses(found, kept, rows, scales, objective)
    assert torch.equal(greedy, logits.argmax(-1))
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, slopes, rtol=1e-11, atol=1e-12)
    by_autograd = row_losses(mine, kept[rows.long()], objective)
    torch.testing.assert_close(
        torch.autograd.grad((by_autograd * scales).sum(), mine)[0], slopes, rtol=1e-11, atol=1e-12
    )
    if kind != "lk_lambda":  # whose share of KL counts as a constant
        moved = [plain.row_losses(logits + by, kept, rows, scales, objective)[0] for by in _one_token(9, 12, 1e-6)]
        differences = (moved[0] - moved[1]) / 2e-6 * scales
        torch.testing.assert_close(differences, slopes[:, 3], rtol=0, atol=1e-7)


def _one_token(rows: int, width: int, by: float) -> tuple[torch.Tensor, torch.Tensor]:
    step = torch.zeros(rows, width, dtype=torch.float64)
    step[:, 3] = by
    return step, -step


@pytest.mark.parametrize("top", TOP)
@pytest.mark.parametrize("kind", KINDS)
def test_a_batchs_loss_and_gradients_equal_naive_autograd(kind: LossKind, top: int | None) -> None:
    settings = TTTSettings(2, 0.8, chunk=3, loss=kind, teacher_top_k=top)
    model, head, vocab = make_model(), make_head(), make_vocab()
    documents = random_documents(4, seed=12, longest=9)
    sums = [torch.zeros((), dtype=torch.float64) for _ in range(2)]
    state = dict(model.named_parameters())
    for document in documents:
        for i, k in naive_terms(document.mask.tolist(), 2, "served"):
            target = head.lm_head @ document.last[i + 1 + k]
            if int(target.argmax()) in vocab.ids.tolist():
                logits = draft_logits(state, model.config, document.aux, document.ids, i, k + 1)[k]
                sums[k] = sums[k] + term_loss(logits, target[vocab.ids], kind, top_k=top)
    naive = sums[0] / 7 + 0.8 * sums[1] / 3
    expected = gradients(model, naive)
    batch = make_batch([documents[:3], documents[3:]], padding=1)
    for chunk in (3, None):
        output = run_loss(model, batch, replace(settings, chunk=chunk), torch.tensor([7, 3]))
        torch.testing.assert_close(output.loss_sums, torch.stack(sums).detach(), rtol=1e-10, atol=0)
        for name, value in gradients(model, output.loss).items():
            torch.testing.assert_close(
                value, expected[name], rtol=0, atol=1e-9, msg=lambda text, name=name: name + text
            )


@pytest.mark.parametrize("top", TOP)
@pytest.mark.parametrize("kind", KINDS[1:])
def test_the_fused_step_equals_autograd_in_random_batches(kind: LossKind, top: int | None) -> None:
    for seed, options in enumerate([{}, {"norm_output": True, "fc_norm": True}]):
        documents = random_documents(5, seed, longest=24)
        batch = make_batch([documents[:3], documents[3:]], padding=seed)
        settings = TTTSettings(3, chunk=2 + 3 * seed, loss=kind, lk_weight=1.0, teacher_top_k=top)
        assert_equal(make_model(make_config(**options), seed), batch, settings)


@pytest.mark.parametrize("kind", KINDS)
def test_in_float8_gradients_are_near_exact_ones(kind: LossKind) -> None:
    batch = make_batch([random_documents(8, 3, longest=40)])
    model = make_model(make_config(head_dim=8, intermediate_size=32, draft_vocab_size=10))
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(0.5 if value.ndim == 2 else 1)
    settings = TTTSettings(3, chunk=40, loss=kind, teacher_top_k=4)
    exact = gradients(model, run_loss(model, batch, settings).loss)
    found = gradients(model, run_loss(model, batch, replace(settings, float8=True)).loss)
    errors = {name: float((found[name] - value).norm() / value.norm()) for name, value in exact.items()}
    assert 0.005 < max(errors.values()) < 0.3, errors


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_equal_to_its_teacher_has_no_slope_and_a_poor_one_a_finite_one(kind: LossKind) -> None:
    logits = torch.stack([randn(8), torch.tensor([900.0] + [0.0] * 7, dtype=torch.float64)]).float()
    teacher = torch.stack([logits[0], torch.tensor([0.0] * 7 + [900.0])])
    losses, _ = plain.row_losses(logits, teacher, torch.tensor([0, 1]).int(), torch.ones(2), Objective(kind))
    assert logits[0].abs().max() < 1e-6 and logits.isfinite().all() and losses.isfinite().all()
    if kind != "cross_entropy":
        assert abs(float(losses[0])) < 1e-6 < float(losses[1])


def test_lk_lambda_without_kl_is_total_variation_and_with_it_alone_kl() -> None:
    logits, teacher, rows, one = randn(6, 12), randn(6, 12, seed=1), torch.arange(6).int(), torch.ones(6)
    apart = (logits.softmax(-1) - teacher.softmax(-1)).abs().sum(-1) / 2
    found = plain.row_losses(logits.clone(), teacher, rows, one, Objective("lk_lambda", 0.0, 0.0))[0]
    torch.testing.assert_close(found, apart)
    mine, kl = logits.clone(), logits.clone()
    both = [
        plain.row_losses(x, teacher, rows, one, Objective(kind, 1.0, 0.0))[0]
        for x, kind in ((mine, "lk_lambda"), (kl, "kl"))
    ]  # type: ignore[arg-type]
    torch.testing.assert_close(both[0], both[1])
    torch.testing.assert_close(mine, kl)


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"loss": "mse"}, r"ttt\.loss is 'mse'"),
        ({"loss": "lk_lambda", "lk_weight": 1.5}, r"ttt\.lk_weight"),
        ({"loss": "lk_lambda", "lk_eta": -1}, r"ttt\.lk_eta"),
        ({"lk_eta": 2.0}, r"reads neither"),
        ({"teacher_top_k": 0}, r"ttt\.teacher_top_k"),
        ({"teacher_top_k": True}, r"ttt\.teacher_top_k"),
    ],
)
def test_wrong_settings_are_refused(values: dict[str, object], found: str) -> None:
    with pytest.raises(ProblemsError, match=found):
        TTTSettings(**values)  # type: ignore[arg-type]
