"""How a round's drafts come about.

    likeliest   EAGLE-2's tree (arXiv 2406.16858), as SGLang's EAGLE grows it: every node of a level's beam gets its
                `topk` likeliest successors; the `topk` best of those, by the product of probabilities from the root,
                are the next beam; of all that were seen, the `draft_tokens` - 1 best are drafted. Only distributions
                decide, nothing is drawn. With topk 1 it is the greedy chain.
    drawn       each node's successors are drawn from the drafter's own distribution q at the temperature, without
                putting back. The tree's shape is fixed beforehand: which nodes there are must not depend on what was
                drawn there, or the draws would not be q's any more, and the output not the target's. With topk 1 it
                is the chain of speculative sampling (arXiv 2211.17192).

Shapes: D draft vocab, n nodes.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from eagle3.evaluate.decode.drafter import Drafter
from eagle3.evaluate.decode.draws import draw
from eagle3.evaluate.decode.tree import Tree

_SHARE = 0.6
"""Guessed chance that a node's first child is the next token, given the node is; the second one has this share of what
is left, and so on. Only the fixed shape of drawn trees depends on it."""


@dataclass(frozen=True)
class Drafting:
    """What is drafted in a round.

    Attributes:
        steps: greatest depth.
        topk: most children of a node.
        draft_tokens: tokens that the target verifies, the root included.
        kind: see above.
        temperature: of q; read only where drafts are drawn.
    """

    steps: int
    topk: int
    draft_tokens: int
    kind: Literal["likeliest", "drawn"] = "likeliest"
    temperature: float = 1.0

    @property
    def drafted(self) -> int:
        """Most drafts a round."""
        return self.draft_tokens - 1


def grow(drafter: Drafter, plan: Drafting, generator: torch.Generator) -> Tree:
    """A round's tree behind the tokens that the drafter has read."""
    return _drawn(drafter, plan, generator) if plan.kind == "drawn" else _likeliest(drafter, plan)


def _likeliest(drafter: Drafter, plan: Drafting) -> Tree:
    tokens: list[int] = []
    parents: list[int] = []  # of candidates: -1, or another candidate
    scores: list[float] = []
    beam, nodes, reached = [-1], [0], torch.zeros(1, dtype=torch.float64)
    for depth in range(plan.steps):
        found, logs = _best(drafter.logits(nodes), plan.topk)
        first, width = len(tokens), found.shape[1]
        tokens += drafter.vocab.to_target(found).flatten().tolist()
        parents += [candidate for candidate in beam for _ in range(width)]
        together = (reached[:, None] + logs).flatten()
        scores += together.tolist()
        if depth + 1 == plan.steps:
            break
        chosen = together.argsort(descending=True, stable=True)[: plan.topk].tolist()
        nodes = drafter.feed([tokens[first + item] for item in chosen], [nodes[item // width] for item in chosen])
        beam, reached = [first + item for item in chosen], together[chosen]
    # Of equals the earlier one: a child is never better than its parent, so that no child comes without it.
    order = sorted(range(len(scores)), key=lambda candidate: (-scores[candidate], candidate))[: plan.drafted]
    tree, places = Tree(), {-1: 0}
    for candidate in sorted(order):
        places[candidate] = tree.add(tokens[candidate], places[parents[candidate]])
    return tree


def _best(logits: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Draft ids int64 [n, k] of the greatest logits [n, D], and the logarithms of their probabilities, float64 [n, k].

    Both on the CPU. With one, it is of equals the lowest id, as `eagle3 evaluate` has it.
    """
    shares = logits.double().log_softmax(-1)
    found = logits.argmax(-1, keepdim=True) if topk == 1 else logits.topk(min(topk, logits.shape[1]), -1).indices
    return found.cpu(), shares.gather(1, found).cpu()


def _drawn(drafter: Drafter, plan: Drafting, generator: torch.Generator) -> Tree:
    shape = drawn_shape(plan)
    tree = Tree()
    places, fed = {0: 0}, {0: 0}  # node of the shape -> of the tree, -> of the drafter
    level = [0]
    while level:
        branching = [node for node in level if node in shape]
        if fresh := [node for node in branching if node]:
            above = {child: node for node, children in shape.items() for child in children}
            tokens = [tree.token(places[node]) for node in fresh]
            fed.update(zip(fresh, drafter.feed(tokens, [fed[above[node]] for node in fresh]), strict=True))
        level = []
        if not branching:
            break
        logits = drafter.logits([fed[node] for node in branching]).double().cpu()
        for node, row in zip(branching, logits, strict=True):
            q = (row / plan.temperature).softmax(-1)
            tree.proposals[places[node]] = q
            left = q.clone()
            for child in shape[node]:
                if not left.any():  # so peaked that no other token has any probability
                    break
                token = draw(left, generator)
                left[token] = 0
                places[child] = tree.add(int(drafter.vocab.ids[token]), places[node])
                level.append(child)
    return tree


def drawn_shape(plan: Drafting) -> dict[int, Sequence[int]]:
    """The children of each node that has some: the likeliest `draft_tokens` - 1 places, by a fixed guess, to be tried
    in this order; nodes are numbered level by level from the root, 0.
    """
    places: dict[tuple[int, ...], None] = {}
    heap: list[tuple[float, int, tuple[int, ...]]] = [(-_SHARE, 1, (0,))]
    while heap and len(places) < plan.drafted:
        chance, depth, path = heapq.heappop(heap)
        places[path] = None
        if path[-1] + 1 < plan.topk:
            heapq.heappush(heap, (chance * (1 - _SHARE), depth, (*path[:-1], path[-1] + 1)))
        if depth < plan.steps:
            heapq.heappush(heap, (chance * _SHARE, depth + 1, (*path, 0)))
    numbers: dict[tuple[int, ...], int] = {(): 0}
    shape: dict[int, list[int]] = {}
    for path in sorted(places, key=lambda path: (len(path), path)):
        numbers[path] = len(numbers)
        shape.setdefault(numbers[path[:-1]], []).append(numbers[path])
    return dict(shape)
