"""Tokens per second of whole optimiser steps on one or several GPUs, under any engine: run it by a launcher.

    torchrun --standalone --nproc_per_node 2 benchmarks/scaling.py
    accelerate launch --config_file configs/accelerate/fsdp2.yaml benchmarks/scaling.py --accumulate 1

Each process has its own random batch (a packed row of `--tokens`, answers of 100 to 400 tokens), so N processes take N
times the tokens a step. A step is what the trainer does between two batches: counting, forward and backward of
`--accumulate` micro-batches, the exchange of gradients, clipping and AdamW; loading data is not in it. Float32 weights,
bf16 autocast. Prints a JSON line: median and spread of the step's seconds, tokens/s of all processes, peak memory of
process 0.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import torch
from train_step import SHAPES, make_batch, make_module, measure, with_argmax

from eagle3.config import OptimSection
from eagle3.draft.config import TTTSettings
from eagle3.draft.planned import plan_batch
from eagle3.train.engine import make_accelerator, make_engine
from eagle3.train.window import accumulate_window


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="kimi")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--fraction", type=float, default=0.4, help="supervised share of tokens")
    parser.add_argument("--accumulate", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--repeats", type=int, default=8)
    args = parser.parse_args()
    precision = "bf16" if torch.cuda.is_available() else "no"
    accelerator = make_accelerator(precision)
    engine = make_engine(accelerator, precision)
    ttt, device = TTTSettings(), accelerator.device
    torch.manual_seed(0)
    module, head = make_module(args.shape, ttt, device, "mixed")
    engine.prepare(module, OptimSection())
    torch.manual_seed(1 + accelerator.process_index)
    batch = with_argmax(make_batch(args.shape, args.tokens, 1, args.fraction, device), head)
    head = head.only(module.draft_ids)
    batch = replace(batch, planned=plan_batch(batch.loss_mask.cpu(), batch.document_ids.cpu(), ttt))
    for accumulate in args.accumulate:

        def step(count: int = accumulate) -> None:
            accumulate_window(engine.model, module, [batch] * count, head, engine, lambda: None)
            engine.update(1e-5, 0.5, lambda norm: None)  # waits for the card: it reads the norm
            accelerator.wait_for_everyone()

        setting = {"engine": engine.active(), "processes": engine.num_processes, "shape": args.shape}
        setting |= {"tokens": args.tokens, "accumulate": accumulate}
        found = {**setting, **measure(step, batch, args.repeats)}
        found["tokens_per_second"] *= engine.num_processes * accumulate  # of one batch before
        if accelerator.is_main_process:
            print(json.dumps(found), flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
