"""In which order a ring's samples come: shuffled anew in each epoch and cut into shards; all of it is known before the
extraction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from eagle3.data.ring_format import RingShard
from eagle3.data.store_format import SampleInfo
from eagle3.data.store_layout import StoreLayout
from eagle3.data.store_sample import shard_bytes

Cut = Callable[[Sequence[int]], list[list[list[int]]]]
"""Samples (places in the ring's list) in order -> units of shards of them."""


def order_shards(
    layout: StoreLayout, samples: Sequence[SampleInfo], epochs: int, seed: int, cut: Cut
) -> tuple[RingShard, ...]:
    """The shards of all epochs.

    Args:
        samples: of an epoch, at least one.
        seed: of the order; each epoch has another one.
        cut: how an epoch's samples become shards, and which of these are made together.
    """
    shards: list[RingShard] = []
    unit = 0
    for epoch in range(epochs):
        order = list(range(len(samples)))
        Random(f"ring:{seed}:{epoch}").shuffle(order)
        for parts in cut(order):
            for part in parts:
                size = shard_bytes([samples[place] for place in part], layout)
                shards.append(RingShard(epoch, unit, size, tuple(part)))
            unit += 1
    return tuple(shards)
