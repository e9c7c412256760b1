"""Reading the raw outputs of a target's decoder layers while it runs, the last one's before the final norm.

Legend: B rows, T tokens, H target hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from eagle3.target.spec import TargetSpec
from eagle3.wiring.layers import EMBEDDING

Taken = dict[int | str, torch.Tensor]


@contextmanager
def layer_outputs(model: PreTrainedModel, spec: TargetSpec, output_indices: Sequence[int]) -> Iterator[Taken]:
    """Fills {output index: [B, T, H]} during each forward pass in the block; -1 is the embedding."""
    taken: Taken = {}
    layers = spec.decoder_layers(model)
    handles = []
    for index in output_indices:
        if index == EMBEDDING:
            handles.append(layers[0].register_forward_pre_hook(partial(keep_input, taken, index), with_kwargs=True))
        else:
            handles.append(layers[index].register_forward_hook(partial(keep_output, taken, index)))
    try:
        yield taken
    finally:
        for handle in handles:
            handle.remove()


def keep_input(taken: Taken, key: int | str, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
    """A forward pre-hook (with kwargs) that keeps what the module reads."""
    taken[key] = args[0] if args else kwargs["hidden_states"]


def keep_output(taken: Taken, key: int | str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """A forward hook that keeps what the module gives."""
    taken[key] = output[0] if isinstance(output, tuple) else output
