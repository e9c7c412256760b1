"""One sample of a hidden-state store in memory: what it must look like, and how samples become a shard.

Legend: T tokens of a sample, A aux layers, H target hidden.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from eagle3.data.store_format import METADATA_KEY, SampleInfo, shard_layout, shard_metadata
from eagle3.wiring.contract import WiringContract


@dataclass(frozen=True)
class StoredSample:
    """One sample with its states.

    Attributes:
        id: unique in the store.
        input_ids: [T], int32 as read (any integer type may be written).
        loss_mask: bool [T], true at supervised tokens.
        aux_hidden_states: [T, A * H], the captured layers concatenated in ascending order, in the contract's dtype.
        last_hidden_states: [T, H], in the contract's dtype; the contract says whether they are normed.
    """

    id: str
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    aux_hidden_states: torch.Tensor
    last_hidden_states: torch.Tensor

    @property
    def info(self) -> SampleInfo:
        return SampleInfo(self.id, self.input_ids.numel(), int(self.loss_mask.sum()))


def shard_content(
    samples: Sequence[StoredSample], contract: WiringContract
) -> tuple[dict[str, list[torch.Tensor]], dict[str, str]]:
    """What `write_tensor_file` needs to write these samples as one shard: tensors as blocks, and metadata."""
    columns = {
        "input_ids": [sample.input_ids.to(torch.int32) for sample in samples],
        "loss_mask": [sample.loss_mask.to(torch.uint8) for sample in samples],
        "aux_hidden_states": [sample.aux_hidden_states for sample in samples],
        "last_hidden_states": [sample.last_hidden_states for sample in samples],
    }
    layout = shard_layout(contract, sum(sample.input_ids.numel() for sample in samples))
    return {name: columns[name] for name in layout}, header_metadata(sample.info for sample in samples)


def header_metadata(samples: Iterable[SampleInfo]) -> dict[str, str]:
    """The text entries of a shard's header."""
    text = json.dumps(shard_metadata(samples), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return {METADATA_KEY: text}


def sample_faults(sample: StoredSample, contract: WiringContract) -> list[tuple[str, str]]:
    """(kind, message) of everything that bars this sample from a store of that contract."""
    tokens, hidden, dtype = sample.input_ids.numel(), contract.hidden_size, getattr(torch, contract.dtype)
    faults = token_faults(sample.id, sample.input_ids, contract)
    expected = {
        "loss_mask": (torch.bool, (tokens,)),
        "aux_hidden_states": (dtype, (tokens, len(contract.output_indices) * hidden)),
        "last_hidden_states": (dtype, (tokens, hidden)),
    }
    for name, (kind, shape) in expected.items():
        tensor = getattr(sample, name)
        if (tensor.dtype, tensor.shape) != (kind, shape):
            message = f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {kind} {list(shape)}"
            faults.append(("sample_shape", message))
        elif not torch.isfinite(tensor).all():
            faults.append(("non_finite", f"has NaN or infinity in its {name}"))
    return faults


def token_faults(sample_id: str, ids: torch.Tensor, contract: WiringContract) -> list[tuple[str, str]]:
    """(kind, message) of what is wrong with a sample's id or its token ids."""
    faults = []
    if not sample_id:
        faults.append(("sample_id", "its id is empty"))
    if ids.ndim != 1 or not len(ids) or ids.dtype.is_floating_point or ids.dtype == torch.bool:
        faults.append(("sample_shape", f"input_ids are {ids.dtype} {list(ids.shape)}, expected integers [tokens]"))
    elif ids.min() < 0 or ids.max() >= contract.vocab_size:
        message = f"has ids {ids.min()} to {ids.max()}, the vocabulary is 0 to {contract.vocab_size - 1}"
        faults.append(("ids_out_of_range", message))
    return faults
