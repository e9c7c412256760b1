"""vLLM, speculators and Transformers: what their layer numbers mean; and engines that nobody could read."""

from __future__ import annotations

from eagle3.wiring.convention import ANY_FAMILY, LAYER_IDS, Convention, Rule

READ = "2026-11-29"
_VLLM = "0.33.0"
# Both take the top-level key first, as boundaries, and capture in ascending order (`EagleModelMixin` in
# `model_executor/models/interfaces.py`). Without it V1 takes the nested key, as boundaries too; V2, the default, does
# not read that one and takes `eagle_config.layer_ids`, else the model's default layers.
_VLLM_READERS = (
    "vllm/v1/worker/gpu_model_runner.py, _get_eagle3_aux_layers_from_config (V1); "
    "vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py, get_eagle3_aux_layers_from_config (V2)"
)
_VLLM_FILES = {
    "llama": "llama.py",
    "llama4": "mllama4.py and llama.py",
    "qwen2": "qwen2.py",
    "qwen2_5_vl": "qwen2_5_vl.py and qwen2.py",
    "qwen3": "qwen3.py",
    "qwen3_moe": "qwen3_moe.py",
    "qwen3_next": "qwen3_next.py",
    "qwen3_vl": "qwen3_vl.py",
    "qwen3_5": "qwen3_5.py and qwen3_next.py",
    "minimax_m2": "minimax_m2.py",
    "gpt_oss": "gpt_oss.py",
    "gemma4": "gemma4.py",
    "apertus": "apertus.py",
    "deepseek": "deepseek_v2.py",
    "kimi_k25": "kimi_k25.py and deepseek_v2.py",
}
_VLLM_WITHOUT_EMBEDDING = ("deepseek", "kimi_k25")

VLLM: tuple[Convention, ...] = tuple(
    Convention(
        "vllm",
        family,
        _VLLM,
        _VLLM,
        Rule.BOUNDARY,
        f"{_VLLM_READERS}; vllm/model_executor/models/{file}",
        READ,
        LAYER_IDS,
        embedding=family not in _VLLM_WITHOUT_EMBEDDING,
        last_layer=True,
    )
    for family, file in _VLLM_FILES.items()
)

# These read no target code of their own: the family does not matter.
SPECULATORS = Convention(
    "speculators",
    ANY_FAMILY,
    "0.9.0",
    "0.9.0",
    Rule.BOUNDARY,
    "speculators/models/utils.py, resolve_target_layer_ids",
    READ,
    LAYER_IDS,
    embedding=True,
    last_layer=True,
)
TRANSFORMERS = Convention(
    "transformers",
    ANY_FAMILY,
    "5.24.0",
    "5.24.0",
    Rule.BOUNDARY,
    "transformers/utils/output_capturing.py (the last entry is overwritten by the normed output)",
    READ,
    "hidden_states[...]",
    embedding=True,
)

# Engine -> why its conventions are unknown.
UNREADABLE = {
    "tensorrt_llm": "its release wheels were not read, and it takes the layers from a server option, "
    "eagle3_layers_to_capture, not from the checkpoint; in its repository (commit 001e670, "
    "tensorrt_llm/_torch/speculative/eagle3.py, Eagle3SpecMetadata) these are output indices, by default "
    "1, N // 2 - 1, N - 4"
}
