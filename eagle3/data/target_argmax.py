"""The target's greedy tokens: what its head says at the last hidden states of a sample.

They are made once, with the states, since the product with the whole head is a few percent of a training step.

Legend: T tokens of a sample, S supervised ones, R rows of its last hidden states, H target hidden, V target vocab.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast, get_args

import torch

from eagle3.data.store_layout import StoreLayout
from eagle3.data.store_sample import StoredSample
from eagle3.draft.loss import LastHiddenKind, TargetHead

BLOCK_ROWS = 1024
"""Rows whose logits exist at once."""


@torch.no_grad()
def greedy_tokens(last_hidden: torch.Tensor, head: TargetHead) -> torch.Tensor:
    """The argmax of the target's logits over its whole vocabulary, of equals the lowest id.

    Blocks are counted from the first row, so that a call with the rows of one sample gives the same tokens whatever
    other samples are at hand.

    Args:
        last_hidden: [R, H], of one sample, in the store's value type (see `StoreLayout`).
        head: all of the target's; the logits are computed in its type.

    Returns:
        int64 [R], on the states' device.
    """
    assert head.ids is None, "the greedy tokens take all of the target's head"
    return torch.cat([head.logits(rows).argmax(-1) for rows in last_hidden.split(BLOCK_ROWS)])


def with_argmax(sample: StoredSample, layout: StoreLayout, head: TargetHead) -> StoredSample:
    """The sample with its `target_argmax`, made on the head's device from the states that it has: [T] in a store with
    all rows of them, else [S].

    One that has it already, and one of a layout without, stays as it is.
    """
    if not layout.has_argmax or sample.target_argmax is not None:
        return sample
    rows = sample.last_hidden_states if layout.last_rows == "all" else sample.supervised_last
    device = head.lm_head.device  # which gets a block at a time, as `greedy_tokens` takes them anyway
    blocks = [greedy_tokens(block.to(device, layout.value_dtype), head).cpu() for block in rows.split(BLOCK_ROWS)]
    return replace(sample, target_argmax=torch.cat(blocks).int())


def make_target_head(tensors: Mapping[str, torch.Tensor], target_config: Mapping[str, Any], kind: str) -> TargetHead:
    """The head of a store.

    Args:
        tensors: `norm.weight` [H], and `lm_head.weight` [V, H] or, where that is tied to it, `embed_tokens.weight`.
        target_config: the target's text config.
        kind: of the store's last hidden states, as its contract says.
    """
    assert kind in get_args(LastHiddenKind), kind
    return TargetHead(
        lm_head=tensors["lm_head.weight" if "lm_head.weight" in tensors else "embed_tokens.weight"],
        norm_weight=tensors["norm.weight"],
        eps=target_config["rms_norm_eps"],
        kind=cast(LastHiddenKind, kind),
    )
