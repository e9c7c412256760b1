"""What each serving engine means by its layer ids, as data: read in the released packages, never guessed.

`read` is the day the named file was read in *every* release of the range (SGLang: the wheels on PyPI from 0.5.8 to
0.5.23; vLLM 0.33.0 and speculators 0.9.0: their source). A version outside every range is unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

ENGINE_NAMES = {"sglang": "SGLang", "vllm": "vLLM", "speculators": "speculators", "transformers": "Transformers"}
ANY_FAMILY = "*"
BEGINNING = "0"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
NESTED_KEY = f"eagle_config.{LAYER_IDS}"


class Rule(Enum):
    """How an engine turns an id into a boundary."""

    OUTPUT_INDEX = "id + 1"
    BOUNDARY = "id"
    OUTPUT_INDEX_IF_FIRST_IS_1 = "id + 1 if the first id is 1, else id"
    BOUNDARY_IF_LAST_IS_N = "id if the largest id is the number of layers, else id + 1"


@dataclass(frozen=True)
class Convention:
    """One engine's convention for one target family over a closed range of versions.

    Attributes:
        first, last: the range, both ends included.
        key: where the ids are read from.
        embedding: boundary 0 can be captured.
        last_layer: boundary N can be captured.
        source: file and symbol the rule was read in.
        unsupported: why this family cannot be a target there; empty if it can.
    """

    engine: str
    family: str
    first: str
    last: str
    rule: Rule
    source: str
    key: str = NESTED_KEY
    embedding: bool = False
    last_layer: bool = False
    unsupported: str = ""
    read: str = "2026-11-29"


OLDEST_SGLANG, NEWEST_SGLANG = "0.5.8", "0.5.23"
_SETTER = "set_eagle3_layers_to_capture"


def _sglang(
    family: str,
    first: str,
    last: str,
    rule: Rule = Rule.OUTPUT_INDEX,
    *,
    file: str,
    embedding: bool = False,
    last_layer: bool = False,
) -> Convention:
    source = f"sglang/srt/models/{file}, {_SETTER}"
    return Convention("sglang", family, first, last, rule, source, embedding=embedding, last_layer=last_layer)


def _deepseek_like(family: str, first: str, embedding_from: tuple[str, str], file: str) -> tuple[Convention, ...]:
    """The rule changed in 0.5.13 (sglang PR 25454); `embedding_from`: last release without boundary 0, first with."""
    new = Rule.OUTPUT_INDEX_IF_FIRST_IS_1
    without, with_embedding = embedding_from
    return (
        _sglang(family, first, "0.5.12.post1", file="deepseek_v2.py"),
        _sglang(family, "0.5.13", without, new, file=file),
        _sglang(family, with_embedding, NEWEST_SGLANG, new, file=file, embedding=True),
    )


# Boundary 0 fails with a TypeError wherever the loop adds `hidden_states + residual` before the first layer, where
# the residual is None; the last boundary is never visited by a loop over the layers.
_SGLANG = (
    _sglang("llama", OLDEST_SGLANG, "0.5.21", file="llama.py"),
    _sglang("llama", "0.5.22", NEWEST_SGLANG, file="llama.py", embedding=True),
    _sglang("qwen2", OLDEST_SGLANG, NEWEST_SGLANG, file="qwen2.py", embedding=True),
    _sglang("qwen3", OLDEST_SGLANG, NEWEST_SGLANG, file="qwen3.py", embedding=True),
    _sglang("qwen2_moe", OLDEST_SGLANG, NEWEST_SGLANG, file="qwen2_moe.py", embedding=True),
    _sglang("qwen3_moe", OLDEST_SGLANG, NEWEST_SGLANG, file="qwen3_moe.py", embedding=True),
    _sglang("minimax_m2", OLDEST_SGLANG, "0.5.10.post1", file="minimax_m2.py"),
    _sglang("minimax_m2", "0.5.11", NEWEST_SGLANG, file="minimax_m2.py", embedding=True),
    _sglang("glm4_moe", OLDEST_SGLANG, "0.5.20", file="glm4_moe.py"),
    _sglang("glm4_moe", "0.5.21", NEWEST_SGLANG, file="glm4_moe.py", embedding=True),
    _sglang("gpt_oss", OLDEST_SGLANG, "0.5.16", file="gpt_oss.py"),
    _sglang(
        "gpt_oss",
        "0.5.17",
        NEWEST_SGLANG,
        Rule.BOUNDARY_IF_LAST_IS_N,
        file="gpt_oss.py",
        embedding=True,
        last_layer=True,
    ),
    *_deepseek_like("deepseek", OLDEST_SGLANG, ("0.5.13.post1", "0.5.14"), "deepseek_v2.py"),
    *_deepseek_like("glm4_moe_lite", OLDEST_SGLANG, ("0.5.20", "0.5.21"), "glm4_moe_lite.py"),
    Convention(
        "sglang",
        "kimi_k25",
        BEGINNING,
        "0.5.9",
        Rule.OUTPUT_INDEX,
        f"sglang/srt/models/kimi_k25.py (no {_SETTER} in 0.5.9, no file in 0.5.8)",
        unsupported="Kimi-K2.5 cannot be a target of EAGLE-3 before SGLang 0.5.10",
    ),
    *_deepseek_like("kimi_k25", "0.5.10", ("0.5.13.post1", "0.5.14"), "kimi_k25.py, delegating to deepseek_v2.py"),
)

_VLLM_READERS = "vllm/v1/worker/gpu_model_runner.py (V1) and gpu/spec_decode/eagle/eagle3_utils.py (V2)"


def _vllm(family: str, file: str, *, embedding: bool = True) -> Convention:
    source = f"{_VLLM_READERS}, {file}"
    return Convention("vllm", family, "0.33.0", "0.33.0", Rule.BOUNDARY, source, LAYER_IDS, embedding, last_layer=True)


_VLLM = (
    *(
        _vllm(family, f"models/{family}.py")
        for family in ("llama", "qwen2", "qwen3", "qwen3_moe", "minimax_m2", "gpt_oss")
    ),
    *(_vllm(family, "models/deepseek_v2.py", embedding=False) for family in ("deepseek", "kimi_k25")),
)

# These two read no target code of their own: the family does not matter.
_ANY_FAMILY = (
    Convention(
        "speculators",
        ANY_FAMILY,
        "0.9.0",
        "0.9.0",
        Rule.BOUNDARY,
        "speculators/models/utils.py, resolve_target_layer_ids",
        key=LAYER_IDS,
        embedding=True,
        last_layer=True,
    ),
    Convention(
        "transformers",
        ANY_FAMILY,
        "5.24.0",
        "5.24.0",
        Rule.BOUNDARY,
        "transformers/utils/output_capturing.py (the last entry is overwritten by the normed output)",
        key="hidden_states[...]",
        embedding=True,
    ),
)

CONVENTIONS: tuple[Convention, ...] = (*_SGLANG, *_VLLM, *_ANY_FAMILY)
