"""What a sample costs the training step, counted from its tokens and supervised tokens alone.

The step follows the loss mask (docs/training-step.md, "What is not computed"): a chain, of which there is about one a
supervised token, goes through query, attention, MLP and head at every TTT step, forward and backward; any other token
takes only `fc` and its step-0 key and value. The unit is a floating-point operation: a product with a matrix of P
parameters takes 2 P a row forward, as much for the matrix's gradient, and as much for the row's own. Frozen matrices
have no gradient, and the row's own is not made where what is below is frozen (`fc`, the embedding's half of q, k, v).

Left out, because it is the same for every process or small: what a micro-batch takes whatever is in it (the weights'
gradients are written once; about 7 ms for Kimi-K2.5's drafter on an H200), norms, activations, and the last K - 1
tokens of each answer, whose chains live shorter.

Legend: T tokens, L supervised ones, K TTT steps, q the width of all queries, p that of all keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eagle3.draft.config import DraftConfig, TTTSettings

_FORWARD, _MATRIX, _ROW = 2, 2, 2
"""Operations a parameter and row: the product, the matrix's gradient, the row's gradient."""
_ATTENDED, _NEEDED = 14, 12
"""Operations a key and element of the query: forward scores and values (4), backward with the scores made anew (10);
and without making them anew, which saves memory and is no part of the model."""


@dataclass(frozen=True)
class Work:
    """How much some samples are.

    Attributes:
        tokens: T, over all samples.
        supervised: L, likewise.
        keys: the step-0 keys that all their chains attend to: L * T / 2 of each sample, added up.
    """

    tokens: int
    supervised: int
    keys: int


@dataclass(frozen=True)
class Cost:
    """The cost of samples, in floating-point operations.

    Attributes:
        token: of each token.
        chain: of each supervised token besides, its attention aside.
        attended: of each supervised token besides, for each step-0 key that its chain attends to.
    """

    token: int
    chain: int
    attended: int

    @classmethod
    def of(cls, config: DraftConfig, ttt: TTTSettings) -> Cost:
        """Of samples that train a drafter of this shape."""
        hidden, steps = config.hidden_size, ttt.steps
        query = config.num_attention_heads * config.head_dim
        pair = 2 * config.num_key_value_heads * config.head_dim
        fc = config.num_aux * config.target_hidden_size * hidden
        head = config.draft_vocab_size * hidden
        frozen, trained = _FORWARD + _MATRIX, _FORWARD + _MATRIX + _ROW
        step = 2 * query * hidden + 3 * hidden * config.intermediate_size + head  # q's hidden half and o
        own = pair * hidden * (steps - 1)  # keys and values of later steps
        return cls(
            token=frozen * (fc + pair * hidden) + trained * pair * hidden,
            chain=trained * (steps * step + own) + frozen * query * hidden + _FORWARD * head,
            attended=_ATTENDED * query * steps,
        )

    def sample(self, tokens: int, supervised: int) -> int:
        """Of a document of T tokens with L supervised ones, which are taken to be spread evenly over it."""
        return tokens * self.token + supervised * (self.chain + self.attended * tokens // 2)

    def needed(self, work: Work, rows: Sequence[float]) -> float:
        """Of a step on these samples, as its loss needs it: an answer's last chains live shorter, and nothing is made
        anew.

        Args:
            rows: [K] chains at each TTT step, over all samples.
        """
        lived = sum(rows) / len(rows)
        attended = work.keys * self.attended * _NEEDED / _ATTENDED * lived / max(work.supervised, 1)
        return work.tokens * self.token + lived * self.chain + attended
