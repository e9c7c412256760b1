"""What a card can do at most: the peak that model FLOPs utilisation (MFU) is a share of.

Dense bfloat16 products on tensor cores with sums in float32, in TFLOP/s, as NVIDIA's papers give it, or half of the
figure with sparsity where they give that only.
"""

from __future__ import annotations

import torch

from eagle3.config import TrainConfig

_A100 = ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe")

PEAK_TFLOPS = {
    "NVIDIA B200": 2250.0,  # Blackwell Architecture Technical Brief: HGX B200, 4.5 PFLOPS with sparsity
    "NVIDIA GB200": 2500.0,  # GB200 NVL72 data sheet: 360 PFLOPS with sparsity, 72 GPUs
    "NVIDIA H200": 989.5,  # H200 data sheet, SXM: 1,979 with sparsity
    "NVIDIA H200 NVL": 835.5,  # H200 data sheet, NVL: 1,671 with sparsity
    "NVIDIA GH200 480GB": 989.5,  # GH200 data sheet: 990 dense, the H100's die
    "NVIDIA H100 80GB HBM3": 989.5,  # H100 data sheet, SXM: 1,979 with sparsity
    "NVIDIA H100 PCIe": 756.5,  # H100 data sheet of 2022, PCIe: 1,513 with sparsity
    "NVIDIA H100 NVL": 835.5,  # H100 data sheet, NVL: 1,671 with sparsity
    **dict.fromkeys(_A100, 312.0),  # A100 data sheet, every form
    "NVIDIA L40S": 362.0,  # L40S data sheet: 362.05, 733 with sparsity
    "NVIDIA L4": 121.0,  # L4 data sheet: 242 with sparsity
    "NVIDIA A40": 149.7,  # A40 data sheet
    "NVIDIA GeForce RTX 4090": 165.2,  # Ada GPU Architecture, appendix A
    "NVIDIA GeForce RTX 3090": 71.0,  # GA102 GPU Architecture, appendix A
}
"""By the name that CUDA gives the card; a part of a card (MIG) has another name, and no entry."""


def peak_of(config: TrainConfig, device: torch.device) -> tuple[float | None, list[str]]:
    """FLOP/s of this process's card in the run's precision, and a note where it should be known and is not.

    None on a CPU, and in float32, whose peak depends on what torch was told about TF32, unless the config says it.
    """
    if config.tracking.peak_tflops is not None:
        return config.tracking.peak_tflops * 1e12, []
    if device.type != "cuda" or config.mixed_precision == "no":
        return None, []
    name = torch.cuda.get_device_name(device)
    known = PEAK_TFLOPS.get(name)
    note = f"note: no peak is known for {name}, so the log has no mfu: set tracking.peak_tflops (dense bfloat16)"
    return (None, [note]) if known is None else (known * 1e12, [])
