"""The tree of drafts of one round, and which of them the target accepts.

Node 0 is the last committed token; nodes 1 .. D - 1 are the drafts kept for verification.
Shapes: B requests, D nodes, k drafts a step (topk).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_MASK_OVER_THE_WHOLE_CONTEXT = 0


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    depth: int,
    num_nodes: int,
    tree_mask_mode: int,
) -> None:
    """Fills the tree's links, positions and attention mask in place.

    Args:
        parent_list: for each group of k drafts, the draft that they follow.
        selected_index: [B, D - 1], the drafts that were kept, among all drafts of the round.
        tree_mask: bool, D * D of each request, or with its context before (mode 0) D * (length + D).
        positions: [B * D].
        retrieve_index, retrieve_next_token, retrieve_next_sibling: [B, D] row of a node, its first child, its next
            sibling; -1 is none.
    """
    batch = len(seq_lens)
    rows, children, siblings = (
        part.view(batch, num_nodes) for part in (retrieve_index, retrieve_next_token, retrieve_next_sibling)
    )
    mask, read = tree_mask.view(-1), 0
    selected, parents_of = selected_index.reshape(batch, -1).tolist(), parent_list.reshape(batch, -1).tolist()
    for request, length in enumerate(seq_lens.tolist()):
        parents = _parents(selected[request], parents_of[request], topk, num_nodes)
        rows[request] = torch.arange(request * num_nodes, (request + 1) * num_nodes)
        for node in range(num_nodes - 1, 0, -1):
            parent = parents[node]
            if parent is None:
                continue
            first = int(children[request, parent])
            children[request, parent] = node
            if first != -1:
                siblings[request, node] = first
        context = length if tree_mask_mode == _MASK_OVER_THE_WHOLE_CONTEXT else 0
        for node in range(num_nodes):
            ancestors = _ancestors(node, parents)
            positions.view(batch, num_nodes)[request, node] = length + len(ancestors)
            seen = torch.tensor([other == node or other in ancestors for other in range(num_nodes)])
            mask[read + context : read + context + num_nodes] = seen.to(mask.dtype)
            read += context + num_nodes


def _parents(selected: Sequence[int], parents_of: Sequence[int], topk: int, num_nodes: int) -> list[int | None]:
    """Parent node of every node; None for the root and for a draft whose parent was not kept."""
    parents: list[int | None] = [None]
    for draft in selected[: num_nodes - 1]:
        group = draft // topk
        if group == 0:
            parents.append(0)
        else:
            followed = parents_of[group]
            parents.append(selected.index(followed) + 1 if followed in selected else None)
    return parents


def _ancestors(node: int, parents: Sequence[int | None]) -> set[int]:
    ancestors: set[int] = set()
    while node:
        node = parents[node] or 0
        ancestors.add(node)
    return ancestors


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Follows the drafts that equal the target's greedy tokens, from the root down; results in place.

    SGLang passes these arguments by name, and spells three of them so.

    Args:
        predicts: [B * D], the target's token after each accepted node.
        accept_index: [B, steps + 1], rows of the accepted nodes, the root first; -1 elsewhere.
        accept_token_num: [B], accepted drafts (the root not counted).
        candidates: [B, D], the nodes' tokens.
        target_predict: [B, D], the target's greedy token after each node.
    """
    batch, num_nodes = candidates.shape
    tokens, greedy = candidates.tolist(), target_predict.reshape(-1).tolist()
    rows, children, siblings = (
        part.view(batch, num_nodes).tolist() for part in (retrive_index, retrive_next_token, retrive_next_sibling)
    )
    for request in range(batch):
        node = accepted = 0
        row = rows[request][0]
        accept_index[request, 0] = row
        while accepted + 1 < accept_index.shape[1]:
            child = children[request][node]
            while child != -1 and tokens[request][child] != greedy[row]:
                child = siblings[request][child]
            if child == -1:
                break
            predicts[row] = greedy[row]
            node, row, accepted = child, rows[request][child], accepted + 1
            accept_index[request, accepted] = row
        accept_token_num[request] = accepted
        predicts[row] = greedy[row]
