"""How a store lays its states out in shards. docs/hidden-state-format.md is the rule.

Legend: T tokens of a shard, S supervised ones, A aux layers, H target hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

import torch

from eagle3.draft.states import FP8
from eagle3.wiring.contract import WiringContract
from eagle3.wiring.dataset import DTYPE_CODES
from eagle3.wiring.safetensors_header import DTYPE_BYTES

FORMAT_VERSION = 3
VERSIONS = (1, 2, 3)
"""Those that a reader knows; only the newest is written."""
LastRows = Literal["supervised", "all"]
_SHORT_VOCAB = 2**16
_WITH_LAST = ("last_hidden_states", "last_scales", "target_argmax")

TensorLayout = dict[str, tuple[str, tuple[int, ...]]]
"""Tensor name -> (safetensors dtype, shape), in the order of their bytes."""


@dataclass(frozen=True)
class StoreLayout:
    """What the shards of one store hold.

    Attributes:
        contract: of the store.
        last_rows: whether last hidden states are there for each supervised token or for every token.
        version: of the format; in version 1 there are all rows and token ids have four bytes; up to version 2 there is
            no `target_argmax`.
    """

    contract: WiringContract
    last_rows: LastRows = "supervised"
    version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        assert self.version in VERSIONS and (self.version > 1 or self.last_rows == "all")

    @property
    def dtype(self) -> torch.dtype:
        """Of the stored states."""
        dtype: torch.dtype = getattr(torch, self.contract.dtype)
        return dtype

    @property
    def scaled(self) -> bool:
        """Whether each row of a slot has a scale (see `eagle3.draft.states`)."""
        return self.dtype == FP8

    @property
    def value_dtype(self) -> torch.dtype:
        """Of the states as they are given to the store and come back."""
        return torch.bfloat16 if self.scaled else self.dtype

    @property
    def ids_dtype(self) -> torch.dtype:
        """Of token ids: the smallest that holds the vocabulary."""
        short = self.version > 1 and self.contract.vocab_size <= _SHORT_VOCAB
        return torch.uint16 if short else torch.int32

    @property
    def has_argmax(self) -> bool:
        """Whether the target's greedy token is there for each of the last hidden states."""
        return self.version > 2

    def tensors(self, tokens: int, supervised: int) -> TensorLayout:
        """The tensors of a shard; larger elements come first, so that each begins at a multiple of its element size."""
        code, slots = DTYPE_CODES[self.contract.dtype], len(self.contract.output_indices)
        ids = "U16" if self.ids_dtype == torch.uint16 else "I32"
        last = tokens if self.last_rows == "all" else supervised
        found: TensorLayout = {
            "input_ids": (ids, (tokens,)),
            "aux_hidden_states": (code, (tokens, slots * self.contract.hidden_size)),
            "last_hidden_states": (code, (last, self.contract.hidden_size)),
            **({"target_argmax": (ids, (last,))} if self.has_argmax else {}),
            "loss_mask": ("U8", (tokens,)),
        }
        if self.scaled:
            found |= {"aux_scales": ("F32", (tokens, slots)), "last_scales": ("F32", (last,))}
        return dict(sorted(found.items(), key=lambda item: -DTYPE_BYTES[item[1][0]]))

    def tensor_bytes(self, tokens: int, supervised: int) -> int:
        """Bytes of a shard's tensors, or of a sample's share of them."""
        return sum(DTYPE_BYTES[code] * prod(shape) for code, shape in self.tensors(tokens, supervised).values())


def goes_with_last(name: str) -> bool:
    """Whether a shard's tensor has a row for each of the last hidden states, rather than for each token."""
    return name in _WITH_LAST
