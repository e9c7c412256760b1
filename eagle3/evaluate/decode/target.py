"""The target with a key/value cache that holds one sequence, and reads a tree of drafts behind it in one pass.

Legend: N drafts, S cached tokens, A aux layers, H target hidden, V target vocab.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from eagle3.errors import problem_error
from eagle3.evaluate.decode.tree import Tree
from eagle3.target.hooks import layer_outputs
from eagle3.target.spec import TargetSpec

_SLIDING = "sliding_attention"


@dataclass(frozen=True, eq=False)
class Seen:
    """What the target says of the tokens that it read.

    Attributes:
        logits: [n, V], for the token after each; of a prompt, after its last token only.
        aux: [n, A * H], the captured layers' outputs, concatenated, of every token.
    """

    logits: Tensor
    aux: Tensor


class CachedTarget:
    """A frozen target at one answer at a time.

    Args:
        model: on its device, in eval mode.
        output_indices: layers whose outputs the drafter reads, ascending.
    """

    def __init__(self, model: PreTrainedModel, spec: TargetSpec, output_indices: Sequence[int]) -> None:
        self.model = model
        self.spec = spec
        self.output_indices = tuple(output_indices)
        accepted = inspect.signature(type(model).forward).parameters
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"
        self._cache = DynamicCache()
        self._read = 0

    @property
    def length(self) -> int:
        """S, after `keep`."""
        return int(self._cache.get_seq_length())

    @torch.inference_mode()
    def prefill(self, prompt: Sequence[int]) -> Seen:
        """Starts over with a prompt."""
        # Without a config every layer keeps all it has read: a sliding one that forgets could not drop drafts.
        self._cache = DynamicCache()
        self._read = 0
        return self._forward(prompt, range(len(prompt)), None, 1)

    @torch.inference_mode()
    def verify(self, last: int, tree: Tree) -> Seen:
        """Reads the last committed token and the drafts after it, N + 1 rows; call `keep` next."""
        depths, past = tree.depths, self.length
        self._read = len(depths)
        return self._forward([last, *tree.tokens], [past + depth for depth in depths], tree, 0)

    def keep(self, path: Sequence[int]) -> None:
        """Drops of what `verify` read all but these nodes (the root included), in order."""
        past = self.length - self._read
        rows = torch.tensor([*range(past), *(past + node for node in path)], device=self.model.device)
        whole = list(path) == list(range(len(path)))
        for layer in self._cache.layers:
            assert isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None
            if whole:  # the leading nodes, as of every chain
                layer.keys, layer.values = (part[..., : len(rows), :] for part in (layer.keys, layer.values))
            else:
                layer.keys, layer.values = (part.index_select(-2, rows) for part in (layer.keys, layer.values))
        self._read = 0

    def _forward(self, tokens: Sequence[int], positions: Sequence[int], tree: Tree | None, last: int) -> Seen:
        device = self.model.device
        inputs: dict[str, Any] = {
            "input_ids": torch.tensor([list(tokens)], device=device),
            "position_ids": torch.tensor([list(positions)], device=device),
            "attention_mask": None if tree is None else self._masks(tree, positions),
            self._cache_name: self._cache,
            "use_cache": True,
            "logits_to_keep": last,
        }
        with layer_outputs(self.model, self.spec, self.output_indices) as taken:
            output = self.model(**inputs)
        logits: Tensor = output.logits[0]
        if logits.isnan().any():
            fix = "check that the checkpoint is whole; float16 may be too narrow for it (target.dtype)"
            raise problem_error("target", "target.not_finite", "its logits hold NaN", fix)
        return Seen(logits, torch.cat([taken[index] for index in self.output_indices], -1)[0])

    def _masks(self, tree: Tree, positions: Sequence[int]) -> Tensor | dict[str, Tensor]:
        """What each draft attends to: [1, 1, N + 1, S + N + 1], 0 or the type's least number; by the layers' types
        where there are several."""
        past = positions[0]
        sees = torch.cat([torch.ones(len(positions), past, dtype=torch.bool), tree.sees()], 1)
        config = self.model.config
        window = getattr(config, "sliding_window", None)
        types = getattr(config, "layer_types", None)
        if window is None or (types is not None and _SLIDING not in types):
            return self._additive(sees)
        keys = torch.tensor([*range(past), *positions])
        near = sees & (keys > torch.tensor(list(positions))[:, None] - window)
        if types is None:  # every layer slides
            return self._additive(near)
        return {"full_attention": self._additive(sees), _SLIDING: self._additive(near)}

    def _additive(self, sees: Tensor) -> Tensor:
        dtype = self.model.dtype
        mask = torch.zeros(sees.shape, dtype=dtype).masked_fill(~sees, torch.finfo(dtype).min)
        return mask[None, None].to(self.model.device)
