"""The first layers of a target computed twice from the same weights: as the walk does, and by Transformers' own code,
one document at a time.

Legend: T tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from eagle3.target.streaming.fused import find_experts, unfused
from eagle3.target.streaming.packing import ATTENTION, MicroBatch, packed
from eagle3.target.streaming.skeleton import Skeleton
from eagle3.target.streaming.walk import LayerWalk, layer_states

_DENSE_LAYERS = 2


def layers_to_compare(skeleton: Skeleton) -> int:
    """Up to the first layer with experts, else two: every kind of layer that a walk knows how to speed up."""
    for number, layer in enumerate(skeleton.layers):
        if find_experts(layer):
            return number + 1
    return min(_DENSE_LAYERS, len(skeleton.layers))


@torch.inference_mode()
def compare_layers(
    walk: LayerWalk, batch: Sequence[Sequence[int]]
) -> Iterator[tuple[int, list[tuple[torch.Tensor, torch.Tensor]]]]:
    """For each compared layer its number and, of each document, (the walk's, Transformers') output [T, H].

    Both have Transformers' output of the layer before as input, so that an error is the layer's own.

    Args:
        walk: whose way is compared.
        batch: token ids of a few short documents.
    """
    skeleton = walk.skeleton
    together = MicroBatch(0, tuple(map(tuple, batch)), walk.device)
    alone = [MicroBatch(0, (tuple(document),), walk.device) for document in batch]
    states, inputs = skeleton.inputs(together)
    with own_attention(skeleton):
        own_inputs = [skeleton.inputs(micro)[1] for micro in alone]
    for number in range(layers_to_compare(skeleton)):
        layer = skeleton.layers[number]
        grouped = walk.load(number)
        with packed(together):
            output = layer(states.unsqueeze(0), **inputs[number])
        fast = layer_states(output).split(together.lengths)
        own = []
        with own_attention(skeleton), unfused(layer, experts_too=not grouped):
            for document, arguments in zip(states.split(together.lengths), own_inputs, strict=True):
                output = layer(document.unsqueeze(0), **arguments[number])
                own.append(layer_states(output))
        yield number, list(zip(fast, own, strict=True))
        states = torch.cat(own)
        layer.to("meta")


@contextmanager
def own_attention(skeleton: Skeleton) -> Iterator[None]:
    """Transformers' plain attention and masks while it lasts."""
    skeleton.model.set_attn_implementation("eager")
    try:
        yield
    finally:
        skeleton.model.set_attn_implementation(ATTENTION)
