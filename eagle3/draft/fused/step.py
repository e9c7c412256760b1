"""One batch, forward and backward, chunk of chains by chunk.

What chunks share is computed once: the embedding's half of q, k and v (the same rows at every step, only shifted), and
step 0's keys and values.

Shapes: S sources, C chains of the batch, K TTT steps, H hidden, D draft vocab, d head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import torch

from eagle3.draft.config import DraftConfig, Objective
from eagle3.draft.fused.chunk import ChunkStep, Rows
from eagle3.draft.fused.gemm import add_product, product
from eagle3.draft.fused.layout import Chunk
from eagle3.draft.fused.weights import Gradients, Weights
from eagle3.draft.rope import cos_sin


@dataclass(frozen=True, eq=False)
class Inputs:
    """What the step reads of a batch.

    Attributes:
        hidden: [S, H], step 0's states.
        embedded: [S, H], the embedding of the token after each source.
        positions: int64 [S].
        chains: int64 [C], each chain's source.
        chunks: the chains, cut up.
        teacher: [C, D], the target's logits on the draft vocab.
        known: bool [C], whether the target's greedy token there is in the draft vocab.
        scales: [K], what the loss of a step's terms is multiplied with.
        objective: what a term's loss is.
    """

    hidden: torch.Tensor
    embedded: torch.Tensor
    positions: torch.Tensor
    chains: torch.Tensor
    chunks: list[Chunk]
    teacher: torch.Tensor
    known: torch.Tensor
    scales: torch.Tensor
    objective: Objective


class Step:
    """The computation of one batch.

    Args:
        ops: `plain` or `cuda`.
        config: the drafter's shape.
        weights: in the type to compute in.
        inputs: the batch.
        gradients: where weights' gradients go; None computes the loss alone.
    """

    def __init__(
        self, ops: ModuleType, config: DraftConfig, weights: Weights, inputs: Inputs, gradients: Gradients | None
    ) -> None:
        self.ops, self.config, self.weights, self.inputs, self.gradients = ops, config, weights, inputs, gradients
        self.pair_heads = 2 * config.num_key_value_heads
        self.rope_heads = config.num_key_value_heads
        self.every = torch.arange(len(inputs.hidden), dtype=torch.int32, device=inputs.hidden.device)
        self.turn = self.turn_at(inputs.positions)
        hidden, eps, qkv = inputs.hidden, config.rms_norm_eps, weights.qkv
        embedded = ops.norm(inputs.embedded, weights.norms["input_layernorm"], eps)[0]
        self.shared_query = product(embedded.index_select(0, inputs.chains), qkv.embedded_query.T)
        self.shared_pair = product(embedded, qkv.embedded_pair.T)
        self.first, self.first_factors = ops.norm(hidden, weights.norms["hidden_norm"], eps)
        self.keys_values = hidden.new_empty(len(hidden), self.pair_heads, config.head_dim)
        projected = product(self.first, qkv.hidden_pair.T)
        ops.rotate_in(projected, self.shared_pair, self.every, 0, self.turn, self.rope_heads, self.keys_values)
        if gradients is None:
            return
        self.hidden_grad = torch.zeros_like(hidden)
        dtype = ops.wide(hidden.dtype)
        self.shared_query_grad = torch.zeros_like(self.shared_query, dtype=dtype)
        self.shared_pair_grad = torch.zeros_like(self.shared_pair, dtype=dtype)
        self.first_grad = torch.zeros_like(hidden)
        group = config.num_attention_heads // config.num_key_value_heads
        self.source_sums = ops.source_sums(len(hidden), config.num_key_value_heads, group, config.head_dim, hidden)

    def turn_at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [.., d / 2] of positions, in the type that sums are kept in."""
        cos, sin = cos_sin(self.config.rope, self.config.head_dim, positions)
        dtype = self.ops.wide(self.inputs.hidden.dtype)
        return cos.to(dtype), sin.to(dtype)

    def run(self) -> Iterator[Rows]:
        """Each chunk's rows; when it ends, `hidden_grad` [S, H] and the weights' gradients are complete."""
        for chunk in self.inputs.chunks:
            yield ChunkStep(self, chunk).run()
        if self.gradients is not None:
            self._finish(self.gradients)

    def _finish(self, gradients: Gradients) -> None:
        """Backward through what all chunks share."""
        ops, weights, inputs, eps = self.ops, self.weights, self.inputs, self.config.rms_norm_eps
        grad = torch.empty_like(self.shared_pair)
        total = self.source_sums.sum(0).to(grad.dtype)
        ops.rotate_out(total, self.every, 0, self.turn, self.rope_heads, self.shared_pair_grad, grad)
        gradients.add_pair(grad, self.first)
        add_product(self.first_grad, grad, weights.qkv.hidden_pair)
        sums = gradients.norm_sums["hidden_norm"]
        ops.norm_grad(
            inputs.hidden, self.first_factors, weights.norms["hidden_norm"], self.first_grad, sums,
            add=self.hidden_grad, out=self.hidden_grad,
        )  # fmt: skip
        unit = ops.norm(inputs.embedded, torch.ones_like(weights.norms["input_layernorm"]), eps)[0]
        query = self.shared_query_grad.to(unit.dtype), unit.index_select(0, inputs.chains)
        gradients.add_embedded(weights, query, (self.shared_pair_grad.to(unit.dtype), unit))
