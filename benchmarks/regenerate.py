"""Tokens a second of `eagle3 regenerate` in one process: one prompt at a time, and in batches sorted by length.

python benchmarks/regenerate.py --target FOLDER --prompts questions.jsonl --batch-sizes 1 16 32

Every batch size answers the same prompts greedily; the answers must be the same, else the script says how many are not.
"""

from __future__ import annotations

import argparse
import time

import torch

from eagle3.config import ConversationsConfig, TargetConfig
from eagle3.data.chat import load_tokenizer
from eagle3.data.conversations import load_conversations
from eagle3.target.engines.transformers import load_model
from eagle3.target.regenerate import iter_answers, make_prompts
from eagle3.target.resolve import find_target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--limit", type=int, default=32, help="prompts")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 16, 32])
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    cfg = TargetConfig(path=args.target, dtype=args.dtype, device="auto")
    files = find_target(cfg)
    conversations, _ = load_conversations(ConversationsConfig(path=args.prompts, limit=args.limit))
    prompts, _ = make_prompts(load_tokenizer(str(files.folder)), conversations)
    model = load_model(files, cfg)
    lengths = sorted(len(prompt.input_ids) for prompt in prompts)
    print(f"{len(prompts)} prompts of {lengths[0]} to {lengths[-1]} tokens; {torch.get_num_threads()} threads")
    first: dict[str, list[int]] = {}
    rate_alone = 0.0
    for size in args.batch_sizes:
        began, found = time.perf_counter(), {}
        limits = {"max_new_tokens": args.max_new_tokens, "context_length": files.facts.context_length}
        for batch in iter_answers(model, prompts, batch_size=size, **limits):
            found.update((prompt.id, answer.ids) for prompt, answer in batch)
        seconds = time.perf_counter() - began
        tokens = sum(map(len, found.values()))
        first = first or found
        rate_alone = rate_alone or tokens / seconds
        other = sum(ids != first[name] for name, ids in found.items())
        print(
            f"batch {size}: {tokens:,} tokens in {seconds:.1f} s, {tokens / seconds:.1f} tokens/s, "
            f"x{tokens / seconds / rate_alone:.2f}; {other} answers differ",
            flush=True,
        )


if __name__ == "__main__":
    main()
