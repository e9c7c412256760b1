"""Speed of offline acceptance (`eagle3 evaluate`) on random data, and how much arithmetic it is.

    python benchmarks/evaluate.py --shape kimi --samples 64 --fraction 0.4
    python benchmarks/evaluate.py --shape kimi --samples 64 --fraction 0.4 --temperature 1.0

Prints one JSON line: tokens/s (all tokens of the samples, prompts too) of a whole pass over samples that lie in memory,
the walks on the CPU included; the floating-point operations a token, counted, and a second; and peak memory. The
samples are read before the clock starts. On a CPU use `--shape tiny`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from train_step import SHAPES, make_config

from eagle3.data.store_format import SampleInfo
from eagle3.data.store_sample import StoredSample
from eagle3.draft.config import DraftConfig
from eagle3.draft.loss import TargetHead
from eagle3.draft.model import DraftModel
from eagle3.draft.vocab import DraftVocab
from eagle3.evaluate.acceptance import acceptance
from eagle3.evaluate.sampling import Sampling


class Memory:
    """Samples in memory, read as a store's are."""

    name = "memory"

    def __init__(self, samples: Sequence[StoredSample]) -> None:
        self.held = samples
        self.samples = [SampleInfo(item.id, len(item.input_ids), int(item.loss_mask.sum())) for item in samples]

    @contextmanager
    def ahead(self, groups: Sequence[Sequence[int]]) -> Iterator[object]:
        yield lambda count: None

    def read(self, index: int) -> StoredSample:
        return self.held[index]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="kimi")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2048, help="of a sample")
    parser.add_argument("--fraction", type=float, default=0.4, help="supervised share: one answer at each sample's end")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    sizes = (args.samples, args.tokens, args.fraction, args.steps)
    found = measure(args.shape, *sizes, args.temperature, args.batch_tokens, args.device)
    print(json.dumps(found))


def measure(
    shape: str,
    samples: int,
    tokens: int,
    fraction: float,
    steps: int,
    temperature: float | None,
    batch_tokens: int,
    device: str,
) -> dict[str, float]:
    """One pass, after one over the first batch alone."""
    config, dtype = make_config(shape), torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model = DraftModel(config).to(dtype)
        for value in model.parameters():
            torch.nn.init.normal_(value, 1.0 if value.ndim == 1 else 0.0, 0.02)
        ids = torch.arange(config.draft_vocab_size)
        head = TargetHead(
            torch.randn(config.vocab_size, config.target_hidden_size, dtype=dtype) / 50,
            torch.ones(config.target_hidden_size, dtype=dtype),
            1e-5,
            "post_norm",
        )
    answer = max(round(tokens * fraction), 2)
    reader = Memory([_sample(config, number, tokens, answer, dtype) for number in range(samples)])
    vocab = DraftVocab(ids, config.vocab_size)
    sampling = None if temperature is None else Sampling(head, temperature)
    warm = range(min(max(batch_tokens // tokens, 1), samples))
    acceptance(model, reader, vocab, steps, warm, batch_tokens, sampling=sampling)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    acceptance(model, reader, vocab, steps, batch_tokens=batch_tokens, sampling=sampling)
    seconds = time.perf_counter() - start  # the walks wait for the device
    needed = operations(config, tokens, answer, steps, temperature is not None)
    return {
        "tokens_per_second": samples * tokens / seconds,
        "gflop_per_token": needed / tokens / 1e9,
        "tflop_per_second": samples * needed / seconds / 1e12,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0,
    }


def _sample(config: DraftConfig, number: int, tokens: int, answer: int, dtype: torch.dtype) -> StoredSample:
    generator = torch.Generator().manual_seed(number)
    mask = torch.arange(tokens) >= tokens - answer
    width = config.target_hidden_size
    return StoredSample(
        id=f"sample-{number}",
        input_ids=torch.randint(config.draft_vocab_size, (tokens,), generator=generator, dtype=torch.int32),
        loss_mask=mask,
        aux_hidden_states=torch.randn(tokens, config.num_aux * width, generator=generator).to(dtype),
        last_hidden_states=torch.randn(answer, width, generator=generator).to(dtype),
    )


def operations(config: DraftConfig, tokens: int, answer: int, steps: int, sampled: bool) -> float:
    """Floating-point operations of one sample that ends with an answer of so many tokens; no norms, no softmaxes."""
    hidden, query = config.hidden_size, config.num_attention_heads * config.head_dim
    pair = 2 * config.num_key_value_heads * config.head_dim
    fc = config.num_aux * config.target_hidden_size * hidden
    chain = 3 * query * hidden + 3 * hidden * config.intermediate_size + config.draft_vocab_size * hidden
    chains = [max(answer - 1 - step, 0) for step in range(steps)]
    total = 2.0 * tokens * (fc + 2 * pair * hidden)
    total += 2.0 * sum(chains) * chain + 2.0 * sum(chains[1:]) * 2 * pair * hidden
    total += 4.0 * sum(chains) * query * (tokens - answer / 2)  # scores and values of the step-0 keys
    return total + (2.0 * answer * config.vocab_size * config.target_hidden_size if sampled else 0.0)


if __name__ == "__main__":
    main()
