"""SGLang's own `LlamaForCausalLMEagle3`, built in one process without an engine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from sglang.srt.model_loader.weight_utils import safetensors_weights_iterator
from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3
from sglang.srt.runtime_context import SpawnRanks, override_platform, publish
from sglang.srt.server_args import ServerArgs


def start_alone(target: str) -> None:
    """A process group of one, as a scheduler process of the engine sets it up."""
    override_platform(has_amx=True).install()
    arguments = ServerArgs(model_path=target, device="cpu", dtype="float32", attention_backend="intel_amx")
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    meeting = Path(tempfile.mkdtemp()) / "meeting"
    init_distributed_environment(
        world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{meeting}", backend="gloo"
    )
    initialize_model_parallel(backend="gloo")


def build(folder: str, dtype: torch.dtype = torch.float32) -> LlamaForCausalLMEagle3:
    """The drafter that config.json describes, its parameters not yet loaded."""
    config = ModelConfig(folder, is_draft_model=True, dtype=str(dtype).removeprefix("torch.")).hf_config
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return LlamaForCausalLMEagle3(config)
    finally:
        torch.set_default_dtype(before)


def stored_weights(folder: str) -> Iterator[tuple[str, torch.Tensor]]:
    """As SGLang's loader reads a safetensors file."""
    return safetensors_weights_iterator([str(Path(folder) / "model.safetensors")])
