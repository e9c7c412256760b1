"""Which engine runs a target where the user left it open."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import psutil
import torch

from eagle3.config import ExtractConfig, TargetConfig
from eagle3.data.ring_format import RING_FILE, load_ring
from eagle3.data.store_format import MANIFEST_FILE, load_manifest
from eagle3.target.resolve import TargetFiles, pick_device
from eagle3.wiring.safetensors_header import read_header

_MEMORY_SHARE = 0.7


def choose_engine(files: TargetFiles, target: TargetConfig) -> Literal["transformers", "streamed"]:
    """`transformers` if the whole target fits in memory and is not quantized."""
    if any(config.get("quantization_config") for config in (files.config, files.text_config)):
        return "streamed"
    headers = [read_header(path) for path in files.folder.glob("*.safetensors")]
    values = sum(torch.Size(info.shape).numel() for header in headers for info in header.tensors.values())
    device = pick_device(target.device)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    fits = values * getattr(torch, target.dtype).itemsize <= _MEMORY_SHARE * free
    return "transformers" if fits else "streamed"


def resolve_engine(cfg: ExtractConfig, files: TargetFiles) -> str:
    """The engine's name; `auto` is the one that began the store, whatever this machine would choose.

    Raises:
        ProblemsError: there is a manifest, and it cannot be read.
    """
    if cfg.engine != "auto":
        return cfg.engine
    if cfg.ring is not None:
        return _begun_ring_engine(Path(cfg.output)) or choose_engine(files, cfg.target)
    if (Path(cfg.output) / MANIFEST_FILE).exists():
        begun = load_manifest(Path(cfg.output)).settings.get("engine")
        if isinstance(begun, str):
            return begun
    return choose_engine(files, cfg.target)


def _begun_ring_engine(folder: Path) -> str | None:
    """The engine that began the ring there, if one is begun."""
    if not (folder / RING_FILE).exists():
        return None
    begun = load_ring(folder).settings.get("engine")
    return begun if isinstance(begun, str) else None
