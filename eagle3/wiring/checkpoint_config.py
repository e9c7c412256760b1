"""A draft checkpoint's config.json: what SGLang and vLLM read from it, checked.

Read in `sglang/srt/models/llama_eagle3.py` of the releases up to 0.5.23, `kimi_k25_eagle3.py` beside it, and vLLM
0.33.0's `model_executor/models/llama_eagle3.py` and `deepseek_eagle3.py`.

`eagle3 export` adds one top-level key of its own, which servers skip:

    "eagle3": {
        "exported_for": {"engine": "sglang", "engine_version": "0.5.23"},  # what the nested layer ids are written for
        "output_indices": [2, 30, 58],                                    # the same layers in the stored form
        "context_length": 8192                                            # longest context it is served with
    }

All of it is optional: without `exported_for` a check takes the newest known version, without `context_length` the
target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from eagle3.errors import Problem
from eagle3.wiring.conventions import LAYER_IDS, NESTED_KEY
from eagle3.wiring.layers import LARGEST_SIZE, is_int, is_size
from eagle3.wiring.layouts import ARCHITECTURE as ARCHITECTURE
from eagle3.wiring.layouts import OWN_KEY as OWN_KEY
from eagle3.wiring.layouts import Layout
from eagle3.wiring.layouts import recognise as recognise
from eagle3.wiring.targets import LARGEST_FACTOR

SIZE_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "draft_vocab_size",
    "max_position_embeddings",
)
_MOST = {"num_aux_hidden_states": 1000}
_MLA_KEYS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_WRONG_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "bias": (False, None),
}
_CORRECT = "correct it, or export it again with `eagle3 export`"


@dataclass(frozen=True)
class DraftShape:
    """The drafter that a server would build from config.json (widths in elements).

    Attributes:
        query_size, key_value_size: of plain attention; unused with `mla`.
        mla: the drafter's attention, where it is DeepSeek's.
        head_norm: width of the norms on each head's query and key (Qwen3), or None.
    """

    hidden_size: int
    intermediate_size: int
    query_size: int
    key_value_size: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    num_aux: int
    fc_norm: bool
    norm_before_fc: bool
    mla: MlaShape | None = None
    head_norm: int | None = None


@dataclass(frozen=True)
class MlaShape:
    """Widths of DeepSeek's multi-head latent attention; `q_lora_rank` is None where q has no low-rank form."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


def check_config(layout: Layout, where: str) -> list[Problem]:
    """Everything that is wrong in config.json by itself; kinds `config.*`. Layer ids: see `layer_ids`.

    Fields that have a default in Transformers may be absent in a config that another tool wrote.
    """
    config = layout.fields
    problems = _shape_problems(layout, where)

    def wrong(key: str, found: object, expected: str, fix: str = _CORRECT) -> None:
        problems.append(Problem(where, f"config.{key}", f"{key} is {found!r}, expected {expected}", fix))

    def absent(key: str) -> bool:
        return not layout.own and key not in config

    if config.get("model_type") not in layout.model_types:
        wrong("model_type", config.get("model_type"), " or ".join(map(repr, layout.model_types)))
    if config.get("num_hidden_layers") != 1 or not is_int(config["num_hidden_layers"]):
        wrong("num_hidden_layers", config.get("num_hidden_layers"), "1")
    if config.get("tie_word_embeddings") is not False and not absent("tie_word_embeddings"):
        fix = "write false: true makes the server replace the draft's head by an embedding"
        wrong("tie_word_embeddings", config.get("tie_word_embeddings"), "false", fix)
    if not _is_positive(config.get("rms_norm_eps")) and not absent("rms_norm_eps"):
        wrong("rms_norm_eps", config.get("rms_norm_eps"), "a number above 0")
    theta = config.get("rope_theta") or _mapping(config.get("rope_parameters")).get("rope_theta")
    if not _is_positive(theta):
        wrong("rope_theta", theta, "a number above 0 (the server would take its own default)")
    for key in ("rope_scaling", "rope_parameters"):
        if not _is_rope(config.get(key)):
            wrong(key, config[key], f"null, or an object with a kind and a factor above 0, at most {LARGEST_FACTOR}")
    for key, allowed in _WRONG_VALUES.items():
        if key in config and config[key] not in allowed:
            wrong(key, config[key], repr(allowed[0]), "this drafter has no such option; " + _CORRECT)
    if "eagle_config" in config and not isinstance(config["eagle_config"], dict):
        wrong("eagle_config", config["eagle_config"], "an object", "without it SGLang captures default layers silently")
    if _mapping(config.get("eagle_config")).get("use_aux_hidden_state", True) is not True:
        wrong("use_aux_hidden_state", config["eagle_config"]["use_aux_hidden_state"], "true")
    if not _is_own_key(config.get(OWN_KEY, {})):
        wrong(OWN_KEY, config[OWN_KEY], "an object as `eagle3 export` writes it")
    return problems


def _shape_problems(layout: Layout, where: str) -> list[Problem]:
    config = layout.fields
    required = SIZE_KEYS + (_MLA_KEYS if layout.mla else ())
    optional = ("head_dim", "target_hidden_size", "num_aux_hidden_states", "q_lora_rank")
    present = [*required, *(key for key in optional if config.get(key) is not None)]
    problems = [
        Problem(
            where, "config.size", f"{key} is {config.get(key)!r}, expected a whole number from 1 to {most}", _CORRECT
        )
        for key in present
        if not is_size(config.get(key), most := _MOST.get(key, LARGEST_SIZE))
    ]
    if not problems and config["draft_vocab_size"] > config["vocab_size"]:
        message = f"draft_vocab_size is {config['draft_vocab_size']}, more than vocab_size {config['vocab_size']}"
        problems.append(Problem(where, "config.size", message, _CORRECT))
    if not problems and not layout.mla and config["hidden_size"] % config["num_attention_heads"]:
        message = f"num_attention_heads is {config['num_attention_heads']}, which does not divide hidden_size "
        message += f"{config['hidden_size']}: Transformers 5, and so a server, refuses such a Llama config"
        problems.append(Problem(where, "config.size", message, "train a drafter with other heads (head_dim is free)"))
    return problems


def draft_shape(layout: Layout, default_num_aux: int) -> DraftShape | None:
    """The shape that config.json means; None where a size is wrong. `default_num_aux` is taken where it has no ids."""
    config = layout.fields
    if _shape_problems(layout, ""):
        return None
    ids = layer_ids(config, NESTED_KEY, "")[0] or layer_ids(config, LAYER_IDS, "")[0]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return DraftShape(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        query_size=head_dim * heads,
        key_value_size=head_dim * config["num_key_value_heads"],
        vocab_size=config["vocab_size"],
        draft_vocab_size=config["draft_vocab_size"],
        target_hidden_size=config.get("target_hidden_size") or config["hidden_size"],
        num_aux=config.get("num_aux_hidden_states") or (len(ids) if ids is not None else default_num_aux),
        fc_norm=option(config, "fc_norm"),
        norm_before_fc=option(config, "norm_before_fc"),
        mla=MlaShape(heads, config.get("q_lora_rank"), *(config[key] for key in _MLA_KEYS)) if layout.mla else None,
        head_norm=head_dim if config.get("model_type") == "qwen3" and "qwen3" in layout.model_types else None,
    )


def layer_ids(config: Mapping[str, Any], key: str, where: str) -> tuple[tuple[int, ...] | None, list[Problem]]:
    """The ids under a key (`NESTED_KEY` or `LAYER_IDS`), and what is wrong with the list itself.

    Kinds: `layer_ids.missing`, `layer_ids.type`, `layer_ids.duplicate`.
    """
    holder = _mapping(config.get("eagle_config")) if key == NESTED_KEY else config
    if LAYER_IDS not in holder:
        fix = f"write {key}; " + _CORRECT
        message = f"{key} is missing: the server would silently capture boundaries 2, N // 2, N - 3 (N layers)"
        return None, [Problem(where, "layer_ids.missing", message, fix)]
    values = holder[LAYER_IDS]
    if not isinstance(values, list) or not values or not all(is_int(value) for value in values):
        message = f"{key} is {values!r}, expected a list of whole numbers"
        return None, [Problem(where, "layer_ids.type", message, _CORRECT)]
    if len(set(values)) != len(values):
        message = f"{key} is {values}: a repeated layer is captured once, so slots would be missing"
        return None, [Problem(where, "layer_ids.duplicate", message, _CORRECT)]
    return tuple(values), []


def exported_for(config: Mapping[str, Any], engine: str) -> str | None:
    """The version of this engine that config.json says it was exported for, if it says so."""
    recorded = _mapping(_mapping(config.get(OWN_KEY)).get("exported_for"))
    version = recorded.get("engine_version")
    return version if recorded.get("engine") == engine and isinstance(version, str) else None


def _is_own_key(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    recorded = value.get("exported_for", {"engine": "", "engine_version": ""})
    texts = isinstance(recorded, dict) and all(
        isinstance(recorded.get(key), str) for key in ("engine", "engine_version")
    )
    length = value.get("context_length", 1)
    return texts and is_size(length)


def _is_rope(value: object) -> bool:
    if value is None:
        return True
    fields = _mapping(value)
    factor = fields.get("factor", 1)
    kind = fields.get("rope_type", fields.get("type", "default"))
    return isinstance(value, dict) and isinstance(kind, str) and _is_positive(factor) and factor <= LARGEST_FACTOR


def option(config: Mapping[str, Any], name: str) -> bool:
    """Whether the drafter has this option: `norm_before_fc` may be nested in eagle_config, which then decides."""
    nested = _mapping(config.get("eagle_config")) if name == "norm_before_fc" else {}
    return bool(nested.get(name, config.get(name)))


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < inf
