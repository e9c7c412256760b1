"""Small random hidden-state stores, for tests that need no target model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from eagle3.config import TrainConfig, build_config
from eagle3.data.store import StoredSample, StoreWriter
from eagle3.data.store_layout import LastRows
from eagle3.data.target_argmax import greedy_tokens, make_target_head
from eagle3.sealed import SEAL, write_sealed
from eagle3.wiring.contract import WiringContract

HIDDEN = 16
VOCAB = 32
INDICES = (0, 2, 5)
TARGET_CONFIG = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 8,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
}

Span = tuple[int, int]


def random_contract() -> WiringContract:
    digests = [f"sha256:{digit * 64}" for digit in "123"]
    return WiringContract(
        target_name="random",
        target_family="llama",
        target_config_digest=digests[0],
        num_hidden_layers=8,
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        output_indices=INDICES,
        last_hidden_states="post_norm",
        dtype="float32",
        tokenizer_digest=digests[1],
        chat_template_digest=digests[2],
    )


def random_sample(name: str, tokens: int, answer: Span, seed: int) -> StoredSample:
    """`answer`: half-open range of supervised tokens; the states are multiples of a quarter, exact in float32."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(tokens, dtype=torch.bool)
    mask[slice(*answer)] = True
    return StoredSample(
        id=name,
        input_ids=torch.randint(0, VOCAB, (tokens,), generator=generator, dtype=torch.int32),
        loss_mask=mask,
        aux_hidden_states=torch.randn(tokens, len(INDICES) * HIDDEN, generator=generator),
        last_hidden_states=torch.randn(tokens, HIDDEN, generator=generator),
    )


def greedy(sample: StoredSample, head: dict[str, torch.Tensor]) -> StoredSample:
    """The sample with the greedy tokens of a head of `TARGET_CONFIG` at its last hidden states, unless it has some."""
    if sample.target_argmax is not None:
        return sample
    target = make_target_head(head, TARGET_CONFIG, "post_norm")
    return replace(sample, target_argmax=greedy_tokens(sample.last_hidden_states, target))


def write_random_store(
    folder: Path,
    answers: Sequence[tuple[int, Span]] | None = None,
    count: int = 12,
    seed: int = 0,
    contract: WiringContract | None = None,
    change: Callable[[StoredSample], StoredSample] = lambda sample: sample,
    last_rows: LastRows = "supervised",
) -> Path:
    """A store of samples `s00`, `s01`, ..., four to a shard.

    Args:
        answers: (tokens, supervised range) of each sample; default: `count` samples of 6 to 16 tokens.
        change: applied to each sample before it is written.
    """
    generator = torch.Generator().manual_seed(seed)
    if answers is None:
        lengths = torch.randint(6, 17, (count,), generator=generator).tolist()
        answers = [(length, (2, length)) for length in lengths]
    head = {
        "embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
        "norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
    }
    samples = [
        greedy(change(random_sample(f"s{number:02}", tokens, answer, 1000 * seed + number)), head)
        for number, (tokens, answer) in enumerate(answers)
    ]
    settings = {"keep_ids": [0, 1]}
    with StoreWriter(
        folder, contract or random_contract(), settings, TARGET_CONFIG, head, last_rows=last_rows
    ) as writer:
        for begin in range(0, len(samples), 4):
            writer.write_shard(samples[begin : begin + 4])
    return folder


def rewrite_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Writes a manifest as a writer would, seal and all, whatever it says."""
    write_sealed(path, {key: value for key, value in manifest.items() if key != SEAL})


def with_mask(sample: StoredSample, mask: torch.Tensor) -> StoredSample:
    return replace(sample, loss_mask=mask)


def train_config(dataset: Path | str, output: Path, **values: object) -> TrainConfig:
    """A config for `write_random_store`: float32, no hold-out, every step logged."""
    defaults: dict[str, object] = {
        "dataset": str(dataset),
        "output": str(output),
        "output_indices": list(INDICES),
        "mixed_precision": "no",
        "eval_fraction": 0.0,
        "max_length": 16,
        "ttt": {"steps": 3},
        "draft": {"draft_vocab_size": 24, "init": "random"},
        "optim": {"learning_rate": 1e-2, "warmup_fraction": 0.2},
        "tracking": {"log_every": 1},
    }
    return build_config(TrainConfig, defaults | values, "test")
