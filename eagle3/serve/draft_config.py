"""`config.json` of an exported draft checkpoint: what SGLang, vLLM and Transformers read, written and read back.

Read in SGLang 0.5.8 to 0.5.23 (`models/llama_eagle3.py`, `models/llama.py`, `speculative/eagle_utils.py`,
`utils/hf_transformers/common.py`, `configs/model_config.py`):

- Rope is written as `rope_theta` and `rope_scaling` at the top level. Transformers 4 (SGLang 0.5.8) reads only
  these; Transformers 5 moves them into `rope_parameters` by itself. `rope_parameters` alone would be lost on the
  former, and a second copy could contradict the first.
- `norm_output`, `fc_norm` and `norm_before_fc` are top-level keys. Older servers ignore them, and read exactly three
  aux layers (`eagle3.wiring.checkpoint_options` refuses both there).
- A server refuses a draft whose context (`max_position_embeddings`, times a linear factor) is below the target's.
- `target_hidden_size` is left out: drafters here have the target's width, and without that key the server takes the
  target's own embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle3.draft.config import DraftConfig, RopeConfig
from eagle3.errors import Problem, problem_error, raise_problems
from eagle3.wiring.checkpoint_config import ARCHITECTURE, OWN_KEY
from eagle3.wiring.conventions import LAYER_IDS
from eagle3.wiring.engines import EngineIds
from eagle3.wiring.layers import LayerWiring

_SHAPE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
)
_FIXED = {
    "architectures": [ARCHITECTURE],
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
_OPTIONS = ("norm_output", "fc_norm", "norm_before_fc")
_WRITTEN_LATER = ("torch_dtype", "eagle_config", LAYER_IDS, OWN_KEY)
_AGAIN = "export again, or undo the edit"


def exported_config(
    config: DraftConfig, ids: EngineIds, wiring: LayerWiring, context_length: int, dtype: str
) -> dict[str, Any]:
    """The content of `config.json`.

    Args:
        config: the drafter's shape.
        ids: the captured layers' numbers for the engine version that this is written for.
        wiring: the captured layers.
        context_length: longest context it will be served with, in tokens; never undercut.
        dtype: of the weights.
    """
    return _shape_keys(config) | {
        "max_position_embeddings": max(config.max_position_embeddings, context_length),
        "torch_dtype": dtype,
        "eagle_config": {"use_aux_hidden_state": True, LAYER_IDS: list(ids.ids)},
        LAYER_IDS: list(wiring.boundaries),
        OWN_KEY: {
            "exported_for": {"engine": ids.engine, "engine_version": ids.version},
            "output_indices": list(wiring.output_indices),
            "context_length": context_length,
        },
    }


def draft_config_from_exported(written: Mapping[str, Any], where: str) -> DraftConfig:
    """The drafter's shape in a `config.json` that `exported_config` made.

    Raises:
        ProblemsError: not one of our exports; every key that is missing, added or of a value we would not write.
    """
    if not is_exported_config(written):
        message = f"is not the config of an export (architectures: {written.get('architectures')!r})"
        raise problem_error(where, "export.foreign", message, "give a folder that `eagle3 export` wrote")
    needed = (*_SHAPE, *_FIXED, *_WRITTEN_LATER, "rope_theta", "rope_scaling")
    raise_problems(Problem(where, "export.config", f"{key} is missing", _AGAIN) for key in needed if key not in written)
    if not isinstance(written[OWN_KEY]["output_indices"], list):
        raise problem_error(where, "export.config", f"{OWN_KEY}.output_indices is not a list", _AGAIN)
    if not isinstance(written["rope_scaling"], dict | None):
        raise problem_error(where, "export.config", f"rope_scaling is {written['rope_scaling']!r}", _AGAIN)
    config = DraftConfig(
        **{key: written[key] for key in _SHAPE},
        num_aux=len(written[OWN_KEY]["output_indices"]),
        target_hidden_size=written["hidden_size"],
        rope=RopeConfig.from_hf(dict(written)),
        **{option: written.get(option, False) for option in _OPTIONS},
    )
    raise_problems(_differences(written, _shape_keys(config), where))
    return config


def is_exported_config(written: object) -> bool:
    """Whether a parsed `config.json` says that it comes from `eagle3 export`."""
    own = written.get(OWN_KEY) if isinstance(written, Mapping) else None
    return isinstance(own, dict) and own.keys() == {"exported_for", "output_indices", "context_length"}


def _shape_keys(config: DraftConfig) -> dict[str, Any]:
    keys = {key: getattr(config, key) for key in _SHAPE} | config.rope.to_hf() | _FIXED
    keys |= {option: True for option in _OPTIONS if getattr(config, option)}
    if config.num_aux != 3:
        keys["num_aux_hidden_states"] = config.num_aux
    return keys


def _differences(written: Mapping[str, Any], expected: Mapping[str, Any], where: str) -> list[Problem]:
    problems = []
    for key in sorted(written.keys() | expected.keys()):
        if key in _WRITTEN_LATER:
            continue
        found, wanted = written.get(key, "absent"), expected.get(key, "absent")
        if found != wanted:
            problems.append(Problem(where, "export.config", f"{key} is {found!r}, expected {wanted!r}", _AGAIN))
    return problems
