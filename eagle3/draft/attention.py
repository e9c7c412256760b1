"""Attention of the training-time test, on CPU and GPU alike.

A chain's query attends to the step-0 keys of its document up to its own token and, of later steps, to its own keys:
one softmax over both, which is a key/value cache of one sequence seen from each chain at once.

Shapes: R chains, S sources, h query heads, v key/value heads, g = h / v, d head width, k later steps so far.
"""

from __future__ import annotations

import torch

from eagle3.draft.chains import ChainPlan, StepRows


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    own_keys: torch.Tensor,
    own_values: torch.Tensor,
    plan: ChainPlan,
    rows: StepRows,
) -> torch.Tensor:
    """Attention output [R, h, d] of the chains in `rows`, scaled by 1 / sqrt(d).

    Args:
        query: [R, h, d].
        keys: [S, v, d], of step 0.
        values: [S, v, d], of step 0.
        own_keys: [R, k, v, d], of steps 1 .. k.
        own_values: [R, k, v, d].
        plan: the batch's plan.
        rows: the chains of this step.
    """
    grouped = query.unflatten(1, (keys.shape[1], -1)) * query.shape[-1] ** -0.5
    own_scores = torch.einsum("rvgd,rkvd->rvgk", grouped, own_keys)
    outputs = []
    first_source = 0
    for chunk in zip(
        *(part.split(rows.document_chains) for part in (grouped, own_scores, own_values, rows.sources)),
        *(part.split(plan.document_sources) for part in (keys, values)),
        strict=True,
    ):
        document_query, document_own, document_own_values, sources, document_keys, document_values = chunk
        places = torch.arange(first_source, first_source + len(document_keys), device=query.device)
        first_source += len(document_keys)
        scores = torch.einsum("rvgd,svd->vgrs", document_query, document_keys)
        scores = scores.masked_fill(places > sources[:, None], float("-inf"))
        joined = torch.cat([scores, document_own.permute(1, 2, 0, 3)], -1)
        weights = joined.softmax(-1, dtype=torch.promote_types(joined.dtype, torch.float32)).to(values.dtype)
        past, own = weights.split([len(document_keys), own_keys.shape[1]], -1)
        output = torch.einsum("vgrs,svd->rvgd", past, document_values)
        outputs.append(output + torch.einsum("vgrk,rkvd->rvgd", own, document_own_values))
    return torch.cat(outputs).flatten(1, 2)
