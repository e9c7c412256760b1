"""Capturing a target's states, the same for every engine: what an engine promises, and how its work is batched.

Legend: T tokens of a sample, A aux layers, H target hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from eagle3.data.chat import TokenSample
from eagle3.data.store_sample import StoredSample
from eagle3.errors import Problem, raise_problems


@dataclass(frozen=True)
class Capture:
    """States of one sample.

    Attributes:
        aux_hidden_states: [T, A * H], the outputs of the captured layers, ascending, concatenated.
        last_hidden_states: [T, H], post-norm or pre-norm as the engine was asked for.
    """

    aux_hidden_states: torch.Tensor
    last_hidden_states: torch.Tensor


class CaptureEngine(Protocol):
    """Runs the target. A sample's states must not depend on the samples it is run with."""

    def capture(self, batch: Sequence[Sequence[int]]) -> list[Capture]:
        """States of each sample (token ids) of a batch, in its order, on the CPU."""
        ...


def capture_samples(
    engine: CaptureEngine, ids: Sequence[str], batch: Sequence[Sequence[int]], aux_width: int
) -> list[Capture]:
    """Runs one batch and refuses states that are not one row a token.

    Args:
        ids: names of the samples, for errors.
        batch: their token ids.
        aux_width: A * H.

    Raises:
        ProblemsError: kind `capture.rows` or `capture.width`, for each sample whose states do not fit it.
    """
    captures = engine.capture(batch)
    if len(captures) != len(batch):
        message = f"the engine returned {len(captures)} samples for {len(batch)}"
        raise_problems([Problem(", ".join(ids), "capture.rows", message, _FIX)])
    problems = []
    for name, tokens, capture in zip(ids, batch, captures, strict=True):
        for key, states in vars(capture).items():
            if len(states) != len(tokens):
                message = f"the engine returned {len(states)} rows of {key} for {len(tokens)} tokens"
                problems.append(Problem(name, "capture.rows", message, _FIX))
        if capture.aux_hidden_states.shape[1:] != (aux_width,):
            message = f"aux states are {tuple(capture.aux_hidden_states.shape[1:])} wide, expected {aux_width}"
            problems.append(Problem(name, "capture.width", message, _FIX))
    raise_problems(problems)
    return captures


def stored_sample(sample: TokenSample, capture: Capture, dtype: torch.dtype) -> StoredSample:
    """A sample with its states, in the store's type."""
    return StoredSample(
        id=sample.id,
        input_ids=torch.tensor(sample.input_ids, dtype=torch.int32),
        loss_mask=torch.tensor(sample.loss_mask, dtype=torch.bool),
        aux_hidden_states=capture.aux_hidden_states.to(dtype),
        last_hidden_states=capture.last_hidden_states.to(dtype),
        source=sample.source,
    )


def batches_by_length(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Groups samples (by index) of similar length, at most `batch_tokens` a group counting padding.

    A sample longer than that is a group of its own. Deterministic: equal input gives equal groups.
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if groups and (len(groups[-1]) + 1) * lengths[index] <= batch_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def shards_by_size(sizes: Sequence[int], max_bytes: int, max_samples: int) -> list[list[int]]:
    """Cuts samples (by index, in order) into shards within both limits; a larger sample has a shard of its own.

    Args:
        sizes: bytes of each stored sample.
    """
    shards: list[list[int]] = []
    filled = 0
    for index, size in enumerate(sizes):
        if shards and filled + size <= max_bytes and len(shards[-1]) < max_samples:
            shards[-1].append(index)
            filled += size
        else:
            shards.append([index])
            filled = size
    return shards


_FIX = "the engine mixes samples up or drops tokens: run it with batch_tokens small, and report this"
