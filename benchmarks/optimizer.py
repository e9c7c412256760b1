"""Time of one optimizer step for each type of AdamW's moments (`optim.moments`), on random gradients.

    python benchmarks/optimizer.py --shape kimi

Prints a JSON line for each: median and spread of a step's milliseconds, the bytes that a step cannot avoid to move
(gradient read, weight and moments read and written) and what that comes to in GB/s, the moments' size, and the time of
the first step, with compilation. `torch` is torch's AdamW without `fused=True`, for comparison. On a CPU use
`--shape tiny`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from torch import nn
from train_step import make_config

from eagle3.config import OptimSection
from eagle3.draft.model import DraftModel
from eagle3.train.moments import moment_bytes
from eagle3.train.optim import make_optimizer

KINDS = ("float32", "bfloat16", "float8", "torch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["kimi", "tiny"], default="kimi")
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=KINDS)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    for kind in args.kinds:
        print(json.dumps({"shape": args.shape, "moments": kind, **measure(kind, args)}), flush=True)


def make_parameters(shape: str, device: str) -> nn.ParameterList:
    """The drafter's trainable parameters, with gradients."""
    with torch.device("meta"):
        model = DraftModel(make_config(shape))
    model.embed_tokens.requires_grad_(False)
    shapes = [parameter.shape for parameter in model.parameters() if parameter.requires_grad]
    parameters = nn.ParameterList(torch.randn(shape, device=device).mul_(0.02) for shape in shapes)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter).mul_(1e-4)
    return parameters


def measure(kind: str, args: argparse.Namespace) -> dict[str, float | int | str]:
    cuda = args.device.startswith("cuda")
    torch.manual_seed(0)
    parameters = make_parameters(args.shape, args.device)
    moments = "float32" if kind == "torch" else kind
    optimizer = make_optimizer(parameters, OptimSection(moments=moments), fused=cuda and kind == "float32")

    def timed() -> float:
        start = time.perf_counter()
        optimizer.step()
        if cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3

    if cuda:
        torch.cuda.synchronize()
    first = timed()
    for _ in range(2):
        timed()
    times = sorted(timed() for _ in range(args.repeats))
    median = statistics.median(times)
    count, size = sum(parameter.numel() for parameter in parameters), moment_bytes(parameters, moments)
    moved = count * (4 + 2 * 4) + 2 * size
    return {
        "device": torch.cuda.get_device_name() if cuda else args.device,
        "parameters": count,
        "milliseconds": round(median, 3),
        "spread": round((times[-1] - times[0]) / median, 3),
        "bytes": moved,
        "gb_per_second": round(moved / median / 1e6, 3),
        "moments_bytes": size,
        "moments_gib": round(size / 2**30, 3),
        "first_milliseconds": round(first, 1),
    }


if __name__ == "__main__":
    main()
