"""vLLM's arguments.

Read in vLLM 0.33.0: `vllm/engine/arg_utils.py`, `vllm/entrypoints/common/cli_args.py`, `vllm/config/speculative.py`
(`method`, `model`, `num_speculative_tokens`). `eagle3 serve wait` follows SGLang only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from eagle3.config.launch_schema import LaunchConfig
from eagle3.errors import Problem, problem_error
from eagle3.serve.launch.sglang import Arguments
from eagle3.wiring.version import Version

READ = "0.33"
LAUNCHER = ("-m", "vllm.entrypoints.cli.main", "serve")


def check_vllm_version(version: str) -> None:
    """Refuses a version whose arguments nobody read.

    Raises:
        ProblemsError: kinds `launch.version_unknown`, `engine.version_malformed`.
    """
    if Version(version) != Version(READ):
        message = f"which arguments it takes was read for {READ} only"
        fix = f"serve with {READ}, or add what it takes to eagle3/serve/launch/vllm.py with its source"
        raise problem_error(f"vLLM {version}", "launch.version_unknown", message, fix)


def check_vllm(cfg: LaunchConfig) -> Iterator[Problem]:
    """Settings that vLLM has no word for; kind `launch.unsupported`."""
    fix = "leave it out, or serve with SGLang"
    if cfg.topk != 1:
        yield Problem("topk", "launch.unsupported", f"is {cfg.topk}: vLLM drafts chains only", "set topk=1")
    if not cfg.prefill_cuda_graphs:
        message = "is false: vLLM has no switch for the graphs of prefill alone"
        yield Problem("prefill_cuda_graphs", "launch.unsupported", message, fix)
    if cfg.nccl_port is not None:
        yield Problem("nccl_port", "launch.unsupported", "vLLM has no argument for it", fix)
    if cfg.allow_longer_context:
        message = "is true: vLLM does not speculate beyond the drafter's context"
        yield Problem("allow_longer_context", "launch.unsupported", message, "export it with the target's context")


def vllm_arguments(cfg: LaunchConfig, context_length: int | None) -> Arguments:
    """What the config says, in vLLM's words."""
    found: Arguments = [
        ("--host", "host", cfg.host),
        ("--port", "port", str(cfg.port)),
        ("--tensor-parallel-size", "tp", str(cfg.tp)),
    ]
    optional: Arguments = [
        ("--dtype", "dtype", cfg.dtype),
        ("--quantization", "quantization", cfg.quantization),
        ("--gpu-memory-utilization", "memory_fraction", _text(cfg.memory_fraction)),
        ("--max-model-len", "context_length", _text(context_length)),
        ("--max-num-seqs", "max_running_requests", _text(cfg.max_running_requests)),
        ("--attention-backend", "attention_backend", cfg.attention_backend),
        ("--max-cudagraph-capture-size", "cuda_graph_max_batch", _text(cfg.cuda_graph_max_batch)),
    ]
    found += [item for item in optional if item[2] is not None]
    found += [("--trust-remote-code", "trust_remote_code", None)] * cfg.trust_remote_code
    found += [("--enforce-eager", "cuda_graphs", None)] * (not cfg.cuda_graphs)
    if cfg.steps:
        drafter = {"method": "eagle3", "model": cfg.checkpoint, "num_speculative_tokens": cfg.steps}
        found.append(("--speculative-config", "steps", json.dumps(drafter)))
    return found


def _text(value: float | None) -> str | None:
    return None if value is None else str(value)
