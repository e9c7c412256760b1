"""Time and memory of one training step (forward and backward) of a drafter on random data.

    python benchmarks/train_step.py --shape kimi --tokens 2048 4096 --fractions 1.0 0.4 0.1

Prints a JSON line per setting: median and spread of the step's seconds, tokens/s (all tokens of the packed row, as
peers count) and peak memory. Weights and gradients are float32 under bf16 autocast, as the trainer runs; without
optimizer. On a CPU use `--shape tiny`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from eagle3.draft.batch import DraftBatch
from eagle3.draft.config import DraftConfig, RopeConfig, TTTSettings
from eagle3.draft.loss import TargetHead
from eagle3.draft.model import DraftModel
from eagle3.draft.ttt import TTTLoss, count_terms
from eagle3.draft.vocab import DraftVocab

SHAPES = {
    "kimi": (7168, 40960, 56, 8, 128, 163840, 32000),
    "tiny": (64, 128, 4, 2, 16, 1024, 256),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="kimi")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048])
    parser.add_argument("--fractions", type=float, nargs="+", default=[1.0, 0.4, 0.1])
    parser.add_argument("--steps", type=int, default=7, help="TTT steps")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device(args.device)
    ttt = TTTSettings(args.steps, 0.8, "served")
    module, head = make_module(args.shape, ttt, device)
    for tokens in args.tokens:
        for fraction in args.fractions:
            batch = make_batch(args.shape, tokens, fraction, device)
            result = measure(module, head, batch, ttt, args.repeats)
            print(json.dumps({"shape": args.shape, "tokens": tokens, "fraction": fraction, **result}), flush=True)


def make_module(shape: str, ttt: TTTSettings, device: torch.device) -> tuple[TTTLoss, TargetHead]:
    hidden, intermediate, heads, kv_heads, head_dim, vocab_size, draft_vocab_size = SHAPES[shape]
    config = DraftConfig(
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
    ids = torch.randperm(vocab_size)[:draft_vocab_size].sort().values
    with device:
        model = DraftModel(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02) if parameter.ndim == 2 else torch.nn.init.ones_(parameter)
        head_weight = torch.randn(vocab_size, hidden, dtype=torch.bfloat16) * 0.02
        head = TargetHead(head_weight, torch.ones(hidden), 1e-5, "post_norm")
    model.embed_tokens.to(torch.bfloat16)
    return TTTLoss(model, DraftVocab(ids, vocab_size), ttt).to(device), head


def make_batch(shape: str, tokens: int, fraction: float, device: torch.device) -> DraftBatch:
    """One packed document whose answers are spans of 256 tokens, evenly spaced."""
    hidden, vocab_size = SHAPES[shape][0], SHAPES[shape][5]
    span = min(256, int(tokens * fraction))
    place = torch.arange(tokens, device=device)
    mask = (place % max(round(span / fraction), span)) < span
    return DraftBatch(
        input_ids=torch.randint(0, vocab_size, (1, tokens), device=device),
        loss_mask=mask[None],
        aux=torch.randn(1, tokens, 3 * hidden, dtype=torch.bfloat16, device=device),
        last_hidden=torch.randn(int(mask.sum()), hidden, dtype=torch.bfloat16, device=device),
        document_ids=torch.zeros(1, tokens, dtype=torch.int64, device=device),
        position_ids=place[None],
        sample_ids=["random"],
    )


def measure(module: TTTLoss, head: TargetHead, batch: DraftBatch, ttt: TTTSettings, repeats: int) -> dict[str, float]:
    device = batch.input_ids.device
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()

    def step() -> None:
        module.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
            counts = count_terms(batch, head, module.vocab, ttt)
            output = module(batch, counts, counts.in_vocab)
        output.loss.backward()

    def timed() -> float:
        start = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    for _ in range(3):
        timed()
    seconds = sorted(timed() for _ in range(repeats))
    median = statistics.median(seconds)
    return {
        "seconds": round(median, 4),
        "spread": round((seconds[-1] - seconds[0]) / median, 3),
        "tokens_per_second": round(batch.input_ids.numel() / median),
        "supervised_fraction": round(batch.loss_mask.float().mean().item(), 3),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else 0.0,
    }


if __name__ == "__main__":
    main()
