"""SGLang's arguments, by release; see `flags.py` for where they were read."""

from __future__ import annotations

from eagle3.config.launch_schema import LaunchConfig
from eagle3.serve.launch.flags import graph_flags
from eagle3.wiring.version import Version

LONGER_CONTEXT = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
"""Lets the served context exceed config.json's, the target's and the drafter's
(`sglang/srt/configs/model_config.py`, `_derive_context_length`)."""
PASSIVE_HEALTH = "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"
LAUNCHER = ("-m", "sglang.launch_server")

Arguments = list[tuple[str, str, str | None]]
"""(argument, config key that gives it, value or None)."""


def sglang_arguments(cfg: LaunchConfig, version: Version, context_length: int | None) -> Arguments:
    """What the config says, in this release's words."""
    found: Arguments = [
        ("--model-path", "target", cfg.target),
        ("--host", "host", cfg.host),
        ("--port", "port", str(cfg.port)),
        ("--tp-size", "tp", str(cfg.tp)),
    ]
    optional: Arguments = [
        ("--nccl-port", "nccl_port", _text(cfg.nccl_port)),
        ("--dtype", "dtype", cfg.dtype),
        ("--quantization", "quantization", cfg.quantization),
        ("--mem-fraction-static", "memory_fraction", _text(cfg.memory_fraction)),
        ("--context-length", "context_length", _text(context_length)),
        ("--max-running-requests", "max_running_requests", _text(cfg.max_running_requests)),
        ("--attention-backend", "attention_backend", cfg.attention_backend),
    ]
    found += [item for item in optional if item[2] is not None]
    found += [("--trust-remote-code", "trust_remote_code", None)] * cfg.trust_remote_code
    found += [("--enable-metrics", "metrics", None)] * cfg.metrics
    found += _graphs(cfg, version)
    return found + (_drafter(cfg) if cfg.steps else [])


def sglang_env(cfg: LaunchConfig, longer_context: bool) -> dict[str, str]:
    """Variables of SGLang's own."""
    env = {PASSIVE_HEALTH: "0"} if cfg.passive_health else {}
    return env | ({LONGER_CONTEXT: "1"} if longer_context else {})


def _graphs(cfg: LaunchConfig, version: Version) -> Arguments:
    if not cfg.cuda_graphs:
        return [("--disable-cuda-graph", "cuda_graphs", None)]
    flags = graph_flags(version)
    found: Arguments = []
    if cfg.cuda_graph_max_batch is not None:
        found.append((flags.max_batch, "cuda_graph_max_batch", str(cfg.cuda_graph_max_batch)))
    if not cfg.prefill_cuda_graphs and flags.no_prefill is not None:
        found.append((flags.no_prefill, "prefill_cuda_graphs", None))
    return found


def _drafter(cfg: LaunchConfig) -> Arguments:
    assert cfg.checkpoint is not None
    found: Arguments = [
        ("--speculative-algorithm", "steps", "EAGLE3"),
        ("--speculative-draft-model-path", "checkpoint", cfg.checkpoint),
        ("--speculative-num-steps", "steps", str(cfg.steps)),
        ("--speculative-eagle-topk", "topk", str(cfg.topk)),
        ("--speculative-num-draft-tokens", "draft_tokens", str(cfg.verified_tokens)),
    ]
    # Without it the drafter would be taken for quantized as --quantization says.
    quantized = cfg.quantization is not None
    return found + [("--speculative-draft-model-quantization", "quantization", "unquant")] * quantized


def _text(value: float | None) -> str | None:
    return None if value is None else str(value)
