"""Which path of a tree is kept, and the target's own token after it.

Greedily: the path that the target's argmax follows. Sampled: recursive rejection (arXiv 2211.17192 for one draft,
2305.09781 and 2402.14160 for several), which keeps the target's distribution p exactly whatever the drafter says. At a
node, its children are tried in the order in which they were drafted. A child x that was drawn from q is accepted with
probability min(1, p(x) / q(x)); a rejected one leaves

    p <- max(p - q, 0), normed;      q <- q without x, normed

and the next child is tried against these. A child that was chosen, not drawn, is a draw from the distribution that has
only x, so it is accepted with probability p(x) and leaves p without x. When all are rejected the token is drawn from
what is left of p; after a leaf, from p itself. Outside the draft vocab q is 0.

Shapes: N drafts, V target vocab, D draft vocab.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from eagle3.evaluate.decode.draws import draw
from eagle3.evaluate.decode.tree import Tree

Kept = tuple[list[int], int]
"""The accepted nodes, from the root down, without it; and the target's own token after the last of them."""


def keep_greedy(tree: Tree, logits: Tensor) -> Kept:
    """What greedy decoding says.

    Args:
        logits: [N + 1, V], the target's after the root and each node.
    """
    own = logits.argmax(-1).tolist()
    path: list[int] = []
    node = 0
    while True:
        found = next((child for child in tree.children(node) if tree.token(child) == own[node]), None)
        if found is None:
            return path, own[node]
        path.append(found)
        node = found


def keep_sampled(tree: Tree, shares: Callable[[int], Tensor], ids: Tensor, generator: torch.Generator) -> Kept:
    """What sampling says.

    Args:
        shares: the target's distribution after a node, [V], float64 on the CPU.
        ids: int64 [D], the draft vocab's target ids, on the CPU.
    """
    path: list[int] = []
    node = 0
    while True:
        p = shares(node).clone()
        q = tree.proposals.get(node)
        accepted = _try(tree, node, p, ids, generator) if q is None else _try_drawn(tree, node, p, q, ids, generator)
        if isinstance(accepted, Tensor):
            return path, draw(accepted, generator)
        path.append(accepted)
        node = accepted


def _try(tree: Tree, node: int, p: Tensor, ids: Tensor, generator: torch.Generator) -> int | Tensor:
    """The child of a node that is accepted, or what is left of p; of children that were chosen."""
    for child in tree.children(node):
        token = tree.token(child)
        if _uniform(generator) * p.sum() < p[token]:
            return child
        p[token] = 0
    return p


def _try_drawn(tree: Tree, node: int, p: Tensor, q: Tensor, ids: Tensor, generator: torch.Generator) -> int | Tensor:
    """The same of children that were drawn from q [D]."""
    q = q.clone()
    for child in tree.children(node):
        token = tree.token(child)
        place = int(torch.searchsorted(ids, token))
        q /= q.sum()
        if _uniform(generator) * q[place] < p[token]:
            return child
        left = p.clone()
        left[ids] -= q
        left.clamp_(min=0)
        if left.any():  # else p is q up to rounding, and this rejection was rounding too
            p = left / left.sum()
        q[place] = 0
    return p


def _uniform(generator: torch.Generator) -> Tensor:
    return torch.rand((), dtype=torch.float64, generator=generator)
