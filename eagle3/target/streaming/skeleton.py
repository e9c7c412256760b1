"""A target's model without weights: its parts, how each is filled from the checkpoint, and what its forward hands to
each layer.

Legend: T tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from eagle3.errors import Problem, raise_problems
from eagle3.target.resolve import TargetFiles
from eagle3.target.streaming.checkpoint import Checkpoint, Recipe, raw_bytes
from eagle3.target.streaming.fused import find_experts
from eagle3.target.streaming.packing import ATTENTION, MicroBatch, packed

LayerInputs = list[dict[str, Any]]
"""For each decoder layer, the keyword arguments that the model's forward gives it."""


class Skeleton:
    """The text model on the meta device, and a recipe for every parameter of it that is needed.

    Args:
        files: the target.
        dtype: that it computes in.
        depth: decoder layers that are needed, from the first.

    Raises:
        ProblemsError: everything about the checkpoint that bars these parts from being read.
    """

    def __init__(self, files: TargetFiles, dtype: torch.dtype, depth: int) -> None:
        self.files = files
        self.dtype = dtype
        self.depth = depth
        self.checkpoint = Checkpoint(files)
        self.checkpoint.check_depth(depth)
        self.model = files.spec.empty(files.folder, dtype).eval().requires_grad_(False)
        self.model.set_attn_implementation(ATTENTION)
        self.base = self.model.base_model
        self.names = {module: name for name, module in self.model.named_modules()}
        layers = files.spec.decoder_layers(self.model)
        self.layers: Sequence[nn.Module] = list(layers)[:depth]
        self.embedding: Any = self.model.get_input_embeddings()
        self.norm: Any = files.spec.final_norm(self.model)
        self.head: Any = self.model.get_output_embeddings()
        self.tied = bool(self.model.config.tie_word_embeddings)
        if self.tied and f"{files.spec.weight_prefix}{self.names[self.head]}.weight" not in self.checkpoint.names:
            self.head = None  # where there is one of its own, Transformers uses that
        problems: list[Problem] = []
        self._recipes: dict[nn.Module, list[Recipe]] = {}
        for module in filter(None, (self.embedding, self.norm, self.head, *self.layers)):
            self._recipes[module], found = self.checkpoint.recipes(module, self.names[module])
            problems += found
        if not problems:
            problems = self.checkpoint.unused(self.all_recipes(), (self.names[module] for module in self._recipes))
        raise_problems(problems, f"cannot read {files.folder}")

    def recipes(self, module: nn.Module) -> list[Recipe]:
        return self._recipes[module]

    def all_recipes(self) -> Iterator[Recipe]:
        """Of every part that is needed."""
        for recipes in self._recipes.values():
            yield from recipes

    def expert_recipes(self, layer: nn.Module) -> list[Recipe]:
        """Those of the layer's fused experts: gate_up, then down; empty without experts."""
        wanted = [f"{name}.{part}" for name, _ in find_experts(layer) for part in ("gate_up_proj", "down_proj")]
        by_key = {recipe.key: recipe for recipe in self._recipes[layer]}
        return [by_key[key] for key in wanted]

    @property
    def pass_bytes(self) -> int:
        """Bytes of the checkpoint that one chunk reads."""
        return sum(raw_bytes(self._recipes[layer]) for layer in self.layers)

    def place(self, device: torch.device) -> None:
        """Puts the rotary tables, which no checkpoint holds, on this device; experts that `fused` does not know then
        use Transformers' own grouped product where they can.
        """
        if device.type == "cuda" and self.dtype == torch.bfloat16:
            self.model.config._experts_implementation = "grouped_mm"
        self.base.rotary_emb = type(self.base.rotary_emb)(config=self.model.config).to(device)

    def inputs(self, micro: MicroBatch) -> tuple[torch.Tensor, LayerInputs]:
        """What the model's own forward computes before its layers: the embedding [T, H], and each layer's arguments.

        The embedding must be filled.
        """
        recorders = [_Recorder(layer) for layer in self.layers]
        layers, norm = self.base.layers, self.base.norm
        self.base.layers, self.base.norm = nn.ModuleList(recorders), nn.Identity()
        try:
            with packed(micro):
                output = self.base(input_ids=micro.input_ids, position_ids=micro.position_ids, use_cache=False)
        finally:
            self.base.layers, self.base.norm = layers, norm
        return output.last_hidden_state[0], [recorder.arguments for recorder in recorders]


class _Recorder(nn.Module):
    """Stands in a decoder layer's place: keeps its arguments and returns its input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._layer = (layer,)  # in a tuple, so that it is no submodule
        self.arguments: dict[str, Any] = {}

    def forward(self, hidden_states: torch.Tensor, **arguments: Any) -> torch.Tensor:
        self.arguments = arguments
        return hidden_states

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_layer"][0], name)
