"""The fused step against the same step by autograd, which `test_reference.py` holds against plain serving."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eagle3.draft.batch import DraftBatch
from eagle3.draft.chains import plan_chains
from eagle3.draft.config import ChainRule, TTTSettings
from eagle3.draft.fused.layout import KEY_BLOCK, QUERY_BLOCK, make_chunks
from eagle3.draft.model import DraftModel
from eagle3.draft.ttt import TTTLoss, count_terms
from eagle3.errors import ProblemsError

from .cases import (
    gradients,
    make_batch,
    make_config,
    make_document,
    make_head,
    make_model,
    make_vocab,
    random_documents,
)
from .cases import run_loss as run

BOUND = 1e-9


def assert_equal(model: DraftModel, batch: DraftBatch, settings: TTTSettings) -> None:
    """Loss, its parts and all gradients, those of a multiple of the loss too."""
    expected, found = run(model, batch, replace(settings, chunk=None)), run(model, batch, settings)
    assert torch.equal(found.correct, expected.correct) and torch.equal(found.in_vocab, expected.in_vocab)
    torch.testing.assert_close(found.loss, expected.loss, rtol=0, atol=BOUND)
    torch.testing.assert_close(found.loss_sums, expected.loss_sums, rtol=BOUND, atol=BOUND)
    slopes = gradients(model, 3 * expected.loss)
    for name, value in gradients(model, 3 * found.loss).items():
        size = 1 + slopes[name].abs().max().item()
        torch.testing.assert_close(value, slopes[name], rtol=0, atol=BOUND * size, msg=name)


@pytest.mark.parametrize("rule", ["served", "shifted"])
@pytest.mark.parametrize("options", [{}, {"norm_output": True}, {"fc_norm": True}, {"norm_before_fc": True}])
def test_random_batches_have_the_loss_and_gradients_of_autograd(options: dict[str, bool], rule: ChainRule) -> None:
    terms = 0
    for seed in range(4):
        documents = random_documents(7, seed, longest=30)
        batch = make_batch([documents[:3], documents[3:]], padding=seed % 3)
        settings = TTTSettings([1, 2, 4, 7][seed % 4], 0.8, rule, chunk=1 + seed)
        model = make_model(make_config(**options), seed)
        assert_equal(model, batch, settings)
        terms += int(run(model, batch, settings).active.sum())
    assert terms > 150


@pytest.mark.parametrize(
    ("fraction", "answer"), [(0.02, 12), (0.02, 1), (0.1, 3), (0.4, 100), (0.4, 2), (1.0, 1000), (0.9, 700)]
)
def test_long_documents_whatever_share_of_them_is_supervised(fraction: float, answer: int) -> None:
    length = 1000
    mask = [
        int(place % max(round(answer / fraction), answer) >= round(answer / fraction) - answer)
        for place in range(length)
    ]
    batch = make_batch([[make_document(mask, 1), make_document([0, 1, 1, 1, 1, 0], 2)]])
    assert_equal(make_model(), batch, TTTSettings(4, 0.8, "served", chunk=400))


@pytest.mark.parametrize("chunk", [1, 2, 5, 1000])
def test_the_size_of_chunks_does_not_matter(chunk: int) -> None:
    documents = random_documents(5, seed=3, longest=25)
    assert_equal(make_model(), make_batch([documents]), TTTSettings(5, chunk=chunk))


def test_nothing_left_out_is_read() -> None:
    mask = [0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 0, 0]
    batch = make_batch([[make_document(mask)]], padding=4)
    expected = run(make_model(), batch, TTTSettings(3, chunk=2)).loss
    batch.aux[0, 5:] = torch.nan
    batch.input_ids[0, 6:] = 0
    assert torch.equal(run(make_model(), batch, TTTSettings(3, chunk=2)).loss, expected)


def test_without_gradients_only_the_loss_is_computed() -> None:
    model, batch = make_model(), make_batch([random_documents(5, seed=1, longest=25)])
    expected = run(model, batch, TTTSettings(3, chunk=4))
    with torch.no_grad():
        found = run(model, batch, TTTSettings(3, chunk=4))
    assert torch.equal(found.loss, expected.loss.detach()) and not found.loss.requires_grad


def test_two_batches_add_up_their_gradients() -> None:
    model, settings = make_model(), TTTSettings(3, chunk=4)
    first, second = (make_batch([random_documents(4, seed, longest=20)]) for seed in (1, 2))
    slopes = [gradients(model, run(model, batch, settings).loss) for batch in (first, second)]
    for batch in (first, second):
        run(model, batch, settings).loss.backward()
    for name, value in model.named_parameters():
        if value.requires_grad:
            torch.testing.assert_close(value.grad, slopes[0][name] + slopes[1][name], rtol=1e-12, atol=1e-12)


def test_chunks_hold_every_chain_once_in_the_order_in_which_they_end() -> None:
    documents = random_documents(9, seed=4, longest=60)
    batch = make_batch([documents[:4], documents[4:]])
    plan = plan_chains(batch.loss_mask, batch.document_ids, 5, "served")
    chunks = make_chunks(plan, 13)
    ranks = torch.cat([chunk.ranks for chunk in chunks])
    assert ranks.sort().values.tolist() == list(range(len(plan.chains)))
    for chunk in chunks:
        assert len(chunk.ranks) <= 13 and chunk.counts == sorted(chunk.counts, reverse=True)
        lives = plan.lives[chunk.ranks.long()].tolist()
        assert lives == sorted(lives, reverse=True)
        for k, (begin, count) in enumerate(zip(chunk.offsets, chunk.counts, strict=False)):
            at = slice(begin, begin + count)
            assert (plan.lives[chunk.ranks[:count].long()] > k).all()
            assert torch.equal(chunk.ends[at].long(), plan.chains[chunk.ranks[:count].long()])
            assert torch.equal(chunk.teachers[at], chunk.ranks[:count] + k)
            assert torch.equal(chunk.active[at], plan.active[k, chunk.ranks[:count].long()])


def test_readers_are_the_blocks_of_rows_that_attend_to_a_block_of_sources() -> None:
    documents = [make_document([0] * 90 + [1] * 300, 1), make_document([1] * 200, 2)]
    batch = make_batch([documents])
    plan = plan_chains(batch.loss_mask, batch.document_ids, 3, "served")
    for chunk in make_chunks(plan, 350):
        for block in range(-(-len(plan.sources) // KEY_BLOCK)):
            keys = torch.arange(block * KEY_BLOCK, (block + 1) * KEY_BLOCK)
            sees = (chunk.begins[:, None] <= keys) & (chunk.ends[:, None] >= keys)
            rows = sees.split(QUERY_BLOCK)
            full = [i for i, part in enumerate(rows) if part.all() and len(part) == QUERY_BLOCK]
            some = [i for i, part in enumerate(rows) if part.any() and i not in full]
            starts = chunk.reader_starts[2 * block : 2 * block + 3].tolist()
            assert chunk.readers[starts[0] : starts[1]].tolist() == full
            assert chunk.readers[starts[1] : starts[2]].tolist() == some


@pytest.mark.parametrize("chunk", [0, -1, 2.5, "8", True])
def test_a_wrong_chunk_is_refused(chunk: object) -> None:
    with pytest.raises(ProblemsError, match=r"ttt\.chunk"):
        TTTSettings(chunk=chunk)  # type: ignore[arg-type]


def test_in_bf16_it_is_as_near_to_the_exact_gradients_as_autograd() -> None:
    documents = [make_document([0] * 5 + [1] * 60, 1), make_document([0, 1, 1, 1, 1, 1, 1, 0], 2)]
    model, batch = make_model(), make_batch([documents])
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(0.5 if value.ndim == 2 else 1)
    settings = TTTSettings(4, chunk=40)
    slopes = gradients(model, run(model, batch, settings).loss)
    counts = count_terms(batch, make_head(), make_vocab(), settings)
    counts = replace(counts, teacher=counts.teacher.bfloat16())
    low = replace(batch, aux=batch.aux.bfloat16(), last_hidden=batch.last_hidden.bfloat16())
    model.bfloat16()
    errors = []
    for chunks in (counts.chunks, None):
        module = TTTLoss(model, make_vocab(), settings)
        found = gradients(model, module(low, replace(counts, chunks=chunks), counts.in_vocab).loss)
        parts = [(value.double() - slopes[name]).norm() / slopes[name].norm() for name, value in found.items()]
        errors.append(torch.stack(parts).mean().item())
    assert 0.001 < errors[0] < 1.1 * errors[1], errors
