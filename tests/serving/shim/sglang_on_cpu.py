"""Lets `import sglang` succeed on Linux without a GPU: stand-ins for Triton and for torchvision's native operators."""

from __future__ import annotations

import importlib.util
import platform
import sys
import types
from pathlib import Path
from unittest.mock import patch

import torch

_libraries: list[torch.library.Library] = []


def prepare() -> None:
    """Must run before anything of SGLang is imported; does nothing the second time."""
    if "triton" in sys.modules:
        return
    _declare_torchvision_operators()
    _install_triton_stub()


def _install_triton_stub() -> None:
    """SGLang carries a stub of Triton for Apple Silicon; loaded on its own, it is told that this is such a machine."""
    stubs = _load_alone("sglang", "_platform_stubs.py")
    apple = {
        "sys": types.SimpleNamespace(platform="darwin", modules=sys.modules, meta_path=sys.meta_path),
        "platform": types.SimpleNamespace(machine=lambda: "arm64"),
        "_patch_non_blocking": lambda: None,
    }
    with patch.multiple(stubs, **apple), patch.object(torch.backends.mps, "is_available", lambda: True):
        stubs.install_platform_stubs()
    assert (stubs.sys, stubs.platform) == (sys, platform)


def _load_alone(package: str, file: str) -> types.ModuleType:
    """A module of a package that is not imported itself."""
    found = importlib.util.find_spec(package)
    assert found is not None and found.submodule_search_locations, f"{package} is not installed"
    path = Path(next(iter(found.submodule_search_locations))) / file
    spec = importlib.util.spec_from_file_location(f"_{package}_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _declare_torchvision_operators() -> None:
    """The published torchvision is built for CUDA and does not load beside a torch for the CPU; SGLang only needs it
    to be importable, and on import it looks for the schemas of two operators."""
    if torch.version.cuda is not None:
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)
