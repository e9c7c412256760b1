"""Time and memory of one training step (forward and backward) of a drafter on random data, and the card's own limit.

    python benchmarks/train_step.py --shape kimi --tokens 4096 --fractions 1.0 0.4 0.1
    python benchmarks/train_step.py --shape kimi --tokens 16384 --documents 4 --peer my_adapter.py

Prints a JSON line per setting: median and spread of the step's seconds, tokens/s (all tokens of the packed row, as
peers count) and peak memory, without optimizer; `planned_gib` is what `eagle3 train --plan` reckons for it on a GPU.
The batch has the target's greedy tokens, as stores have; `--no-argmax` finds them with all of the target's head.
`matmul_share` is the share of the step that its matrix products take when each of their shapes is timed on its own in
the same run: with everything else free it would be 1. Answers are spans of 100 to 400 tokens; the target's greedy
tokens are in the draft vocab, so that no row's gradient is zero. Weights and gradients are bfloat16 (`--weights mixed`:
float32 under autocast, as the trainer runs). On a CPU use `--shape tiny`.

A peer is a file with `build(config: dict) -> state`, given the drafter's shape, and `step(state, batch: dict) -> None`,
which runs forward and backward of one row: `input_ids`, `loss_mask`, `document_ids`, `position_ids` [1, T], `aux`
[1, T, A * H], `last_hidden` [1, T, H], `lm_head` [V, H] and the draft vocab's `draft_ids` [D].
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from runpy import run_path
from typing import Any

import torch
from matmul_limit import matmul_seconds

from eagle3.data.target_argmax import greedy_tokens
from eagle3.draft.batch import DraftBatch
from eagle3.draft.chains import plan_chains
from eagle3.draft.config import DraftConfig, RopeConfig, TTTSettings
from eagle3.draft.fused.memory import Sizes, Types, step_ledger
from eagle3.draft.loss import TargetHead
from eagle3.draft.model import DraftModel
from eagle3.draft.planned import plan_batch
from eagle3.draft.ttt import TTTLoss, count_terms
from eagle3.draft.vocab import DraftVocab

SHAPES = {
    "kimi": (7168, 40960, 56, 8, 128, 163840, 32000),
    "tiny": (64, 128, 4, 2, 16, 1024, 256),
}
SPAN = (100, 400)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="kimi")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096])
    parser.add_argument("--documents", type=int, default=1, help="in the row")
    parser.add_argument(
        "--fractions", type=float, nargs="+", default=[1.0, 0.4, 0.1], help="supervised share of tokens"
    )
    parser.add_argument("--steps", type=int, default=7, help="TTT steps")
    parser.add_argument("--chunk", type=int, default=TTTSettings.chunk, help="chains at once; 0: the step by autograd")
    parser.add_argument("--float8", action="store_true", help="multiply chains' rows in float8")
    parser.add_argument("--no-argmax", action="store_true", help="batches without the target's greedy tokens")
    parser.add_argument("--weights", choices=["bf16", "mixed"], default="bf16")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--peer", type=Path, help="adapter of another trainer, timed in the same run")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device(args.device)
    ttt = TTTSettings(args.steps, 0.8, "served", args.chunk or None, args.float8)
    module, head = make_module(args.shape, ttt, device, args.weights)
    draft_head = head.only(module.draft_ids)
    if not (args.no_argmax or args.peer):
        head = head.to("cpu")
    peer = run_path(str(args.peer)) if args.peer else None
    state = peer["build"](vars(module.model.config)) if peer else None
    for tokens in args.tokens:
        for fraction in args.fractions:
            setting = {"shape": args.shape, "tokens": tokens, "documents": args.documents, "fraction": fraction}
            batch, given_head = make_batch(args.shape, tokens, args.documents, fraction, device), head
            if not args.no_argmax:
                batch, given_head = with_argmax(batch, head), draft_head
            step = make_step(module, given_head, batch, ttt)
            result = measure(step, batch, args.repeats)
            if ttt.chunk is not None:
                result["planned_gib"] = round(planned_bytes(module, batch, ttt) / 2**30, 2)
            result["matmul_share"] = round(matmul_seconds(step, device) / result["seconds"], 3)
            setting |= {"weights": args.weights, "float8": args.float8}
            print(json.dumps({**setting, "step": "eagle3", **result}), flush=True)
            if peer:
                given = peer_batch(batch, head, module)
                result = measure(lambda given=given: peer["step"](state, given), batch, args.repeats)
                print(json.dumps({**setting, "step": args.peer.stem, **result}), flush=True)


def make_config(shape: str) -> DraftConfig:
    hidden, intermediate, heads, kv_heads, head_dim, vocab_size, draft_vocab_size = SHAPES[shape]
    return DraftConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        num_aux=3,
        target_hidden_size=hidden,
        rms_norm_eps=1e-5,
        max_position_embeddings=131072,
        rope=RopeConfig(rope_theta=50000.0),
    )


def make_module(shape: str, ttt: TTTSettings, device: torch.device, weights: str) -> tuple[TTTLoss, TargetHead]:
    config = make_config(shape)
    hidden, vocab_size = config.hidden_size, config.vocab_size
    ids = torch.randperm(vocab_size)[: config.draft_vocab_size].sort().values
    with device:
        torch.set_default_dtype(torch.bfloat16 if weights == "bf16" else torch.float32)
        model = DraftModel(config)
        torch.set_default_dtype(torch.float32)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02) if parameter.ndim == 2 else torch.nn.init.ones_(parameter)
        head_weight = torch.empty(vocab_size, hidden, dtype=torch.bfloat16).normal_(std=0.02)
        head_weight[ids] *= 3  # so that the target's greedy tokens are in the draft vocab, and all terms count
        head = TargetHead(head_weight, torch.ones(hidden), 1e-5, "post_norm")
    model.embed_tokens.to(torch.bfloat16)
    return TTTLoss(model, DraftVocab(ids, vocab_size), ttt).to(device), head


def make_batch(shape: str, tokens: int, documents: int, fraction: float, device: torch.device) -> DraftBatch:
    """One packed row of equal documents."""
    hidden, vocab_size = SHAPES[shape][0], SHAPES[shape][5]
    length = tokens // documents
    mask = torch.cat([make_mask(length, fraction) for _ in range(documents)]).to(device)
    place = torch.arange(tokens, device=device)
    return DraftBatch(
        input_ids=torch.randint(0, vocab_size, (1, tokens), device=device),
        loss_mask=mask[None],
        aux=torch.randn(1, tokens, 3 * hidden, dtype=torch.bfloat16, device=device),
        last_hidden=torch.randn(int(mask.sum()), hidden, dtype=torch.bfloat16, device=device),
        document_ids=place[None] // length,
        position_ids=place[None] % length,
        sample_ids=["random"],
    )


def with_argmax(batch: DraftBatch, head: TargetHead) -> DraftBatch:
    return replace(batch, target_argmax=greedy_tokens(batch.last_hidden, head.to(batch.last_hidden.device)))


def make_mask(length: int, fraction: float) -> torch.Tensor:
    """Answers behind prompts that make them this share of both; at 1.0 there are no prompts, so it is one answer."""
    mask, at = torch.zeros(length, dtype=torch.bool), 0
    while at < length:
        span = min(int(torch.randint(SPAN[0], SPAN[1] + 1, ())), max(int(length * fraction), 3))
        at += round(span * (1 - fraction) / fraction)
        mask[at : at + span] = True
        at += span
    return mask


def make_step(module: TTTLoss, head: TargetHead, batch: DraftBatch, ttt: TTTSettings) -> Callable[[], None]:
    """A step plans the next one's batch in the background, as loading does for training."""
    device = batch.input_ids.device
    planner = ThreadPoolExecutor(1)
    masks = batch.loss_mask.cpu(), batch.document_ids.cpu()
    plans = [planner.submit(plan_batch, *masks, ttt)]

    def step() -> None:
        module.zero_grad()
        planned = plans.pop().result()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            counts = count_terms(replace(batch, planned=planned), head, module.vocab, ttt)
            output = module(batch, counts, counts.in_vocab)
        output.loss.backward()
        plans.append(planner.submit(plan_batch, *masks, ttt))

    return step


def planned_bytes(module: TTTLoss, batch: DraftBatch, ttt: TTTSettings) -> int:
    """What `eagle3 train --plan` says of this step's peak on a GPU in bfloat16."""
    assert ttt.chunk is not None
    plan = plan_chains(batch.loss_mask.cpu(), batch.document_ids, ttt.steps, ttt.chain_rule)
    sizes = Sizes.of(plan, batch.input_ids.numel(), len(batch.last_hidden), ttt.chunk)
    types = Types(module.model.fc.weight.element_size(), 2, float8=ttt.float8, argmax=batch.target_argmax is not None)
    return step_ledger(module.model.config, types, sizes).peak


def peer_batch(batch: DraftBatch, head: TargetHead, module: TTTLoss) -> dict[str, Any]:
    places = torch.arange(batch.input_ids.numel(), device=batch.input_ids.device)
    return {
        **{name: getattr(batch, name) for name in ("input_ids", "loss_mask", "document_ids", "position_ids", "aux")},
        "last_hidden": batch.last_rows(places)[None],
        "lm_head": head.lm_head,
        "draft_ids": module.draft_ids,
    }


def measure(step: Callable[[], None], batch: DraftBatch, repeats: int) -> dict[str, float]:
    device = batch.input_ids.device
    cuda = device.type == "cuda"

    def timed() -> float:
        start = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    first = timed()
    for _ in range(2):
        timed()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = sorted(timed() for _ in range(repeats))
    median = statistics.median(seconds)
    return {
        "seconds": round(median, 5),
        "spread": round((seconds[-1] - seconds[0]) / median, 3),
        "tokens_per_second": round(batch.input_ids.numel() / median),
        "supervised_fraction": round(batch.loss_mask.float().mean().item(), 3),
        "first_seconds": round(first, 2),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else 0.0,
    }


if __name__ == "__main__":
    main()
