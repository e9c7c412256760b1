"""What carries gradient, what must not matter, and batches with nothing to learn."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eagle3.draft.batch import DraftBatch
from eagle3.draft.config import ChainRule, TTTSettings
from eagle3.draft.fused import plain
from eagle3.draft.loss import LastHiddenKind, active_terms, rms_norm, shifted
from eagle3.draft.model import DraftModel
from eagle3.draft.ttt import TTTLoss, TTTOutput, count_terms, draft_matches

from .cases import gradients, make_batch, make_document, make_head, make_model, make_vocab, random_documents, run_loss

ONE_ANSWER = [0, 0, 0, 0, 1, 1, 1, 1, 0, 0]
TWO_ANSWERS = [0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0]
SETTINGS = TTTSettings(3)
BY_AUTOGRAD = TTTSettings(3, chunk=None)
IN_VOCAB, NOT_IN_VOCAB = 3, 1  # target ids, see make_vocab


def run_with_argmax(model: DraftModel, batch: DraftBatch, settings: TTTSettings, target_id: int) -> TTTOutput:
    """The loss as if the target's greedy token were `target_id` everywhere; each term's own slope, undivided."""
    head, vocab = make_head(), make_vocab()
    counts = count_terms(batch, head, vocab, settings)
    known = counts.active if target_id in vocab.ids else torch.zeros_like(counts.active)
    argmax = torch.full_like(counts.target_argmax, target_id)
    counts = replace(counts, target_argmax=argmax, in_vocab=known)
    return TTTLoss(model, vocab, settings)(batch, counts, torch.ones(settings.steps))


def read_places(mask: list[int], padding: int, rule: str) -> list[list[int]]:
    """Per step, the places whose teacher that step's loss depends on."""
    settings, model = TTTSettings(3, 0.8, rule), make_model()
    batch = make_batch([[make_document(mask)]], padding)
    base = run_with_argmax(model, batch, settings, IN_VOCAB).loss_sums
    found: list[list[int]] = [[], [], []]
    for row, place in enumerate(place for place, supervised in enumerate(mask) if supervised):
        last_hidden = batch.last_hidden.clone()
        last_hidden[row] += 1
        output = run_with_argmax(model, replace(batch, last_hidden=last_hidden), settings, IN_VOCAB)
        for k in (output.loss_sums != base).nonzero().flatten().tolist():
            found[k].append(place)
    return found


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize(
    ("mask", "rule", "chains"),
    [
        (ONE_ANSWER, "served", [[3, 4, 5], [3, 4], [3]]),
        (ONE_ANSWER, "shifted", [[3, 4, 5], [2, 3, 4], [1, 2, 3]]),
        (TWO_ANSWERS, "served", [[1, 2, 6, 7, 8], [1, 6, 7], [6]]),
        (TWO_ANSWERS, "shifted", [[1, 2, 6, 7, 8], [0, 1, 5, 6, 7], [0, 4, 5, 6]]),
    ],
)
def test_fault_12_loss_reads_the_teacher_of_exactly_these_chains(
    mask: list[int], rule: str, chains: list[list[int]], padding: int
) -> None:
    assert read_places(mask, padding, rule) == [[i + 1 + k for i in chains[k]] for k in range(3)]


@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize(("mask", "last_chain", "last_read"), [(ONE_ANSWER, 5, 6), (TWO_ANSWERS, 8, 9)])
def test_fault_12_gradient_reaches_states_up_to_the_last_chain_only(
    mask: list[int], last_chain: int, last_read: int, padding: int
) -> None:
    batch = make_batch([[make_document(mask)]], padding)
    batch.aux.requires_grad_()
    model = make_model()
    model.embed_tokens.requires_grad_()
    batch.input_ids[0, : len(mask)] = torch.arange(len(mask))  # every place has an embedding row of its own
    loss = run_with_argmax(model, batch, BY_AUTOGRAD, IN_VOCAB).loss
    states, embeddings = torch.autograd.grad(loss, [batch.aux, model.embed_tokens.weight])
    assert states[0].any(-1).nonzero().flatten().tolist() == list(range(last_chain + 1))
    fused = torch.autograd.grad(run_with_argmax(model, batch, SETTINGS, IN_VOCAB).loss, batch.aux)[0]
    torch.testing.assert_close(fused, states, rtol=0, atol=1e-12)
    assert embeddings.any(-1).nonzero().flatten().tolist() == list(range(1, last_read + 1))


def test_only_chains_with_a_term_left_are_computed() -> None:
    model = make_model()
    rows: dict[str, list[int]] = {"mlp": [], "lm_head": [], "q_proj": [], "k_proj": [], "fc": []}
    for name, module in model.named_modules():
        if name.split(".")[-1] in rows:
            taken = rows[name.split(".")[-1]]
            module.register_forward_hook(lambda _, inputs, output, taken=taken: taken.append(len(output)))
    run_loss(model, make_batch([[make_document(ONE_ANSWER)]], padding=3), BY_AUTOGRAD)
    assert rows == {"mlp": [3, 2, 1], "lm_head": [3, 2, 1], "q_proj": [3, 2, 1], "k_proj": [6, 2, 1], "fc": [6]}


@pytest.mark.parametrize("rule", ["served", "shifted"])
def test_fault_12_padding_and_packing_do_not_change_loss_or_gradients(rule: str) -> None:
    settings, model = TTTSettings(3, 0.8, rule), make_model()
    documents = [make_document(TWO_ANSWERS, 1), make_document([1, 1, 1, 1], 2), make_document(ONE_ANSWER, 3)]
    layouts = {
        "one a row": make_batch([[document] for document in documents]),
        "more padding": make_batch([[document] for document in documents], padding=7),
        "packed": make_batch([documents]),
        "packed otherwise": make_batch([[documents[2]], [documents[1], documents[0]]], padding=1),
    }
    expected = run_loss(model, layouts["one a row"], settings)
    slopes = gradients(model, expected.loss)
    for name, batch in layouts.items():
        output = run_loss(model, batch, settings)
        torch.testing.assert_close(output.loss, expected.loss, rtol=1e-12, atol=0, msg=name)
        assert torch.equal(output.active, expected.active) and torch.equal(output.correct, expected.correct)
        for parameter, value in gradients(model, output.loss).items():
            torch.testing.assert_close(value, slopes[parameter], rtol=0, atol=1e-12, msg=f"{name}: {parameter}")


@pytest.mark.parametrize("mask", [[0] * 6, [0, 0, 1, 0, 1, 0], [0]])
def test_fault_03_batch_with_nothing_to_learn_gives_zero_loss_and_finite_gradients(mask: list[int]) -> None:
    model = make_model()
    output = run_loss(model, make_batch([[make_document(mask)]], padding=2), SETTINGS)
    assert output.loss == 0 and output.active.tolist() == output.correct.tolist() == [0, 0, 0]
    assert output.loss_sums.tolist() == [0, 0, 0]
    assert all(value.isfinite().all() and not value.any() for value in gradients(model, output.loss).values())
    assert not draft_matches(model, make_batch([[make_document(mask)]]), make_vocab(), 3).any()


def test_fault_03_terms_that_are_all_outside_the_draft_vocab_give_zero_loss_and_count_as_misses() -> None:
    model = make_model()
    output = run_with_argmax(model, make_batch([[make_document(ONE_ANSWER)]]), SETTINGS, NOT_IN_VOCAB)
    assert output.loss == 0 and output.active.tolist() == [3, 2, 1] and output.correct.tolist() == [0, 0, 0]
    assert not any(value.any() for value in gradients(model, output.loss).values())


@pytest.mark.parametrize(
    ("rule", "target_id", "correct"),
    [("served", 5, [3, 2, 1]), ("served", 3, [0, 0, 0]), ("shifted", 5, [3, 3, 3])],
)
@pytest.mark.parametrize("chunk", [None, 2])
def test_fault_19_step_accuracy_compares_target_ids_of_active_terms(
    rule: str, target_id: int, correct: list[int], chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = make_model(), make_batch([[make_document(ONE_ANSWER)]])
    winner = torch.nn.functional.one_hot(torch.tensor(3), 10).double()  # draft id 3 is target id 5
    monkeypatch.setattr(model, "logits", lambda output: winner.expand(len(output), 10))
    real = plain.row_losses
    monkeypatch.setattr(plain, "row_losses", lambda logits, *rest: real(winner.expand_as(logits).clone(), *rest))
    output = run_with_argmax(model, batch, TTTSettings(3, 0.8, rule, chunk), target_id)
    assert make_vocab().ids[3] == 5 and output.correct.tolist() == correct


def test_denominators_weigh_steps_and_decay() -> None:
    model, batch = make_model(), make_batch([[make_document(TWO_ANSWERS)]])
    output = run_loss(model, batch, TTTSettings(3, 0.5), torch.tensor([4, 8, 0]))
    sums = output.loss_sums
    torch.testing.assert_close(output.loss.detach(), sums[0] / 4 + 0.5 * sums[1] / 8 + 0.25 * sums[2])


def test_same_loss_from_states_before_the_final_norm() -> None:
    model, vocab = make_model(), make_vocab()
    head = make_head("pre_norm")
    before = make_batch([[make_document(TWO_ANSWERS)]])
    after = replace(before, last_hidden=rms_norm(before.last_hidden, head.norm_weight, head.eps))
    losses = []
    for batch, kind in ((before, "pre_norm"), (after, "post_norm"), (before, "post_norm")):
        own_head = replace(head, kind=kind)
        counts = count_terms(batch, own_head, vocab, SETTINGS)
        losses.append(TTTLoss(model, vocab, SETTINGS)(batch, counts, torch.ones(3)).loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert losses[0] != pytest.approx(losses[2], rel=1e-3)


def test_bf16_autocast_keeps_the_loss_in_float32_and_near_the_exact_one() -> None:
    model, batch = make_model(), make_batch([[make_document(TWO_ANSWERS)]])
    exact = run_loss(model, batch, SETTINGS)
    model.float()
    low = replace(batch, aux=batch.aux.bfloat16(), last_hidden=batch.last_hidden.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        output = run_loss(model, low, SETTINGS)
    assert output.loss.dtype == output.loss_sums.dtype == torch.float32
    assert output.loss.item() == pytest.approx(exact.loss.item(), rel=0.05)
    assert all(
        value.dtype == torch.float32 and value.isfinite().all() for value in gradients(model, output.loss).values()
    )


@pytest.mark.usefixtures("one_process")
def test_ddp_steps_on_a_rank_with_nothing_to_learn() -> None:
    model, head, vocab = make_model(), make_head(), make_vocab()
    wrapped = torch.nn.parallel.DistributedDataParallel(TTTLoss(model, vocab, SETTINGS))
    for mask in (ONE_ANSWER, [0] * 5, ONE_ANSWER):
        batch = make_batch([[make_document(mask)]])
        counts = count_terms(batch, head, vocab, SETTINGS)
        model.zero_grad()
        wrapped(batch, counts, counts.in_vocab).loss.backward()
        slopes = [value.grad for value in model.parameters() if value.requires_grad]
        assert all(slope is not None and slope.isfinite().all() for slope in slopes)
        assert any(slope.any() for slope in slopes) == any(mask)


@pytest.mark.parametrize("rule", ["served", "shifted"])
def test_terms_in_the_draft_vocab_are_counted_at_the_place_of_their_own_teacher(rule: ChainRule) -> None:
    documents = random_documents(8, seed=2, longest=25)
    batch, head, vocab = make_batch([documents[:4], documents[4:]]), make_head(), make_vocab()
    counts = count_terms(batch, head, vocab, TTTSettings(4, 0.8, rule))
    greedy = head.logits(batch.last_rows(torch.arange(batch.input_ids.numel()))).argmax(-1)
    known = (vocab.to_draft(greedy) >= 0).view_as(batch.loss_mask)
    active = active_terms(batch.loss_mask, batch.document_ids, 4, rule)
    expected = [int((term & shifted(known, 1 + k, False)).sum()) for k, term in enumerate(active)]
    assert counts.in_vocab.tolist() == expected and counts.active.tolist() == active.sum((1, 2)).tolist()
    assert 0 < expected[3] < expected[0] < int(active[0].sum())


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("kind", ["post_norm", "pre_norm"])
def test_greedy_tokens_that_the_batch_brings_give_the_same_losses_and_gradients(
    kind: LastHiddenKind, chunk: int | None
) -> None:
    documents = random_documents(6, seed=3)
    batch, head, vocab = make_batch([documents[:3], documents[3:]], padding=2), make_head(kind), make_vocab()
    brought = replace(batch, target_argmax=head.logits(batch.last_hidden).argmax(-1))
    settings, outputs, slopes = TTTSettings(3, 0.8, "served", chunk), [], []
    for given, rows in ((batch, head), (brought, head), (brought, head.only(vocab.ids))):
        model = make_model()
        counts = count_terms(given, rows, vocab, settings)
        outputs.append(TTTLoss(model, vocab, settings)(given, counts, counts.in_vocab))
        slopes.append(gradients(model, outputs[-1].loss))
    assert 0 < outputs[0].in_vocab[0] < outputs[0].active[0]
    for output, slope in zip(outputs[1:], slopes[1:], strict=True):
        torch.testing.assert_close(output.loss, outputs[0].loss, rtol=1e-12, atol=0)
        assert torch.equal(output.in_vocab, outputs[0].in_vocab) and torch.equal(output.correct, outputs[0].correct)
        for name, value in slope.items():
            torch.testing.assert_close(value, slopes[0][name], rtol=1e-9, atol=1e-12)


def test_a_head_of_the_draft_vocab_alone_needs_greedy_tokens() -> None:
    batch, vocab = make_batch([random_documents(2, seed=4)]), make_vocab()
    with pytest.raises(AssertionError, match="all of the target's head"):
        count_terms(batch, make_head().only(vocab.ids), vocab, TTTSettings(3))
