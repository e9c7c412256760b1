"""What a run takes of a GPU's memory: the step's ledger, what several micro-batches and processes add, the optimiser.

Legend: T tokens, L supervised ones, R chains, S sources, h query heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from eagle3.config import MomentKind
from eagle3.draft.config import DraftConfig, TTTSettings
from eagle3.draft.cost import Cost
from eagle3.draft.fused.ledger import Entry, Ledger, Phase, span
from eagle3.draft.fused.memory import Sizes, Types, copied_bytes, counted_bytes, head_parameters, step_ledger
from eagle3.draft.model import DraftModel
from eagle3.train.moments import moment_bytes
from eagle3.train.muon import muon_workspace

_EVALUATED_TOKENS = 8192
"""Of a forward pass of `evaluate.acceptance`."""
_STATES = 20
"""Vectors of the hidden width that a chain has in `ttt.unroll`, about."""
_SCORE_BYTES = 12
"""Of a query, a head and a key in `draft.attention`: scores, their copy, the softmax in float32 and what it reads."""


@dataclass(frozen=True)
class Run:
    """What the memory of every micro-batch of a run depends on.

    Attributes:
        draft: the drafter.
        ttt: with a chunk.
        types: of weights, states and the target's head.
        processes: ranks.
        moments: what the optimizer keeps.
    """

    draft: DraftConfig
    ttt: TTTSettings
    types: Types
    processes: int = 1
    moments: MomentKind = "float32"

    @property
    def trained(self) -> int:
        """Parameters."""
        return self.draft.parameter_counts()["trainable"]

    @property
    def cost(self) -> Cost:
        """What samples cost, by which they are dealt to processes."""
        return Cost.of(self.draft, self.ttt)

    @cached_property
    def moment_bytes(self) -> int:
        """Bytes of the optimizer's moments."""
        with torch.device("meta"):
            return moment_bytes(DraftModel(self.draft), self.moments)


@dataclass(frozen=True)
class Place:
    """A micro-batch's place in its window.

    Attributes:
        number: micro-batches of the window on this process.
        others: what else is counted in the window on this process before its first backward pass, as one batch.
    """

    number: int
    others: Sizes


def run_ledger(run: Run, sizes: Sizes, place: Place) -> Ledger:
    """A micro-batch once the moments are there, that is from the second step on."""
    return step_ledger(run.draft, run.types, sizes) + _run_entries(run, place)


def _run_entries(run: Run, place: Place) -> Iterator[Entry]:
    gradients = run.trained * run.types.weights
    kept = "Muon's momentum, AdamW's moments" if run.moments == "muon" else f"AdamW's moments, {run.moments}"
    yield Entry("moments", kept, run.moment_bytes)
    if run.moments == "muon":
        yield Entry("workspace", "Muon's iterations", muon_workspace(run.draft), ("update",))
    through: tuple[Phase, ...] = ("autograd",) if place.number == 1 else ("fuse", "autograd")
    yield Entry("weights", "those copies, kept through the window", copied_bytes(run.draft, run.types), through)
    others = counted_bytes(run.draft, place.others)
    yield Entry("teacher", "of the window's other micro-batches", others, span("count", "autograd"))
    if place.number > 1:
        yield Entry("gradients", "sum of the micro-batches before", gradients, span("fuse", "autograd"))
    if run.processes > 1:  # `gradient_as_bucket_view`: after the exchange they are the gradients
        yield Entry("gradients", "DDP's buckets", gradients, span("count", "autograd"))


def evaluation_bytes(run: Run, samples: Sequence[tuple[int, int]], depths: int | None = None) -> int:
    """About what an evaluation takes, which computes all chains at once, with each document's scores as a matrix.

    Args:
        samples: (T, L) of the held-out samples.
        depths: drafts a round; default: the TTT steps.
    """
    kept = run.trained * (run.types.weights + 2) + run.moment_bytes
    kept += run.draft.vocab_size * run.draft.hidden_size * run.types.embedding
    kept += head_parameters(run.draft, run.types) * run.types.head
    kept += run.trained * run.types.weights * (run.processes > 1)
    return kept + unrolled_bytes(run, samples, run.ttt.steps if depths is None else depths)


def unrolled_bytes(run: Run, samples: Sequence[tuple[int, int]], depths: int) -> int:
    """Batch and activations of an evaluation: more than it takes, by up to a third where documents are long."""
    draft = run.draft
    scores = _SCORE_BYTES * draft.num_attention_heads * max(tokens * supervised for tokens, supervised in samples)
    tokens = max(_EVALUATED_TOKENS, max(tokens for tokens, _ in samples))
    chains = tokens * sum(supervised for _, supervised in samples) // sum(tokens for tokens, _ in samples)
    states = tokens * (draft.num_aux * (run.types.states + 2) + 8) * draft.hidden_size
    pair = 2 * draft.num_key_value_heads * draft.head_dim
    own = chains * pair * 2 * (2 * depths - 3 if depths > 1 else 0)  # those of later steps, and as they were before
    attention = scores + own + chains * _STATES * draft.hidden_size * 2
    return states + max(attention, chains * 2 * max(3 * draft.intermediate_size, draft.draft_vocab_size))
