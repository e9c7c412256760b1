"""Kimi-K2 and the text model inside Kimi-K2.5: both are DeepSeek-V3's architecture.

Transformers has no text-only class for Kimi-K2.5, whose checkpoint nests the text model's config under
`text_config` and its weights under `language_model.`; loaded here as DeepSeek-V3 it gives identical logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from eagle3.files import read_json
from eagle3.target.spec import LOADING, TargetSpec

if TYPE_CHECKING:
    from transformers import DeepseekV3Config, PreTrainedModel

_TEXT_PREFIX = {r"^language_model\.": ""}
_NON_TEXT_KEYS = ("media_placeholder_token_id", "image_token_id", "video_token_id")
# Named for classes that this library does not use: the architecture's, and remote code.
_DROPPED_KEYS = ("model_type", "architectures", "auto_map")


class KimiSpec(TargetSpec):
    """Reads every value from the checkpoint's config: the class defaults are DeepSeek-V3's, not Kimi's."""

    def load(self, folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, Mapping[str, Any]]:
        from transformers import DeepseekV3ForCausalLM

        loaded: Any = DeepseekV3ForCausalLM.from_pretrained(
            folder, config=_config(folder), key_mapping=_TEXT_PREFIX, dtype=dtype, **LOADING
        )
        return loaded

    def build(self, folder: Path, dtype: torch.dtype) -> PreTrainedModel:
        from transformers import DeepseekV3ForCausalLM

        model: PreTrainedModel = DeepseekV3ForCausalLM._from_config(_config(folder), dtype=dtype)
        return model

    def non_text_ids(self, config: Mapping[str, Any]) -> frozenset[int]:
        return frozenset(config[key] for key in _NON_TEXT_KEYS if isinstance(config.get(key), int))


class KimiK25Spec(KimiSpec):
    """The text model inside a vision-language checkpoint."""

    weight_prefix = "language_model."


def _config(folder: Path) -> DeepseekV3Config:
    from transformers import DeepseekV3Config

    published = read_json(folder / "config.json", "the target's config")
    text = published.get("text_config", published)
    return DeepseekV3Config(**{key: value for key, value in text.items() if key not in _DROPPED_KEYS})


KIMI_K2 = KimiSpec("kimi_k2")
KIMI_K25 = KimiK25Spec("kimi_k25")
