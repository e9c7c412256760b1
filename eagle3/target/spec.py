"""What the library must know about a family of targets: how it loads, and where its parts are.

Shapes: V target vocab, H target hidden, N layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from eagle3.errors import ProblemsError, problem_error

if TYPE_CHECKING:  # what only reads a folder does not wait seconds for the models
    from transformers import PreTrainedModel

# The caller refuses missing and mismatched weights, all of them by name; alone, Transformers names no mismatched one.
LOADING: Any = {
    "output_loading_info": True,
    "ignore_mismatched_sizes": True,
    "local_files_only": True,
    "trust_remote_code": False,
    "use_safetensors": True,  # never a pickle
}


@contextmanager
def explained_loading(folder: Path) -> Iterator[None]:
    """Makes a problem, kind `target.cannot_load`, of what Transformers raises where config.json or weights are damaged:
    almost anything."""
    try:
        yield
    except ProblemsError:
        raise
    except Exception as error:
        message = f"cannot be loaded: {type(error).__name__}: {error}"
        fix = "check that the checkpoint is whole, with weights as safetensors"
        raise problem_error(str(folder), "target.cannot_load", message, fix) from error


class TargetSpec:
    """A text model in Transformers' usual layout: `model.layers`, `model.norm`, an embedding and a linear head.

    Every model type here is built into Transformers, so a checkpoint's own Python code is never needed for the
    model (its tokenizer may need it). A family that differs overrides what differs; `families/` holds one instance
    a family.
    """

    weight_prefix = ""
    """What the names of the text model's weights begin with in a published checkpoint."""

    def __init__(self, *model_types: str) -> None:
        self.model_types = model_types

    def load(self, folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, Mapping[str, Any]]:
        """The text model with its language head, and Transformers' loading info (missing keys and the like)."""
        from transformers import AutoModelForCausalLM

        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **LOADING)
        return loaded

    def empty(self, folder: Path, dtype: torch.dtype) -> PreTrainedModel:
        """The same model on the meta device: its modules, without their weights.

        Raises:
            ProblemsError: kind `target.cannot_load`.
        """
        with explained_loading(folder), torch.device("meta"):
            return self.build(folder, dtype)

    def build(self, folder: Path, dtype: torch.dtype) -> PreTrainedModel:
        """The model with new weights, on the device that is set; a family overrides this, `empty` calls it."""
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
        return model

    def decoder_layers(self, model: PreTrainedModel) -> Sequence[nn.Module]:
        """The N decoder layers, in order; layer i's output is output index i."""
        return model.model.layers

    def final_norm(self, model: PreTrainedModel) -> nn.Module:
        """The norm between the last decoder layer and the head."""
        return model.model.norm

    def head_tensors(self, model: PreTrainedModel) -> dict[str, torch.Tensor]:
        """`embed_tokens.weight` [V, H], `norm.weight` [H] and, unless tied to the first, `lm_head.weight` [V, H]."""
        embedding = _weight(model.get_input_embeddings())
        head = _weight(model.get_output_embeddings())
        tensors = {"embed_tokens.weight": embedding, "norm.weight": _weight(self.final_norm(model))}
        return tensors if head.data_ptr() == embedding.data_ptr() else {**tensors, "lm_head.weight": head}

    def non_text_ids(self, config: Mapping[str, Any]) -> frozenset[int]:
        """Token ids that stand for pictures or video in `config` (the whole config.json): not for a text model."""
        return frozenset()


def _weight(module: nn.Module) -> torch.Tensor:
    assert isinstance(module.weight, torch.Tensor)
    return module.weight.detach()
