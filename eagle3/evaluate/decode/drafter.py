"""The drafter as a server runs it: a key/value cache of the committed tokens, and beside it the round's own drafts.

Row i of the cache is the state of token i beside the embedding of token i + 1, at position i. After a round the kept
tokens are read (again) with the target's states of them; the drafts' own keys are dropped. A draft attends to the whole
cache, to the drafts it follows and to itself; its position is one more than that of what it follows.

Legend: n rows, S cached rows, A aux layers, H hidden, D draft vocab, h query heads, v key/value heads, d head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle3.draft.model import DraftModel
from eagle3.draft.rope import cos_sin
from eagle3.draft.vocab import DraftVocab
from eagle3.errors import problem_error
from eagle3.evaluate.decode.tree import ancestors


class Drafter:
    """A draft model at one answer at a time.

    Args:
        model: in eval mode, on its device, in the type that it computes in.
        vocab: which target ids its head stands for.
    """

    _keys: Tensor
    _values: Tensor
    _draft_keys: Tensor
    _draft_values: Tensor
    _outputs: Tensor
    _parents: list[int]

    def __init__(self, model: DraftModel, vocab: DraftVocab) -> None:
        self.model = model
        self.vocab = vocab.to("cpu")
        self.reset()

    def reset(self) -> None:
        """Forgets everything."""
        weight, config = self.model.fc.weight, self.model.config
        self._keys = weight.new_empty(0, config.num_key_value_heads, config.head_dim)
        self._values = self._keys
        self._drop_drafts(weight.new_empty(0, config.hidden_size))

    @property
    def length(self) -> int:
        """S."""
        return len(self._keys)

    @torch.inference_mode()
    def extend(self, aux: Tensor, following: Sequence[int]) -> None:
        """Reads committed tokens, and drops the round's drafts.

        Args:
            aux: [n, A * H], the target's states of the next n tokens.
            following: the token after each of them; the last one is the root of the next round's tree.
        """
        count = self.length
        positions = torch.arange(count, count + len(following))
        hidden = self.model.fuse(aux)
        sees = torch.ones(len(following), count + len(following), dtype=torch.bool).tril(count)
        output, keys, values = self._layer(hidden, following, positions, self._keys, self._values, sees)
        self._keys, self._values = torch.cat([self._keys, keys]), torch.cat([self._values, values])
        self._drop_drafts(output[-1:])

    @torch.inference_mode()
    def logits(self, nodes: Sequence[int]) -> Tensor:
        """Draft logits [n, D] for what follows nodes of the round, 0 being the root; others must have been fed.

        Raises:
            ProblemsError: kind `decode.not_finite`.
        """
        logits = self.model.logits(self._outputs[list(nodes)])
        if not torch.isfinite(logits).all():
            message = f"the drafter's logits are not finite in {logits.dtype}"
            fix = "compute in float32 (target.dtype), or check the checkpoint"
            raise problem_error("checkpoint", "decode.not_finite", message, fix)
        return logits

    @torch.inference_mode()
    def feed(self, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
        """Reads drafts, so that more can be drafted after them.

        Args:
            tokens: target ids.
            parents: the node that each follows: 0, the root, or one that was fed.

        Returns:
            The new nodes' numbers.
        """
        before = len(self._parents)
        self._parents += parents
        sees = ancestors(self._parents)
        depths = sees.sum(1) - 1  # of the root 0
        nodes = list(range(before + 1, len(self._parents) + 1))
        # The root's key is in the cache already: node n's own key is draft key n - 1.
        mask = torch.cat([torch.ones(len(nodes), self.length, dtype=torch.bool), sees[nodes, 1:]], 1)
        hidden = self.model.handed_on(self._outputs[list(parents)])
        past = torch.cat([self._keys, self._draft_keys]), torch.cat([self._values, self._draft_values])
        output, keys, values = self._layer(hidden, tokens, self.length + depths[nodes] - 1, *past, mask)
        self._draft_keys, self._draft_values = (
            torch.cat([self._draft_keys, keys]),
            torch.cat([self._draft_values, values]),
        )
        self._outputs = torch.cat([self._outputs, output])
        return nodes

    def _drop_drafts(self, root: Tensor) -> None:
        self._outputs = root
        self._parents = []
        self._draft_keys = self._draft_values = self._keys[:0]

    def _layer(
        self, hidden: Tensor, tokens: Sequence[int], positions: Tensor, keys: Tensor, values: Tensor, sees: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The layer's output [n, H] and its new keys and values [n, v, d] of states [n, H] and the tokens beside them.

        Args:
            positions: int64 [n].
            keys, values: [S, v, d], of earlier rows.
            sees: bool [n, S + n].
        """
        model, device = self.model, hidden.device
        attention = model.midlayer.self_attn
        turn = cos_sin(model.config.rope, model.config.head_dim, positions.to(device))
        x = model.midlayer.join(model.embed_tokens(torch.tensor(list(tokens), device=device)), hidden)
        query = attention.query(x, turn)
        own_keys, own_values = attention.key_value(x, turn)
        attended = _attend(query, torch.cat([keys, own_keys]), torch.cat([values, own_values]), sees.to(device))
        return model.midlayer.finish(hidden, attended), own_keys, own_values


def _attend(query: Tensor, keys: Tensor, values: Tensor, sees: Tensor) -> Tensor:
    """[n, h, d] of queries [n, h, d], keys and values [S, v, d], and a bool mask [n, S]."""
    times = query.shape[1] // keys.shape[1]
    turned = [part.transpose(0, 1)[None] for part in (query, keys, values)]
    keys, values = (part.repeat_interleave(times, 1) for part in turned[1:])
    found = F.scaled_dot_product_attention(turned[0], keys, values, attn_mask=sees)
    return found[0].transpose(0, 1)
