"""Which tool wrote a draft checkpoint, as far as config.json shows it, and the drafter's fields in one flat mapping.

Layouts were read in the tools' own sources: SpecForge (`configs/*-eagle3.json`), speculators 0.9.0
(`models/eagle3/config.py`), EAGLE's repository (`eagle/model/cnets.py`), TorchSpec (`models/draft/keymap.py`),
Model-Optimizer (its export template for Kimi-K2), and the loaders of SGLang (`models/llama_eagle3.py`,
`models/kimi_k25_eagle3.py`) and vLLM 0.33.0 (`models/llama_eagle3.py`, `models/deepseek_eagle3.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ARCHITECTURE = "LlamaForCausalLMEagle3"
MLA_ARCHITECTURES = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")
OWN_KEY = "eagle3"
_SPECULATORS_KEY = "transformer_layer_config"

# Engine -> architecture that it loads -> the first release that does (vLLM: read in 0.33.0 only). vLLM puts `Eagle3`
# before an architecture that lacks it, and reads speculators' own layout.
LOADERS: dict[str, dict[str, str]] = {
    "sglang": {ARCHITECTURE: "0.4.4.post2", "Eagle3DeepseekV2ForCausalLM": "0.5.12"},
    "vllm": dict.fromkeys(
        (
            ARCHITECTURE,
            "Eagle3LlamaForCausalLM",
            "LlamaForCausalLM",
            "Eagle3Speculator",
            "Eagle3DraftModel",
            *MLA_ARCHITECTURES,
        ),
        "0",
    ),
}


@dataclass(frozen=True)
class Layout:
    """What config.json looks like.

    Attributes:
        tool: who writes such a config, in words.
        own: `eagle3 export` wrote it, so that every field has to be there.
        mla: the drafter's attention is DeepSeek's multi-head latent attention.
        model_types: what `model_type` may be.
        architecture: the class that a server is asked for; None if config.json does not say.
        fields: the drafter's config, flat.
    """

    tool: str
    own: bool
    mla: bool
    model_types: tuple[str, ...]
    architecture: object
    fields: Mapping[str, Any]


def recognise(config: Mapping[str, Any]) -> Layout:
    """The layout of a config.json; whatever is not known counts as a flat Llama drafter."""
    names = config.get("architectures")
    architecture = names[0] if isinstance(names, list) and len(names) == 1 else names
    mla = architecture in MLA_ARCHITECTURES
    fields = dict(config)
    model_types: tuple[str, ...] = ("deepseek_v2", "deepseek_v3", "kimi_k2") if mla else ("llama",)
    layer = config.get(_SPECULATORS_KEY)
    if isinstance(layer, dict):
        model_types = ("llama", "qwen3")
        fields = layer | {key: value for key, value in config.items() if key not in ("model_type", _SPECULATORS_KEY)}
    return Layout(_tool(config, architecture, mla), OWN_KEY in config, mla, model_types, architecture, fields)


def _tool(config: Mapping[str, Any], architecture: object, mla: bool) -> str:
    eagle_config = config.get("eagle_config")
    if OWN_KEY in config:
        return "eagle3"
    if _SPECULATORS_KEY in config or "speculators_model_type" in config:
        return "speculators"
    if isinstance(eagle_config, dict) and "parallel_draft_step" in eagle_config:
        return "Model-Optimizer"
    if mla:
        return "TorchSpec (an MLA drafter, as lightseek publishes them for Kimi)"
    if architecture == ARCHITECTURE:
        return "SpecForge (as AQ-MedAI publishes them for Kimi)"
    if architecture == "LlamaForCausalLM" and "draft_vocab_size" in config:
        return "EAGLE's own repository"
    return "no tool that is known"
