"""The drafter with its cache, held against the slow reference, token by token."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from eagle3.draft.reference import draft_logits
from eagle3.evaluate.decode.growth import Drafting, grow

from .cases import generator, make_drafter, make_target

IDS = [0, 2, 3, 5, 7, 8, 11]


@pytest.mark.parametrize("norm_output", [False, True])
def test_every_node_of_a_tree_is_drafted_as_the_reference_drafts_its_path(norm_output: bool) -> None:
    target = make_target()
    drafter = make_drafter(target, IDS, norm_output=norm_output)
    state = {name: value.detach() for name, value in drafter.model.named_parameters()}
    tokens = torch.randint(0, 12, (14,), generator=generator()).tolist()
    aux = target.prefill(tokens).aux
    drafter.reset()
    for begin, end in pairwise((0, 6, 7, 10, 13)):  # a prompt, then rounds of one and of three tokens
        drafter.extend(aux[begin:end], tokens[begin + 1 : end + 1])
        first = drafter.feed([4, 9], [0, 0])
        second = drafter.feed([1, 10, 6], [first[1], first[0], first[1]])
        third = drafter.feed([2], [second[2]])
        paths = {0: [], first[0]: [4], first[1]: [9], second[0]: [9, 1], second[1]: [4, 10], third[0]: [9, 6, 2]}
        found = drafter.logits(list(paths))
        for row, path in zip(found, paths.values(), strict=True):
            text = torch.tensor([*tokens[: end + 1], *path])
            expected = draft_logits(state, drafter.model.config, aux, text, end - 1, len(path) + 1)[-1]
            torch.testing.assert_close(row, expected, rtol=1e-9, atol=1e-9)


def test_the_tree_is_the_best_of_all_that_a_beam_sees() -> None:
    """Against a plain enumeration with the reference's probabilities."""
    target = make_target()
    drafter = make_drafter(target, IDS)
    with torch.no_grad():
        drafter.model.lm_head.weight.mul_(2.5)  # sure of itself: the tree is deep
    state = {name: value.detach() for name, value in drafter.model.named_parameters()}
    tokens = [3, 1, 4, 1, 5]
    aux = target.prefill(tokens[:-1]).aux
    drafter.reset()
    drafter.extend(aux, tokens[1:])

    def shares(path: tuple[int, ...]) -> torch.Tensor:
        text = torch.tensor([*tokens, *path])
        return draft_logits(state, drafter.model.config, aux, text, len(tokens) - 2, len(path) + 1)[-1].softmax(0)

    beam: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    seen: list[tuple[tuple[int, ...], float]] = []
    for _ in range(4):
        level = []
        for path, score in beam:
            best = shares(path).topk(3)
            level += [((*path, IDS[i]), score * p) for p, i in zip(*map(torch.Tensor.tolist, best), strict=True)]
        seen += level
        beam = sorted(level, key=lambda item: -item[1])[:3]
    expected = {path for path, _ in sorted(seen, key=lambda item: -item[1])[:11]}
    tree = grow(drafter, Drafting(4, 3, 12), generator())
    paths: list[tuple[int, ...]] = [()]
    for node, parent in enumerate(tree.parents, 1):
        paths.append((*paths[parent], tree.token(node)))
    assert set(paths[1:]) == expected and len(paths) == 12 and not tree.proposals
    assert max(map(len, paths)) == max(map(len, expected)) > 2


def test_a_chain_of_likeliest_drafts_is_greedy() -> None:
    target = make_target()
    drafter = make_drafter(target, IDS)
    drafter.reset()
    drafter.extend(target.prefill([1, 2, 3]).aux, [2, 3, 4])
    tree = grow(drafter, Drafting(3, 1, 4), generator())
    assert tree.parents == [0, 1, 2]
    node, expected = 0, []
    for _ in range(3):
        expected.append(IDS[int(drafter.logits([node])[0].argmax())])
        (node,) = drafter.feed(expected[-1:], [node])
    # `grow` has fed its own drafts: these come from nodes beside them.
    assert tree.tokens == expected
