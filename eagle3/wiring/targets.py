"""What the wiring needs to know about a target model, read from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.errors import Problem, problem_error, raise_problems
from eagle3.files import digest_json, read_json_object, readable
from eagle3.wiring.layers import A_SIZE, is_size

CONFIG_FILE = "config.json"
LARGEST_FACTOR = 1_000_000  # of a context's extension; Kimi's is 64

# config.json's `model_type` -> family, as the engines' model classes group them.
_FAMILIES = {
    "llama": "llama",
    "llama4": "llama4",
    "llama4_text": "llama4",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2_moe",
    "qwen2_5_vl": "qwen2_5_vl",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
    "qwen3_next": "qwen3_next",
    "qwen3_vl": "qwen3_vl",
    "qwen3_5": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5",
    "minimax_m2": "minimax_m2",
    "minimax_m3_vl": "minimax_m3",
    "gpt_oss": "gpt_oss",
    "glm4_moe": "glm4_moe",
    "glm4_moe_lite": "glm4_moe_lite",
    "glm_moe_dsa": "glm_moe_dsa",
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
    "gemma4": "gemma4",
    "gemma4_text": "gemma4",
    "longcat_flash": "longcat_flash",
    "bailing_moe": "bailing_moe",
    "bailing_moe_v2": "bailing_moe",
    "exaone_moe": "exaone_moe",
    "apertus": "apertus",
    "mimo_v2": "mimo_v2",
    "mimo_v2_flash": "mimo_v2",
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
    "deepseek_v32": "deepseek",
    "kimi_k2": "deepseek",
    "kimi_k25": "kimi_k25",
}

# Fields of a config that do not change what the target computes.
_BOOKKEEPING = frozenset(
    {
        "_attn_implementation",
        "_commit_hash",
        "_name_or_path",
        "architectures",
        "attn_implementation",
        "auto_map",
        "dtype",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


@dataclass(frozen=True)
class TargetFacts:
    """A target model's shape.

    Attributes:
        name: what the user calls it.
        family: key of the engines' conventions.
        context_length: the longest context a server gives it by itself, in tokens.
        config_digest: of its text config; None for a name without a config.
    """

    name: str
    family: str
    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    context_length: int
    config_digest: str | None = None


# From the published config.json files.
KNOWN_TARGETS = {
    facts.name: facts
    for facts in (
        TargetFacts("kimi-k2.5", "kimi_k25", 61, 7168, 163840, 262144),
        TargetFacts("deepseek-v3", "deepseek", 61, 7168, 129280, 163840),
        TargetFacts("llama-3.1-8b", "llama", 32, 4096, 128256, 131072),
        TargetFacts("qwen3-8b", "qwen3", 36, 4096, 151936, 40960),
        TargetFacts("smollm2-135m", "llama", 30, 576, 49152, 8192),
    )
}


def family_of_model_type(model_type: str) -> str:
    """The family of a config's top-level `model_type`.

    Raises:
        ProblemsError: kind `target.model_type`.
    """
    if model_type not in _FAMILIES:
        message = f"model_type {model_type!r} is not known, only {', '.join(_FAMILIES)}"
        fix = "read how the serving engine numbers its layers, then add it to eagle3/wiring"
        raise problem_error("target config", "target.model_type", message, fix)
    return _FAMILIES[model_type]


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a config that describes the decoder stack: the nested `text_config` of a multimodal model."""
    nested = config.get("text_config")
    return dict(nested if isinstance(nested, dict) else config)


def config_digest(config: Mapping[str, Any]) -> str:
    """`sha256:<hex>` of the text config, without nulls and without fields that do not change what it computes.

    Pass what `read_target_config` returns, always: Transformers' `config.to_dict()` adds its defaults and gives
    another digest.
    """
    fields = {key: value for key, value in text_config(config).items() if value is not None}
    return digest_json({key: value for key, value in fields.items() if key not in _BOOKKEEPING})


def served_context(config: Mapping[str, Any]) -> int:
    """The context length that SGLang derives from a text config (with a sound length), in tokens.

    Source: `sglang/srt/utils/hf_transformers/common.py`, `get_context_length`: `max_position_embeddings`, times the
    rope factor unless the scaling is llama3 or says what the original length was.
    """
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    length: int = config["max_position_embeddings"]
    if not isinstance(scaling, dict) or "original_max_position_embeddings" in scaling:
        return length
    factor = scaling.get("factor", 1)
    if scaling.get("rope_type") == "llama3" or not isinstance(factor, int | float) or not 0 < factor <= LARGEST_FACTOR:
        return length
    return int(factor * length)


def read_target_config(path: Path) -> dict[str, Any]:
    """The whole config.json of a target: `path` is its folder or the file.

    Raises:
        ProblemsError: kinds `file.*`.
    """
    return read_json_object(path / CONFIG_FILE if path.is_dir() else path, "a target model's config.json")


def target_facts(name_or_path: str | Path) -> TargetFacts:
    """The facts of a known target, or of a folder (or its config.json) on disk.

    Raises:
        ProblemsError: kinds `target.unknown`, `target.config`, `target.model_type`, `file.*`.
    """
    name = str(name_or_path)
    if name.lower() in KNOWN_TARGETS:
        return KNOWN_TARGETS[name.lower()]
    path = Path(name_or_path)
    with readable(path):
        exists = path.exists()
    if not exists:
        message = f"{name!r} is neither a known target ({', '.join(KNOWN_TARGETS)}) nor a folder"
        raise problem_error("target", "target.unknown", message, "give the folder that holds its config.json")
    folder = path if path.is_dir() else path.parent
    return facts_from_config(read_target_config(path), folder.resolve().name, str(path))


def facts_from_config(config: Mapping[str, Any], name: str, where: str) -> TargetFacts:
    """The facts in a config that was read from `where`; see `target_facts`."""
    text = text_config(config)
    fields = ("num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings")
    raise_problems(
        Problem(where, "target.config", f"{key} is {text.get(key)!r}, expected {A_SIZE}", "correct it")
        for key in fields
        if not is_size(text.get(key))
    )
    family = family_of_model_type(str(config.get("model_type")))
    return TargetFacts(
        name=name,
        family=family,
        num_hidden_layers=text["num_hidden_layers"],
        hidden_size=text["hidden_size"],
        vocab_size=text["vocab_size"],
        context_length=served_context(text),
        config_digest=config_digest(config),
    )
