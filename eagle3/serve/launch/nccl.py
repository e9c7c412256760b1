"""Presets of NCCL's environment, each with what it does.

Source: NVIDIA's NCCL user guide, "Environment Variables". None is set by default, since NCCL's own choice is right on
most machines; whether one helps is measured (`eagle3 serve profile`, `eagle3 serve bench`), not known. SGLang itself
sets NCCL_CUMEM_ENABLE and NCCL_NVLS_ENABLE where they are not set (`sglang/srt/entrypoints/engine.py`); no preset
touches these.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from eagle3.errors import Problem


@dataclass(frozen=True)
class Preset:
    """What a preset sets, and why."""

    env: dict[str, str]
    does: str


PRESETS = {
    "pcie": Preset(
        {"NCCL_P2P_LEVEL": "SYS"},
        "GPUs without NVLink copy to each other over PCIe, also across the CPUs' interconnect, where NCCL would go "
        "through host memory",
    ),
    "pcie_latency": Preset(
        {"NCCL_P2P_LEVEL": "SYS", "NCCL_PROTO": "LL"},
        "as pcie, and every message with the low-latency protocol: for the small all-reduces of decoding, at the price "
        "of bandwidth for the large ones of a prefill",
    ),
    "no_p2p": Preset(
        {"NCCL_P2P_DISABLE": "1"},
        "no direct copies between GPUs, all goes through host memory: slower, for machines where direct copies hang or "
        "give wrong numbers (an IOMMU, or PCIe ACS switched on)",
    ),
    "one_host": Preset(
        {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"},
        "all GPUs are in this host: NCCL and Gloo look for no network card",
    ),
    "debug": Preset(
        {"NCCL_DEBUG": "INFO"},
        "NCCL writes to the log which path it takes between which GPUs: shows whether another preset does anything",
    ),
}


def preset_env(names: Iterable[str]) -> tuple[dict[str, str], list[Problem]]:
    """The variables of these presets together, and where two of them exclude each other."""
    chosen: dict[str, str] = {}
    problems = []
    names = list(names)
    for name in names:
        chosen |= PRESETS[name].env
    if "no_p2p" in names and (others := [name for name in names if name.startswith("pcie")]):
        message = f"no_p2p forbids what {', '.join(others)} asks for"
        problems.append(Problem("nccl", "launch.nccl", message, "leave one of them out"))
    return chosen, problems
