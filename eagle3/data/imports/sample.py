"""One sample of another trainer's dump, and everything that bars it from a store.

Legend: T tokens of a sample, A aux layers, H target hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from eagle3.draft.states import can_hold

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_CHUNK_TOKENS = 1024
Fault = tuple[str, str, str]
"""The last part of the kind, what is wrong, and the fix."""

_MAKE = "make that sample again, or leave it out with skip_bad=true"
_LAYERS = "check the layers and the target: each layer is one hidden size wide, and the order is ascending"


@dataclass(frozen=True)
class RawSample:
    """What a file holds, without a batch dimension; nothing of it is checked but that these are tensors.

    Attributes:
        input_ids: [T].
        loss_mask: [T], or None if the file has none.
        aux_hidden_states: [T, A * H], the layers side by side in the file's order.
        last_hidden_states: [T, H].
    """

    input_ids: torch.Tensor
    loss_mask: torch.Tensor | None
    aux_hidden_states: torch.Tensor
    last_hidden_states: torch.Tensor


@dataclass(frozen=True)
class Expected:
    """What the target and the user's own words make of a sample.

    Attributes:
        num_aux: A.
        hidden_size: H.
        vocab_size, context_length: of the target.
        non_text_ids: ids that stand for pictures or video.
    """

    num_aux: int
    hidden_size: int
    vocab_size: int
    context_length: int
    non_text_ids: frozenset[int] = frozenset()


def unbatched(tensor: torch.Tensor, dims: int) -> torch.Tensor:
    """Without the batch dimension, if it has one of 1 beside `dims` others."""
    return tensor[0] if tensor.ndim == dims + 1 and tensor.shape[0] == 1 else tensor


def faults(raw: RawSample, expected: Expected) -> list[Fault]:
    """What is wrong with shapes, types and ids; reads no states."""
    found = list(_shape_faults(raw, expected)) or list(_length_faults(raw, expected))
    return [*found, *_type_faults(raw)] if found else [*_type_faults(raw), *_value_faults(raw, expected)]


def state_fault(raw: RawSample, dtype: torch.dtype) -> Fault | None:
    """NaN or infinity in the states as they will be stored; reads all of them."""
    for name, states in (("aux", raw.aux_hidden_states), ("last", raw.last_hidden_states)):
        for rows in states.split(_CHUNK_TOKENS):
            if not torch.isfinite(rows).all():
                return "non_finite", f"its {name} hidden states hold NaN or infinity", _MAKE
            if rows.dtype != dtype and not can_hold(rows, dtype):
                message = f"its {name} hidden states hold {rows.dtype} values that {dtype} cannot"
                return "non_finite", message, "choose a store_dtype of a wider range"
    return None


def _shape_faults(raw: RawSample, expected: Expected) -> Iterator[Fault]:
    ids, mask = raw.input_ids, raw.loss_mask
    if ids.ndim != 1 or not len(ids):
        yield "shape", f"token ids are {list(ids.shape)}, expected [tokens] or [1, tokens], at least one", _MAKE
    if mask is not None and mask.ndim != 1:
        yield "shape", f"the loss mask is {list(mask.shape)}, expected [tokens] or [1, tokens]", _MAKE
    widths = {"aux": expected.num_aux * expected.hidden_size, "last": expected.hidden_size}
    for name, states in (("aux", raw.aux_hidden_states), ("last", raw.last_hidden_states)):
        if states.ndim != 2:
            message = f"{name} hidden states are {list(states.shape)}, expected [tokens, width] or [1, tokens, width]"
            yield "shape", message, "a batch of more than 1, or another layout: write one sample a file"
        elif states.shape[1] != widths[name]:
            layers = f"{expected.num_aux} layers of {expected.hidden_size}" if name == "aux" else "the hidden size"
            message = f"{name} hidden states are {states.shape[1]} wide, {layers} would be {widths[name]}"
            yield "width", message, _LAYERS


def _length_faults(raw: RawSample, expected: Expected) -> Iterator[Fault]:
    lengths = {"token ids": len(raw.input_ids), "aux hidden states": len(raw.aux_hidden_states)}
    lengths["last hidden states"] = len(raw.last_hidden_states)
    if raw.loss_mask is not None:
        lengths["loss mask"] = len(raw.loss_mask)
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{name} {length}" for name, length in lengths.items())
        yield "length", f"lengths disagree: {said}", _MAKE
    if len(raw.input_ids) > expected.context_length:
        message = f"has {len(raw.input_ids)} tokens, the target's context is {expected.context_length}"
        yield "too_long", message, "check the target, or leave it out with skip_bad=true"


def _type_faults(raw: RawSample) -> Iterator[Fault]:
    ids = raw.input_ids
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        yield "dtype", f"token ids are {ids.dtype}, expected integers", _MAKE
    types = {raw.aux_hidden_states.dtype, raw.last_hidden_states.dtype}
    if not types <= set(FLOATS):
        said = ", ".join(sorted(map(str, types)))
        fix = "dump them as bfloat16, float16 or float32: quantized states are not read"
        yield "dtype", f"hidden states are {said}", fix
    elif len(types) > 1:
        message = f"aux hidden states are {raw.aux_hidden_states.dtype}, last ones {raw.last_hidden_states.dtype}"
        yield "dtype", message, "dump both in one type"


def _value_faults(raw: RawSample, expected: Expected) -> Iterator[Fault]:
    ids = raw.input_ids
    if not ids.is_floating_point() and not ids.is_complex():
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest < 0 or highest >= expected.vocab_size:
            message = (
                f"holds token ids {lowest} to {highest}, the target's vocabulary is 0 to {expected.vocab_size - 1}"
            )
            yield "vocabulary", message, "give the target whose tokenizer made these ids"
        elif media := sorted(expected.non_text_ids.intersection(ids.tolist())):
            message = f"holds {media}, which stand for pictures or video; only text is imported"
            yield "not_text", message, "leave it out, or pass skip_bad=true"
    mask = raw.loss_mask
    if mask is not None and not bool(((mask == 0) | (mask == 1)).all()):
        yield "loss_mask", "its loss mask holds other values than 0 and 1", _MAKE
