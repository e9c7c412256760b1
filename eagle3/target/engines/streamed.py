"""A target that does not fit in memory: one decoder layer at a time is read from the checkpoint, run and dropped.

The model is Transformers' own, built without weights; hooks fill a layer before it runs and empty it afterwards, so
masks, positions and arithmetic are those of the whole model. All samples go through in one pass, since every pass reads
the checkpoint once.

Only checkpoints in float32, bfloat16 or float16; quantized ones are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from eagle3.config import TargetConfig
from eagle3.errors import Problem, problem_error, raise_problems
from eagle3.target.resolve import TargetFiles, pick_device
from eagle3.wiring.safetensors_header import TensorInfo, read_header

_PLAIN = {"F32", "BF16", "F16"}
_FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def load_streamed(files: TargetFiles, target: TargetConfig, depth: int) -> PreTrainedModel:
    """The text model's embedding, first `depth` decoder layers and final norm; its layers are filled as they run.

    What follows the last of these layers is not the target's: its `last_hidden_state` means something only if
    `depth` is all of them.

    Raises:
        ProblemsError: the checkpoint is quantized, or weights are missing or of another shape (all are listed).
    """
    _refuse_quantized(files)
    weights = _Weights(files)
    device = pick_device(target.device)
    model = files.spec.empty(files.folder, getattr(torch, target.dtype)).eval().requires_grad_(False)
    base = model.base_model
    layers = files.spec.decoder_layers(model)
    assert isinstance(layers, nn.ModuleList)
    del layers[depth:]
    names = {module: name for name, module in model.named_modules()}
    norm = files.spec.final_norm(model)
    parts = [model.get_input_embeddings(), norm, *layers]
    raise_problems(problem for module in parts for problem in weights.problems(module, names[module]))
    base.rotary_emb = type(base.rotary_emb)(config=model.config).to(device)
    for module in (model.get_input_embeddings(), norm):
        weights.fill(module, names[module], device)
    for layer in layers:
        layer.register_forward_pre_hook(partial(_fill, weights, names[layer], device))
        layer.register_forward_hook(_empty)
    return model


def _fill(weights: _Weights, name: str, device: torch.device, layer: nn.Module, args: Any) -> None:
    weights.fill(layer, name, device)


def _empty(layer: nn.Module, args: Any, output: Any) -> None:
    layer.to("meta")


class _Weights:
    """The tensors of a checkpoint, by name, wherever they lie."""

    def __init__(self, files: TargetFiles) -> None:
        self.folder = files.folder
        self.prefix = files.spec.weight_prefix
        self.places: dict[str, tuple[Path, TensorInfo]] = {}
        for path in sorted(files.folder.glob("*.safetensors")):
            self.places.update((name, (path, info)) for name, info in read_header(path).tensors.items())
        self._open = cache(lambda path: safe_open(path, "pt"))

    def problems(self, module: nn.Module, name: str) -> Iterator[Problem]:
        """Everything that bars this module (called `name` in the model) from being filled."""
        fix = "download the checkpoint again, or correct its config.json"
        for key, like in module.state_dict().items():
            for source, shape in self._sources(f"{name}.{key}", like).items():
                where, found = str(self.folder), self.places.get(source)
                if found is None:
                    yield Problem(where, "target.missing_weights", f"there is no {source}", fix)
                elif found[1].dtype not in _PLAIN:
                    yield Problem(where, "target.quantized", f"{source} is {found[1].dtype}", _QUANTIZED_FIX)
                elif tuple(found[1].shape) != shape:
                    message = f"{source} is {list(found[1].shape)}, not {list(shape)}"
                    yield Problem(where, "target.mismatched_weights", message, fix)

    def fill(self, module: nn.Module, name: str, device: torch.device) -> None:
        """Reads the module's weights in the types that the model keeps them in."""
        state = {}
        for key, like in module.state_dict().items():
            sources = list(self._sources(f"{name}.{key}", like))
            if len(sources) == 1:
                value = self._read(sources[0]).to(device, like.dtype)
            else:
                value = torch.empty(like.shape, dtype=like.dtype, device=device)
                pieces = value.flatten(0, 1).chunk(len(sources))
                for piece, source in zip(pieces, sources, strict=True):
                    piece.copy_(self._read(source))
            state[key] = value
        module.load_state_dict(state, assign=True)

    def _sources(self, name: str, like: torch.Tensor) -> Mapping[str, tuple[int, ...]]:
        """The checkpoint's tensors, with their shapes, that one of the model's is made of, in order.

        Transformers fuses a layer's experts: [E, 2 * I, H] of gate and up, and [E, H, I] of down.
        """
        whole = self.prefix + name
        stem, _, kind = whole.rpartition(".experts.")
        if not stem or kind not in _FUSED or whole in self.places:
            return {whole: tuple(like.shape)}
        parts = _FUSED[kind]
        shape = (like.shape[1] // len(parts), like.shape[2])
        return {f"{stem}.experts.{expert}.{part}.weight": shape for expert in range(like.shape[0]) for part in parts}

    def _read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._open(self.places[name][0]).get_tensor(name)
        return tensor


_QUANTIZED_FIX = "use an unquantized copy of the checkpoint, or a machine that holds the whole target"


def _refuse_quantized(files: TargetFiles) -> None:
    for config in (files.config, files.text_config):
        if quantization := config.get("quantization_config"):
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            message = f"the checkpoint is quantized ({method}); it cannot be read layer by layer in this version"
            raise problem_error(str(files.folder), "target.quantized", message, _QUANTIZED_FIX)
