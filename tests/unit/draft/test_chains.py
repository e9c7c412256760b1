"""The plan of rows against a search by definition, over random masks and layouts."""

from __future__ import annotations

import pytest
import torch

from eagle3.draft.chains import plan_chains
from eagle3.draft.loss import active_terms

from .cases import make_batch, make_document, random_documents


@pytest.mark.parametrize("rule", ["served", "shifted"])
@pytest.mark.parametrize("seed", range(5))
def test_plan_holds_exactly_the_rows_that_reach_the_loss(seed: int, rule: str) -> None:
    documents = random_documents(8, seed)
    batch = make_batch([documents[:3], documents[3:4], documents[4:]], padding=seed % 3)
    steps = 4
    active = active_terms(batch.loss_mask, batch.document_ids, steps, rule).flatten(1)
    plan = plan_chains(batch.loss_mask, batch.document_ids, steps, rule)

    width = batch.input_ids.shape[1]
    names = [(place // width, int(name)) for place, name in enumerate(batch.document_ids.flatten())]
    needed = [[place for place in range(len(names)) if active[k:, place].any()] for k in range(steps)]
    sources = [
        place for place, name in enumerate(names) if any(names[chain] == name and chain >= place for chain in needed[0])
    ]
    assert plan.sources.tolist() == sources
    kept_documents = list(dict.fromkeys(names[place] for place in sources))
    assert plan.document_sources == [sum(names[s] == name for s in sources) for name in kept_documents]
    assert plan.teacher_places.tolist() == [chain + 1 for chain in needed[0]]
    previous = sources
    for k, rows in enumerate(plan.steps):
        chains = needed[k]
        assert plan.sources[rows.sources].tolist() == chains
        assert [previous[place] for place in rows.kept.tolist()] == chains
        assert [needed[0][place] for place in rows.ahead.tolist()] == [chain + k for chain in chains]
        assert torch.equal(plan.sources[rows.sources + k], torch.tensor(chains, dtype=torch.int64) + k)
        assert rows.active.tolist() == active[k, chains].tolist()
        assert rows.document_chains == [sum(names[chain] == name for chain in chains) for name in kept_documents]
        previous = chains
    if rule == "served":
        assert all(rows.active.all() for rows in plan.steps)


def test_rows_of_padding_alone_change_nothing() -> None:
    batch = make_batch([[], [make_document([0, 1, 1, 1])], []])
    plan = plan_chains(batch.loss_mask, batch.document_ids, 2, "served")
    assert plan.sources.tolist() == [4, 5] and plan.document_sources == [2]
    assert [rows.document_chains for rows in plan.steps] == [[2], [1]]


def test_plan_of_a_batch_without_chains_is_empty() -> None:
    batch = make_batch([[make_document([0, 1, 0])]], padding=1)
    plan = plan_chains(batch.loss_mask, batch.document_ids, 2, "served")
    assert plan.sources.numel() == 0 and plan.document_sources == [] and len(plan.steps) == 2
