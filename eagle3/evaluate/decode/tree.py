"""A round's drafts: a tree whose root is the last committed token, node 0; a chain is a tree without branches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Tree:
    """Drafted tokens, parents before children.

    Attributes:
        tokens: target ids; node n is `tokens[n - 1]`, the root has none here.
        parents: node that each one follows.
        proposals: by node, the distribution [D] over the draft vocab, float64 on the CPU, which its children were drawn
            from one after the other, without putting back; a node that is not here has children that were chosen.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    proposals: dict[int, Tensor] = field(default_factory=dict)

    def add(self, token: int, parent: int) -> int:
        """Adds a node; returns its number."""
        self.tokens.append(token)
        self.parents.append(parent)
        return len(self.tokens)

    def children(self, node: int) -> list[int]:
        """In the order in which they were drafted."""
        return [number for number, parent in enumerate(self.parents, 1) if parent == node]

    def token(self, node: int) -> int:
        assert node > 0, "the root is committed"
        return self.tokens[node - 1]

    @property
    def depths(self) -> list[int]:
        """Of the root (0) and each node."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

    def sees(self) -> Tensor:
        """bool [N + 1, N + 1]: whether a node (row) attends to another (column): to itself and its ancestors."""
        return ancestors(self.parents)

    def cut(self, depth: int) -> Tree:
        """Without the nodes deeper than that: an answer that ends there cannot take them."""
        kept = [node for node, at in enumerate(self.depths) if at <= depth]
        places = {node: place for place, node in enumerate(kept)}
        return Tree(
            [self.token(node) for node in kept[1:]],
            [places[self.parents[node - 1]] for node in kept[1:]],
            {places[node]: q for node, q in self.proposals.items() if node in places},
        )


def ancestors(parents: Sequence[int]) -> Tensor:
    """bool [N + 1, N + 1] of the parents of nodes 1 .. N: (n, m) says whether m is n or above it."""
    sees = torch.eye(len(parents) + 1, dtype=torch.bool)
    for node, parent in enumerate(parents, 1):
        sees[node] |= sees[parent]
    return sees
