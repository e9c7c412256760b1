"""The target in this process, through Transformers, read by forward hooks.

Hooks reach the raw output of every decoder layer, the last one included (Transformers' own last hidden state is
after the final norm). Rows are padded on the right, under a causal mask, so no sample sees a padding token.

Legend: B rows, T tokens, A aux layers, H target hidden, V target vocab.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from eagle3.config import TargetConfig
from eagle3.data.store_fingerprint import neighbours
from eagle3.errors import Problem, raise_problems
from eagle3.target.capture import Capture
from eagle3.target.hooks import Taken, keep_input, keep_output, layer_outputs
from eagle3.target.resolve import TargetFiles, pick_device
from eagle3.target.spec import TargetSpec, explained_loading
from eagle3.wiring.layers import LayerWiring

_NAMES_SHOWN = 5


def load_model(files: TargetFiles, target: TargetConfig) -> PreTrainedModel:
    """The text model in `target.dtype` on `target.device`, frozen, in eval mode.

    Raises:
        ProblemsError: a weight is missing or of another shape (Transformers would leave it random), a file is
            damaged, or the device does not exist.
    """
    device = pick_device(target.device)
    where = str(files.folder)
    with explained_loading(files.folder), _quiet():
        model, info = files.spec.load(files.folder, getattr(torch, target.dtype))
    fix = "download the checkpoint again, or correct its config.json"
    raise_problems(
        Problem(where, f"target.{kind}_weights", f"{len(info[key])} weights are {kind}: {_some(info[key])}", fix)
        for kind, key in (("missing", "missing_keys"), ("mismatched", "mismatched_keys"))
        if info[key]
    )
    nn.Module.to(model, device)
    return model.eval().requires_grad_(False)


@dataclass(frozen=True)
class Reference:
    """What Transformers itself says of a batch, for the self-check.

    Attributes:
        captures: as `TransformersEngine.capture` gives them, from the same forward pass.
        logits: [T, V] of each sample.
        hidden_states: Transformers' N + 1 entries, each a list with [T, H] of each sample; the last is post-norm.
    """

    captures: list[Capture]
    logits: list[torch.Tensor]
    hidden_states: list[list[torch.Tensor]]


class TransformersEngine:
    """Captures `wiring`'s layers and the states that the head reads, before (`pre_norm`) or after the final norm."""

    def __init__(
        self,
        model: PreTrainedModel,
        spec: TargetSpec,
        wiring: LayerWiring,
        last_hidden_states: Literal["post_norm", "pre_norm"],
    ) -> None:
        self.model = model
        self.spec = spec
        self.wiring = wiring
        self.last_hidden_states = last_hidden_states

    @torch.inference_mode()
    def capture(self, batch: Sequence[Sequence[int]]) -> list[Capture]:
        """See `CaptureEngine`; logits are never computed."""
        with self._hooks() as taken:
            self.model.base_model(**self._inputs(batch))
        return self._captures(batch, taken)

    @torch.inference_mode()
    def reference(self, batch: Sequence[Sequence[int]]) -> Reference:
        """Captures a (small) batch together with the model's own logits and hidden states."""
        with self._hooks() as taken:
            output = self.model(**self._inputs(batch), output_hidden_states=True)
        return Reference(
            captures=self._captures(batch, taken),
            logits=_rows(output.logits, batch),
            hidden_states=[_rows(states, batch) for states in output.hidden_states],
        )

    def neighbours(self, tokens: Sequence[int]) -> dict[int, torch.Tensor]:
        """States [T, H] of the embedding and of the layers before and after the captured ones, by output index."""
        others = neighbours(self.wiring)
        if not others:
            return {}
        wiring = LayerWiring(tuple(others), self.wiring.num_hidden_layers)
        beside = TransformersEngine(self.model, self.spec, wiring, self.last_hidden_states)
        states = beside.capture([tokens])[0].aux_hidden_states.chunk(len(others), dim=-1)
        return dict(zip(others, states, strict=True))

    @torch.inference_mode()
    def normed(self, states: torch.Tensor) -> torch.Tensor:
        """The model's own final norm of [T, H], on the CPU."""
        output: torch.Tensor = self.spec.final_norm(self.model)(states.to(self.model.device))
        return output.cpu()

    def _inputs(self, batch: Sequence[Sequence[int]]) -> dict[str, Any]:
        lengths = torch.tensor([len(tokens) for tokens in batch])
        rows = [torch.tensor(tokens, dtype=torch.long) for tokens in batch]
        # Any id does for padding: the mask is by length, since a target's PAD may be its EOS.
        input_ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        positions = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        mask = positions < lengths[:, None]
        device = self.model.device
        return {
            "input_ids": input_ids.to(device),
            "attention_mask": mask.long().to(device),
            "position_ids": positions.to(device),
            "use_cache": False,
        }

    @contextmanager
    def _hooks(self) -> Iterator[Taken]:
        """Fills {output index: [B, T, H], "last": [B, T, H]} during a forward pass."""
        norm = self.spec.final_norm(self.model)
        with layer_outputs(self.model, self.spec, self.wiring.output_indices) as taken:
            if self.last_hidden_states == "pre_norm":
                handle = norm.register_forward_pre_hook(partial(keep_input, taken, "last"), with_kwargs=True)
            else:
                handle = norm.register_forward_hook(partial(keep_output, taken, "last"))
            try:
                yield taken
            finally:
                handle.remove()

    def _captures(self, batch: Sequence[Sequence[int]], taken: Taken) -> list[Capture]:
        aux = torch.cat([taken[index] for index in self.wiring.output_indices], dim=-1)
        pairs = zip(_rows(aux, batch), _rows(taken["last"], batch), strict=True)
        return [Capture(aux_rows, last_rows) for aux_rows, last_rows in pairs]


def _rows(states: torch.Tensor, batch: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """[B, T, width] -> each sample's own rows, on the CPU, as storage of their own."""
    return [row[: len(tokens)].cpu().clone() for row, tokens in zip(states, batch, strict=True)]


def _some(keys: Iterable[Any]) -> str:
    """Names of weights; a mismatched one comes as (name, shape found, shape expected)."""
    names = sorted(key if isinstance(key, str) else f"{key[0]} {list(key[1])}, not {list(key[2])}" for key in keys)
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more


@contextmanager
def _quiet() -> Iterator[None]:
    """Transformers' key report lists, as warnings, the vision weights that a text model leaves out on purpose."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
