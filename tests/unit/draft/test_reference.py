"""The unrolled training step against the slow one-token-at-a-time reference, in float64."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from eagle3.draft import reference
from eagle3.draft.chains import plan_chains
from eagle3.draft.config import RopeConfig, TTTSettings
from eagle3.draft.reference import draft_logits
from eagle3.draft.ttt import draft_matches, unroll

from .cases import (
    Document,
    gradients,
    make_batch,
    make_config,
    make_document,
    make_head,
    make_model,
    make_vocab,
    random_documents,
    run_loss,
)

LLAMA3 = RopeConfig("llama3", 100.0, 4.0, 1.0, 4.0, 32)


def located(batch_rows: list[list[Document]], width: int) -> dict[int, tuple[Document, int]]:
    """Flat place -> (its document, its position there)."""
    places = {}
    for row, documents in enumerate(batch_rows):
        begin = row * width
        for document in documents:
            places |= {begin + t: (document, t) for t in range(len(document.ids))}
            begin += len(document.ids)
    return places


@pytest.mark.parametrize(
    ("seed", "rule", "overrides"),
    [
        (0, "served", {}),
        (1, "shifted", {}),
        (2, "served", {"norm_output": True}),
        (3, "served", {"rope": RopeConfig("linear", 100.0, factor=3.0), "num_key_value_heads": 4}),
        (4, "shifted", {"rope": LLAMA3, "num_key_value_heads": 1, "head_dim": 4}),
        (5, "served", {"fc_norm": True}),
        (6, "shifted", {"norm_before_fc": True}),
        (7, "served", {"fc_norm": True, "norm_before_fc": True, "norm_output": True}),
    ],
)
def test_unroll_equals_reference_at_every_depth(seed: int, rule: str, overrides: dict[str, object]) -> None:
    model = make_model(make_config(**overrides), seed)
    documents = random_documents(9, seed)
    rows = [documents[:4], documents[4:7], documents[7:]]
    batch = make_batch(rows, padding=3)
    places = located(rows, batch.input_ids.shape[1])
    plan = plan_chains(batch.loss_mask, batch.document_ids, 4, rule)
    depths = torch.zeros(batch.input_ids.numel(), dtype=torch.int64)
    with torch.no_grad():
        outputs = [model.logits(output) for output in unroll(model, batch, plan)]
        for step in plan.steps:
            depths[plan.sources[step.sources]] += 1
        compared = 0
        for place in depths.nonzero().flatten().tolist():
            document, start = places[place]
            expected = draft_logits(
                model.state_dict(), model.config, document.aux, document.ids, start, int(depths[place])
            )
            for k in range(int(depths[place])):
                step = plan.steps[k]
                mine = outputs[k][plan.sources[step.sources] == place]
                torch.testing.assert_close(mine[0], expected[k], rtol=0, atol=1e-9)
                compared += 1
    assert compared == sum(len(output) for output in outputs)
    assert len(outputs[3]) > 0, "the case must reach the last depth"


def naive_terms(mask: list[bool], steps: int, rule: str) -> list[tuple[int, int]]:
    """Active (i, k) of one document, by the words of the definition."""
    terms = []
    for i in range(len(mask)):
        for k in range(steps):
            needed = range(i + 1, i + 3 + k) if rule == "served" else range(i + 1 + k, i + 3 + k)
            if needed[-1] < len(mask) and all(mask[t] for t in needed):
                terms.append((i, k))
    return terms


@pytest.mark.parametrize("rule", ["served", "shifted"])
def test_loss_and_gradients_equal_naive_autograd(rule: str) -> None:
    settings = TTTSettings(3, 0.8, rule)
    model, head, vocab = make_model(), make_head(), make_vocab()
    documents = random_documents(6, seed=11)
    batch = make_batch([documents[:3], documents[3:]], padding=2)
    denominators = torch.tensor([7, 5, 3])

    sums = [torch.zeros((), dtype=torch.float64) for _ in range(3)]
    correct, active, in_vocab = [0] * 3, [0] * 3, [0] * 3
    state = dict(model.named_parameters())
    for document in documents:
        for i, k in naive_terms(document.mask.tolist(), 3, rule):
            logits = draft_logits(state, model.config, document.aux, document.ids, i, k + 1)[k]
            target_logits = head.lm_head @ document.last[i + 1 + k]
            target = int(target_logits.argmax())
            active[k] += 1
            correct[k] += int(vocab.ids[logits.argmax()]) == target
            if target in vocab.ids.tolist():
                in_vocab[k] += 1
                teacher = target_logits[vocab.ids].exp() / target_logits[vocab.ids].exp().sum()
                sums[k] = sums[k] - (teacher * (logits.exp() / logits.exp().sum()).log()).sum()
    naive = sum(0.8**k * sums[k] / denominators[k] for k in range(3))

    output = run_loss(model, batch, settings, denominators)
    assert (output.correct.tolist(), output.active.tolist(), output.in_vocab.tolist()) == (correct, active, in_vocab)
    assert 0 < in_vocab[2] < active[2], "the case must have terms in and out of the draft vocab"
    torch.testing.assert_close(output.loss_sums, torch.stack(sums), rtol=1e-11, atol=0)
    torch.testing.assert_close(output.loss, naive, rtol=1e-11, atol=0)
    expected = gradients(model, naive)
    for name, value in gradients(model, output.loss).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-9, msg=lambda text, name=name: name + text)


def test_draft_matches_is_the_reference_greedy_against_the_batch_tokens() -> None:
    model, vocab = make_model(), make_vocab()
    mask = [0, 0, 1, 1, 1, 1, 0, 1, 1, 1]
    document = make_document(mask, seed=3)
    right = {(1, 0), (1, 1), (6, 0)}  # terms that we make come true, by writing the draft into the document
    for i, k in sorted(right):
        logits = draft_logits(model.state_dict(), model.config, document.aux, document.ids, i, k + 1)[k]
        document.ids[i + 2 + k] = vocab.ids[logits.argmax()]
    matches = draft_matches(model, make_batch([[make_document([1, 1, 1]), document]], padding=1), vocab, 3)[:, 0, 3:]
    for i, k in naive_terms([bool(value) for value in mask], 3, "served"):
        logits = draft_logits(model.state_dict(), model.config, document.aux, document.ids, i, k + 1)[k]
        assert matches[k, i] == (vocab.ids[logits.argmax()] == document.ids[i + 2 + k])
    assert all(matches[k, i] for i, k in right)
    assert not matches.all() and not matches[:, [0, 4, 5, 8, 9]].any(), "chains that serving does not start are false"


def test_reference_shares_no_code_with_what_it_checks() -> None:
    tree = ast.parse(Path(reference.__file__).read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name for name in imported if name and name.startswith("eagle3")} == {"eagle3.draft.config"}
