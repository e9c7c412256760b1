"""One sample of a hidden-state store in memory: what it must look like, and how samples become a shard.

Legend: T tokens of a sample, S supervised ones, A aux layers, H target hidden.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from eagle3.data.store_format import METADATA_KEY, SampleInfo, shard_metadata
from eagle3.data.store_layout import StoreLayout
from eagle3.data.tensor_file import file_header
from eagle3.draft.states import can_hold, quantize
from eagle3.errors import Problem
from eagle3.wiring.contract import WiringContract


@dataclass(frozen=True)
class StoredSample:
    """One sample with its states.

    Attributes:
        id: unique in the store.
        input_ids: [T], int32 as read (any integer type may be written).
        loss_mask: bool [T], true at supervised tokens.
        aux_hidden_states: [T, A * H], the captured layers concatenated in ascending order, in the layout's value type
            (the contract's; bfloat16 for an fp8 store).
        last_hidden_states: [T, H], or [S, H] of the supervised tokens alone; the contract says whether they are normed.
        target_argmax: [T] or [S], the target's greedy token at each of the last hidden states, int32 as read (any
            integer type may be written); None in a store that has none (version 1 or 2), and before it is made, see
            `eagle3.data.target_argmax`.
        source: where its prompt comes from, if that is known.
    """

    id: str
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    aux_hidden_states: torch.Tensor
    last_hidden_states: torch.Tensor
    target_argmax: torch.Tensor | None = None
    source: str | None = None

    @property
    def info(self) -> SampleInfo:
        return SampleInfo(self.id, self.input_ids.numel(), int(self.loss_mask.sum()), self.source)

    @property
    def supervised_last(self) -> torch.Tensor:
        """[S, H], the last hidden states of the supervised tokens."""
        return self._supervised(self.last_hidden_states)

    @property
    def supervised_argmax(self) -> torch.Tensor | None:
        """[S], the target's greedy tokens at the supervised tokens, where they are known."""
        return None if self.target_argmax is None else self._supervised(self.target_argmax)

    def _supervised(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[self.loss_mask] if len(rows) == len(self.loss_mask) else rows


def shard_content(
    samples: Sequence[StoredSample], layout: StoreLayout
) -> tuple[dict[str, list[torch.Tensor]], dict[str, str]]:
    """What `write_tensor_file` needs to write these samples as one shard: tensors as blocks, and metadata."""
    parts = [_stored(sample, layout) for sample in samples]
    infos = [sample.info for sample in samples]
    names = layout.tensors(*_totals(infos))
    return {name: [part[name] for part in parts] for name in names}, header_metadata(infos, layout.version)


def _stored(sample: StoredSample, layout: StoreLayout) -> dict[str, torch.Tensor]:
    """A sample's rows of each tensor of a shard."""
    aux = sample.aux_hidden_states
    last = sample.last_hidden_states if layout.last_rows == "all" else sample.supervised_last
    tokens = {"input_ids": sample.input_ids.to(layout.ids_dtype), "loss_mask": sample.loss_mask.to(torch.uint8)}
    if layout.has_argmax:
        argmax = sample.target_argmax if layout.last_rows == "all" else sample.supervised_argmax
        assert argmax is not None, "sample_faults lets no such sample pass"
        tokens["target_argmax"] = argmax.to(layout.ids_dtype)
    if not layout.scaled:
        return {**tokens, "aux_hidden_states": aux, "last_hidden_states": last}
    values, scales = quantize(aux.unflatten(1, (-1, layout.contract.hidden_size)))
    last_values, last_scales = quantize(last)
    return {
        **tokens,
        "aux_hidden_states": values.flatten(1),
        "last_hidden_states": last_values,
        "aux_scales": scales,
        "last_scales": last_scales,
    }


def shard_header(samples: Sequence[SampleInfo], layout: StoreLayout) -> bytes:
    """The bytes before the tensors of a shard of these samples."""
    tensors = layout.tensors(*_totals(samples))
    return file_header(tensors, header_metadata(samples, layout.version))


def shard_bytes(samples: Sequence[SampleInfo], layout: StoreLayout) -> int:
    """Size of the file of a shard of these samples."""
    return len(shard_header(samples, layout)) + layout.tensor_bytes(*_totals(samples))


def _totals(samples: Sequence[SampleInfo]) -> tuple[int, int]:
    """Tokens and supervised tokens."""
    return sum(sample.tokens for sample in samples), sum(sample.supervised for sample in samples)


def header_metadata(samples: Iterable[SampleInfo], version: int) -> dict[str, str]:
    """The text entries of a shard's header."""
    text = json.dumps(shard_metadata(samples, version), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return {METADATA_KEY: text}


def sample_problems(where: Path, sample: StoredSample, layout: StoreLayout) -> list[Problem]:
    """`sample_faults` as problems of the folder that it is to be written to."""
    return [
        Problem(f"{where}: sample {sample.id!r}", f"store.{kind}", message, "correct what made this sample")
        for kind, message in sample_faults(sample, layout)
    ]


def sample_faults(sample: StoredSample, layout: StoreLayout) -> list[tuple[str, str]]:
    """(kind, message) of everything that bars this sample from a store of that layout."""
    contract, dtype = layout.contract, layout.value_dtype
    tokens, hidden = sample.input_ids.numel(), contract.hidden_size
    faults = token_faults(sample.id, sample.input_ids, contract)
    last = tokens
    if layout.last_rows == "supervised" and len(sample.last_hidden_states) != tokens:
        last = int(sample.loss_mask.sum())
    expected = {
        "loss_mask": (torch.bool, (tokens,)),
        "aux_hidden_states": (dtype, (tokens, len(contract.output_indices) * hidden)),
        "last_hidden_states": (dtype, (last, hidden)),
    }
    for name, (kind, shape) in expected.items():
        tensor = getattr(sample, name)
        if (tensor.dtype, tensor.shape) != (kind, shape):
            message = f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {kind} {list(shape)}"
            faults.append(("sample_shape", message))
        elif not torch.isfinite(tensor).all():
            faults.append(("non_finite", f"has NaN or infinity in its {name}"))
        elif layout.scaled and name != "loss_mask" and not can_hold(tensor, layout.dtype):
            faults.append(("non_finite", f"has values in its {name} that are too large for {contract.dtype}"))
    if layout.has_argmax:
        rows = [tokens] if layout.last_rows == "all" else [int(sample.loss_mask.sum()), tokens]
        faults += argmax_faults(sample.target_argmax, rows, contract)
    return faults


def token_faults(sample_id: str, ids: torch.Tensor, contract: WiringContract) -> list[tuple[str, str]]:
    """(kind, message) of what is wrong with a sample's id or its token ids."""
    faults = []
    if not sample_id:
        faults.append(("sample_id", "its id is empty"))
    if ids.ndim != 1 or not len(ids) or not _are_integers(ids):
        faults.append(("sample_shape", f"input_ids are {ids.dtype} {list(ids.shape)}, expected integers [tokens]"))
    return faults or range_faults(ids, contract.vocab_size)


def argmax_faults(argmax: torch.Tensor | None, rows: Sequence[int], contract: WiringContract) -> list[tuple[str, str]]:
    """(kind, message) of what is wrong with the target's greedy tokens, of which there may be so many or so many."""
    if argmax is None or argmax.ndim != 1 or len(argmax) not in rows or not _are_integers(argmax):
        found = "absent" if argmax is None else f"{argmax.dtype} {list(argmax.shape)}"
        expected = " or ".join(f"[{count}]" for count in dict.fromkeys(rows))
        return [("sample_shape", f"target_argmax is {found}, expected integers {expected}")]
    return range_faults(argmax.long(), contract.vocab_size, "target_argmax")


def range_faults(ids: torch.Tensor, vocab_size: int, name: str = "") -> list[tuple[str, str]]:
    """(kind, message) where token ids, of a tensor of that name if they are not the sample's own, are none of the
    vocabulary's.
    """
    if not len(ids) or (ids.min() >= 0 and ids.max() < vocab_size):
        return []
    place = f" in its {name}" if name else ""
    message = f"has ids {ids.min()} to {ids.max()}{place}, the vocabulary is 0 to {vocab_size - 1}"
    return [("ids_out_of_range", message)]


def _are_integers(ids: torch.Tensor) -> bool:
    return not ids.dtype.is_floating_point and not ids.dtype.is_complex and ids.dtype != torch.bool
