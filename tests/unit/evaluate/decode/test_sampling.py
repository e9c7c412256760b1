"""Sampled answers follow the target's own distribution, exactly, whatever is drafted; and the test would see if not."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from torch import Tensor

from eagle3.draft.vocab import DraftVocab
from eagle3.evaluate.decode import rules
from eagle3.evaluate.decode.draws import Narrowing, draw
from eagle3.evaluate.decode.growth import Drafting, drawn_shape
from eagle3.evaluate.decode.loop import decode
from eagle3.target.generate import prompt_seed

from .cases import Table, TableDrafter, TableTarget, generator, make_drafter, make_target

V, LENGTH, PROMPT = 4, 3, [1, 2]
IDS = torch.tensor([0, 2, 3])  # token 1 is outside the draft vocab
TEMPERATURE = 0.8
PLANS = {
    "drawn chain": Drafting(2, 1, 3, "drawn", TEMPERATURE),
    "chosen chain": Drafting(2, 1, 3, "likeliest"),
    "drawn tree": Drafting(2, 3, 7, "drawn", TEMPERATURE),
    "chosen tree": Drafting(2, 3, 8, "likeliest"),
}


def p_value(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float], draws: int) -> float:
    """Of Pearson's chi-square test; cells that expect less than 5 are put together."""
    rare = [cell for cell, share in expected.items() if share * draws < 5]
    cells = [(counts[cell], share * draws) for cell, share in expected.items() if share * draws >= 5]
    if rare:
        cells.append((sum(counts[cell] for cell in rare), sum(expected[cell] for cell in rare) * draws))
    assert sum(count for count, _ in cells) == draws and len(cells) > 8
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    halves = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


def joint(table: Table, narrowing: Narrowing) -> dict[tuple[int, ...], float]:
    """The distribution of the first tokens of an answer, by enumeration."""
    shares = {}
    for answer in itertools.product(range(V), repeat=LENGTH):
        share = 1.0
        for place, token in enumerate(answer):
            share *= float(narrowing.shares(table.logits([*PROMPT, *answer[:place]]))[token])
        if share:
            shares[answer] = share
    assert sum(shares.values()) == pytest.approx(1)
    return shares


def sampled(plan: Drafting, narrowing: Narrowing, draws: int) -> tuple[float, float]:
    """p of the chi-square test, and accepted drafts a round."""
    target, drafter = Table(V, 1), Table(len(IDS), 2)
    counts: Counter[tuple[int, ...]] = Counter()
    rounds = accepted = 0
    vocab = DraftVocab(IDS, V)
    for number in range(draws):
        found = decode(
            TableTarget(target),  # type: ignore[arg-type]
            TableDrafter(drafter, vocab, PROMPT[0]),  # type: ignore[arg-type]
            PROMPT,
            LENGTH,
            (),
            plan,
            narrowing,
            generator(number),
        )
        counts[tuple(found.ids)] += 1
        rounds += len(found.accepted)
        accepted += sum(found.accepted)
    return p_value(counts, joint(target, narrowing), draws), accepted / rounds


@pytest.mark.parametrize("plan", PLANS)
def test_samples_are_the_targets_own(plan: str) -> None:
    p, accepted = sampled(PLANS[plan], Narrowing(TEMPERATURE), 1000)
    assert p > 0.01 and 0.3 < accepted < 1.7


def test_samples_are_the_targets_own_under_top_k_and_top_p() -> None:
    p, _ = sampled(PLANS["drawn chain"], Narrowing(1.3, 0.9, 3), 700)
    assert p > 0.01


def accept_all(tree: rules.Tree, node: int, p: Tensor, *rest: object) -> int | Tensor:
    return next(iter(tree.children(node)), p)


def no_residual(
    tree: rules.Tree, node: int, p: Tensor, q: Tensor, ids: Tensor, generator: torch.Generator
) -> int | Tensor:
    whole = p.clone()
    found = TRY_DRAWN(tree, node, p, q, ids, generator)
    return whole if isinstance(found, Tensor) else found


def put_back(
    tree: rules.Tree, node: int, p: Tensor, q: Tensor, ids: Tensor, generator: torch.Generator
) -> int | Tensor:
    """Tries every child against the same q."""
    for child in tree.children(node):
        token, place = tree.token(child), int(torch.searchsorted(ids, tree.token(child)))
        if torch.rand((), dtype=torch.float64, generator=generator) * q[place] < p[token]:
            return child
        p[ids] = (p[ids] - q).clamp(min=0)
        p /= p.sum()
    return p


def keep_rejected(tree: rules.Tree, node: int, p: Tensor, ids: Tensor, generator: torch.Generator) -> int | Tensor:
    """Rejects rightly, and draws from all of p."""
    whole = p.clone()
    found = TRY(tree, node, p, ids, generator)
    return whole if isinstance(found, Tensor) else found


TRY, TRY_DRAWN = rules._try, rules._try_drawn
BROKEN = [
    ("_try_drawn", accept_all, "drawn chain"),
    ("_try_drawn", no_residual, "drawn chain"),
    ("_try_drawn", put_back, "drawn tree"),
    ("_try", accept_all, "chosen chain"),
    ("_try", keep_rejected, "chosen tree"),
]


@pytest.mark.parametrize(("name", "rule", "plan"), BROKEN)
def test_the_test_sees_a_broken_rule(name: str, rule: object, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, name, rule)
    assert sampled(PLANS[plan], Narrowing(TEMPERATURE), 500)[0] < 1e-6


def test_a_tree_whose_shape_follows_the_draws_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropping the drawn children that q thinks unlikely leaves the target's distribution: why the shape is fixed."""
    from eagle3.evaluate.decode import loop

    def pruned(*args: object) -> object:
        tree = GROW(*args)
        unlikely = [
            node
            for node, parent in enumerate(tree.parents, 1)
            if tree.proposals[parent][int(torch.searchsorted(IDS, tree.token(node)))] < 0.5
        ]
        gone = {node for node in range(1, len(tree.tokens) + 1) if tree.sees()[node, unlikely].any()}
        kept = [0, *(node for node in range(1, len(tree.tokens) + 1) if node not in gone)]
        places = {node: place for place, node in enumerate(kept)}
        return type(tree)(
            [tree.token(node) for node in kept[1:]],
            [places[tree.parents[node - 1]] for node in kept[1:]],
            {places[node]: q for node, q in tree.proposals.items() if node in places},
        )

    GROW = loop.grow
    monkeypatch.setattr(loop, "grow", pruned)
    assert sampled(PLANS["drawn tree"], Narrowing(TEMPERATURE), 500)[0] < 1e-6


def test_a_chain_accepts_as_often_as_p_and_q_overlap() -> None:
    """Of the first draft: sum over tokens of min(p, q), arXiv 2211.17192."""
    target, drafter, plan = Table(V, 1), Table(len(IDS), 2), Drafting(1, 1, 2, "drawn", TEMPERATURE)
    expected = 0.0
    for first in range(V):
        p = Narrowing(TEMPERATURE).shares(target.logits([*PROMPT, first]))
        q = torch.zeros(V, dtype=torch.float64)
        q[IDS] = (drafter.logits([*PROMPT, first]) / TEMPERATURE).softmax(0)
        expected += float(Narrowing(TEMPERATURE).shares(target.logits(PROMPT))[first] * torch.minimum(p, q).sum())
    draws, hits = 1000, 0
    for number in range(draws):
        found = decode(
            TableTarget(target),  # type: ignore[arg-type]
            TableDrafter(drafter, DraftVocab(IDS, V), PROMPT[0]),  # type: ignore[arg-type]
            PROMPT,
            3,
            (),
            plan,
            Narrowing(TEMPERATURE),
            generator(number),
        )
        hits += found.accepted[0]
    assert abs(hits / draws - expected) < 4 * (expected * (1 - expected) / draws) ** 0.5


@pytest.mark.parametrize("plan", PLANS)
def test_one_seed_gives_one_answer_of_a_real_target_whatever_came_before(plan: str) -> None:
    target = make_target()
    drafter = make_drafter(target, [0, 2, 3, 5, 7, 8, 11])
    prompts = {"a": [3, 1, 4], "b": [2, 7, 1, 8], "c": [5]}

    def ask(order: str, seed: int) -> dict[str, list[int]]:
        return {
            name: decode(
                target,
                drafter,
                prompts[name],
                10,
                (),
                PLANS[plan],
                Narrowing(1.0),
                generator(prompt_seed(seed, name)),
            ).ids
            for name in order
        }

    once = ask("abc", 0)
    assert ask("cab", 0) == once and ask("b", 0)["b"] == once["b"]
    assert ask("abc", 1) != once


def test_draws_follow_their_weights_and_never_hit_zero() -> None:
    weights = torch.tensor([0.0, 2.0, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    found = Counter(draw(weights, generator(seed)) for seed in range(4000))
    assert set(found) == {1, 3, 4} and abs(found[1] - 2000) < 130 and abs(found[3] - 1000) < 110


@pytest.mark.parametrize(("topk", "count"), [(1, 3), (2, 7), (3, 12)])
def test_the_fixed_shape_holds_as_many_places_as_asked_in_order(topk: int, count: int) -> None:
    shape = drawn_shape(Drafting(3, topk, count + 1, "drawn"))
    children = [child for found in shape.values() for child in found]
    assert sorted(children) == list(range(1, count + 1)), "every node has one parent"
    assert all(node < min(found) and len(found) <= topk for node, found in shape.items())
    if topk == 1:
        assert shape == {0: [1], 1: [2], 2: [3]}
