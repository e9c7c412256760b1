"""One chunk of chains: all its steps forward, the head with the loss, all its steps backward.

Rows of all steps lie one after another, so that each weight's gradient is one product over them.

Shapes: R chains of a step, N rows of all steps, H hidden, I MLP width, h query heads, v key/value heads, d head width,
D draft vocab, K TTT steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from eagle3.draft.fused.layout import Chunk
from eagle3.draft.fused.weights import Gradients

if TYPE_CHECKING:
    from eagle3.draft.fused.step import Step

HEAD_ROWS = 16128
"""Rows whose logits exist at once: 2 x D bytes each. All steps of a chunk of the default size, so that the head's
gradient is one product."""


@dataclass(frozen=True, eq=False)
class Rows:
    """What each row of a chunk came to.

    Attributes:
        chunk: the rows' chunk.
        losses: [N], of the terms that the loss counts, 0 of others.
        greedy: int64 [N], the draft token.
    """

    chunk: Chunk
    losses: torch.Tensor
    greedy: torch.Tensor


class ChunkStep:
    """The computation of one chunk.

    Args:
        step: the batch.
        chunk: of its chains.
    """

    def __init__(self, step: Step, chunk: Chunk) -> None:
        self.step, self.chunk, self.ops, self.weights = step, chunk, step.ops, step.weights
        self.offsets, self.counts = chunk.offsets, chunk.counts
        self.sources = chunk.ends[: chunk.counts[0]]
        self.chains = self.sources.long()
        config, like, rows = step.config, step.inputs.hidden, self.offsets[-1]
        hidden, heads, width = config.hidden_size, config.num_attention_heads, config.head_dim
        wide = self.ops.wide(like.dtype)

        def room(*shape: int, dtype: torch.dtype = like.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=like.device)

        self.products = products = step.weights.products
        self.normed, self.normed_factors = products.room(rows, hidden, like), room(rows, dtype=wide)
        self.queries, self.attended = room(rows, heads, width), room(rows, heads, width)
        self.attended_rows = products.operand(self.attended.flatten(1))
        self.log_sums, self.means = room(rows, heads, dtype=wide), room(rows, heads, dtype=wide)
        self.own = room(len(self.counts) - 1, self.counts[0], step.pair_heads, width)
        self.middle, self.middle_normed = room(rows, hidden), products.room(rows, hidden, like)
        self.middle_factors = room(rows, dtype=wide)
        self.gates, self.ups = (room(rows, config.intermediate_size) for _ in range(2))
        self.acts = products.room(rows, config.intermediate_size, like)
        self.outputs = room(rows, hidden)
        self.handed_on = room(rows, hidden) if config.norm_output else self.outputs
        self.start = like.index_select(0, self.chains)
        self.turns = [
            step.turn_at(step.inputs.positions[self.chains[:count]] + k) for k, count in enumerate(self.counts)
        ]

    def run(self) -> Rows:
        """The chunk's losses; with gradients, also everything that it adds to them."""
        for k in range(len(self.counts)):
            if self.counts[k]:
                self._forward(k)
        rows, grad, factors = self._head()
        if self.step.gradients is not None:
            self._backward(self.step.gradients, grad, factors)
        return rows

    def _rows(self, k: int) -> slice:
        return slice(self.offsets[k], self.offsets[k + 1])

    def _state(self, k: int) -> torch.Tensor:
        """[R, H], what step k starts from."""
        return self.start if k == 0 else self.handed_on[self._rows(k - 1)][: self.counts[k]]

    def _forward(self, k: int) -> None:
        ops, step, weights, products = self.ops, self.step, self.weights, self.products
        eps = step.config.rms_norm_eps
        at, count, state = self._rows(k), self.counts[k], self._state(k)
        normed = self.normed.place(at)
        self.normed_factors[at] = ops.norm(state, weights.norms["hidden_norm"], eps, normed)[1]
        heads, ranks, turn = step.config.num_attention_heads, self.chunk.ranks[:count], self.turns[k]
        rows = self.normed.rows(at, normed)
        if k == 0:
            query = products.forward(rows, "hidden_query")
        else:
            query, pair = products.forward(rows, "hidden_all").split_with_sizes(
                [weights.qkv.query_width, step.shared_pair.shape[1]], 1
            )
            own = self.own[k - 1, :count]
            ops.rotate_in(pair, step.shared_pair, self.sources[:count], k, turn, step.rope_heads, own)
        ops.rotate_in(query, step.shared_query, ranks, k, turn, heads, self.queries[at])
        ops.attend(
            self.queries[at], step.keys_values, self.own[:k], self.chunk.begins[at], self.chunk.ends[at],
            self.attended[at], self.log_sums[at],
        )  # fmt: skip
        middle = self.middle[at]
        attended = self.attended_rows.rows(at, self.attended_rows.place(at))
        products.forward(attended, "o_proj", middle, state)
        inner = self.middle_normed.place(at)
        self.middle_factors[at] = ops.norm(middle, weights.norms["post_attention_layernorm"], eps, inner)[1]
        rows = self.middle_normed.rows(at, inner)
        products.forward(rows, "gate_proj", self.gates[at])
        products.forward(rows, "up_proj", self.ups[at])
        acts = self.acts.swiglu(at, self.gates[at], self.ups[at])
        products.forward(acts, "down_proj", self.outputs[at], middle)
        if step.config.norm_output:
            ops.norm(self.outputs[at], weights.norms["norm"], eps, self.handed_on[at])

    def _head(self) -> tuple[Rows, torch.Tensor, torch.Tensor]:
        """The rows, the gradient [N, H] of `norm`'s results, and that norm's factors [N]."""
        chunk, inputs = self.chunk, self.step.inputs
        total = self.offsets[-1]
        counted = chunk.active & inputs.known.index_select(0, chunk.teachers)
        scales = inputs.scales.index_select(0, chunk.steps) * counted
        grad, factors = torch.empty_like(self.outputs), self.normed_factors.new_empty(total)
        pieces = [slice(begin, min(begin + HEAD_ROWS, total)) for begin in range(0, total, HEAD_ROWS)]
        found = [self._head_piece(at, scales, grad, factors) for at in pieces]
        losses, greedy = (torch.cat(parts) for parts in zip(*found, strict=True))
        return Rows(chunk, losses * counted, greedy), grad, factors

    def _head_piece(
        self, at: slice, scales: torch.Tensor, grad: torch.Tensor, factors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses and greedy draft tokens of these rows; puts their gradients and factors in place."""
        inputs, products, weights = self.step.inputs, self.products, self.weights
        normed, factors[at] = self.ops.norm(self.outputs[at], weights.norms["norm"], self.step.config.rms_norm_eps)
        every, head_rows = slice(0, len(normed)), products.operand(normed)
        logits = products.forward(head_rows.rows(every, normed), "lm_head")
        found: tuple[torch.Tensor, torch.Tensor] = self.ops.row_losses(
            logits, inputs.teacher, self.chunk.teachers[at], scales[at], inputs.objective
        )
        if self.step.gradients is not None:
            slopes = products.operand(logits)
            products.backward(slopes.rows(every, logits), "lm_head", grad[at])
            self.step.gradients.add("lm_head", slopes.columns(), head_rows.columns())
        return found

    def _backward(self, gradients: Gradients, output_grad: torch.Tensor, factors: torch.Tensor) -> None:
        """All steps backward, then what all their rows add to the gradients.

        Args:
            output_grad: [N, H], the gradient of `norm`'s results; overwritten with that of the layer's outputs.
            factors: [N], of that norm.
        """
        step, operand = self.step, self.products.operand
        self.output_grad, self.output_factors = output_grad, factors
        self.middle_grad, self.attended_grad = torch.empty_like(self.middle), torch.empty_like(self.attended)
        self.qkv_grad = output_grad.new_empty(len(output_grad), len(self.weights.qkv.whole))
        self.output_slopes, self.middle_slopes, self.qkv_slopes, self.gate_slopes, self.up_slopes = (
            operand(part) for part in (output_grad, self.middle_grad, self.qkv_grad, self.gates, self.ups)
        )
        carry = None
        for k in reversed(range(len(self.counts))):
            if self.counts[k]:
                carry = self._backward_step(k, gradients, carry)
        step.ops.attend_grad_sources(
            self.queries, step.keys_values, self.attended_grad, self.log_sums, self.means, self.chunk, step.source_sums
        )
        gradients.add("hidden_all", self.qkv_slopes.columns(), self.normed.columns())
        gradients.add("o_proj", self.middle_slopes.columns(), self.attended_rows.columns())
        inner = self.middle_normed.columns()
        gradients.add("gate_proj", self.gate_slopes.columns(), inner)
        gradients.add("up_proj", self.up_slopes.columns(), inner)
        gradients.add("down_proj", self.output_slopes.columns(), self.acts.columns())

    def _backward_step(self, k: int, gradients: Gradients, carry: torch.Tensor | None) -> torch.Tensor | None:
        """One step backward.

        Args:
            k: the step.
            gradients: norms' are added to here.
            carry: [R of step k + 1, H], the gradient of what this step hands on; None after the last.

        Returns:
            [R, H], the gradient of what the step started from; at step 0 it goes to the batch's instead.
        """
        ops, step, weights = self.ops, self.step, self.weights
        at, norms, products = self._rows(k), weights.norms, self.products
        grad = self.output_grad[at]
        if carry is not None and step.config.norm_output:
            grad[: len(carry)] += carry
            carry = None
        ops.norm_grad(
            self.outputs[at], self.output_factors[at], norms["norm"], grad, gradients.norm_sums["norm"], carry, grad
        )
        acts = products.backward(self.output_slopes.rows(at, grad), "down_proj")
        gates, ups = self.gate_slopes.swiglu_grad(at, self.gates[at], self.ups[at], acts, self.up_slopes)
        del acts
        inner = products.backward(gates, "gate_proj")
        products.backward(ups, "up_proj", inner, inner)
        middle = ops.norm_grad(
            self.middle[at], self.middle_factors[at], norms["post_attention_layernorm"], inner,
            gradients.norm_sums["post_attention_layernorm"], grad, self.middle_grad[at],
        )  # fmt: skip
        products.backward(self.middle_slopes.rows(at, middle), "o_proj", self.attended_grad[at].flatten(1))
        normed = self._attention_grad(k)
        if k == 0:
            step.first_grad.index_copy_(0, self.chains, normed)
            step.hidden_grad.index_copy_(0, self.chains, middle)
            return None
        sums = gradients.norm_sums["hidden_norm"]
        return ops.norm_grad(
            self._state(k), self.normed_factors[at], norms["hidden_norm"], normed, sums, middle, normed
        )

    def _attention_grad(self, k: int) -> torch.Tensor:
        """[R, H], the gradient of step k's normed states, by its queries and its own keys and values."""
        ops, step, qkv, chunk = self.ops, self.step, self.weights.qkv, self.chunk
        at, count, turn = self._rows(k), self.counts[k], self.turns[k]
        query = ops.attend_grad_query(
            self.queries[at], step.keys_values, self.own[:k], chunk.begins[at], chunk.ends[at],
            self.attended[at], self.attended_grad[at], self.log_sums[at], self.means[at],
        )  # fmt: skip
        query_grad, pair_grad = self.qkv_grad[at, : qkv.query_width], self.qkv_grad[at, qkv.query_width :]
        heads, ranks = step.config.num_attention_heads, chunk.ranks[:count]
        ops.rotate_out(query, ranks, k, turn, heads, step.shared_query_grad, query_grad)
        if k == 0:
            pair_grad.zero_()  # those of step 0 belong to the sources, see `Step`
        else:
            pair = ops.attend_grad_own(k, self.queries, self.own, self.attended_grad, self.log_sums, self.means, chunk)
            ops.rotate_out(pair, self.sources[:count], k, turn, step.rope_heads, step.shared_pair_grad, pair_grad)
        return self.products.backward(self.qkv_slopes.rows(at, self.qkv_grad[at]), "hidden_all")
