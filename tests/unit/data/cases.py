"""A tiny contract, samples with fixed content, and a store of them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from eagle3.data.store import StoredSample, StoreWriter
from eagle3.data.store_layout import LastRows, StoreLayout
from eagle3.data.target_argmax import greedy_tokens, make_target_head
from eagle3.errors import ProblemsError
from eagle3.wiring.contract import WiringContract

HIDDEN, VOCAB, AUX = 4, 20, 3


def digest(text: str) -> str:
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def contract(**changes: Any) -> WiringContract:
    values: dict[str, Any] = {
        "target_name": "tiny",
        "target_family": "llama",
        "target_config_digest": digest("config"),
        "num_hidden_layers": 8,
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "output_indices": (1, 3, 4),
        "last_hidden_states": "post_norm",
        "dtype": "bfloat16",
        "tokenizer_digest": digest("tokenizer"),
        "chat_template_digest": digest("template"),
    }
    return WiringContract(**{**values, **changes})


def layout(last_rows: LastRows = "supervised", **changes: Any) -> StoreLayout:
    return StoreLayout(contract(**changes), last_rows)


def greedy(last: torch.Tensor, head: dict[str, torch.Tensor]) -> torch.Tensor:
    """What such a head says at last hidden states [T, H]."""
    return greedy_tokens(last, make_target_head(head, {"rms_norm_eps": 1e-6}, "post_norm"))


def sample(
    sample_id: str,
    tokens: int = 5,
    start: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    head: dict[str, torch.Tensor] | None = None,
) -> StoredSample:
    """The last two tokens are supervised; aux states count up; the target's greedy tokens vary. All states are exactly
    representable in bfloat16.
    """

    def states(width: int) -> torch.Tensor:
        return (torch.arange(tokens * width) % 128 + start).to(dtype).reshape(tokens, width)

    last = ((torch.arange(tokens * HIDDEN) * 37 + 11 * start) % 128 - 64).to(dtype).reshape(tokens, HIDDEN)
    return StoredSample(
        id=sample_id,
        input_ids=(torch.arange(tokens) + start) % VOCAB,
        loss_mask=torch.arange(tokens) >= tokens - 2,
        aux_hidden_states=states(AUX * HIDDEN),
        last_hidden_states=last,
        target_argmax=greedy(last, head or target_head()),
    )


def target_head(scale: float = 1.0) -> dict[str, torch.Tensor]:
    matrix = torch.arange(VOCAB * HIDDEN, dtype=torch.float32).reshape(VOCAB, HIDDEN)
    return {
        "embed_tokens.weight": matrix * scale,
        "norm.weight": torch.full((HIDDEN,), 1.5),
        "lm_head.weight": matrix * 13 % 31 - 15,
    }


def writer(folder: Path, **changes: Any) -> StoreWriter:
    values: dict[str, Any] = {
        "contract": contract(),
        "settings": {"data": {"max_length": 64, "path": "a.jsonl"}, "store_dtype": "bfloat16"},
        "target_config": {"model_type": "llama", "rms_norm_eps": 1e-6},
        "target_head": target_head(),
    }
    return StoreWriter(folder, **{**values, **changes})


def make_store(folder: Path, samples: int = 6, **changes: Any) -> Path:
    """A store of shards of two samples each: s0, s1 | s2, s3 | ..."""
    with writer(folder, **changes) as store:
        write_missing(store, samples, changes.get("target_head"))
    return folder


def write_missing(store: StoreWriter, samples: int, head: dict[str, torch.Tensor] | None = None) -> None:
    """Writes what the store lacks of s0, s1, ..., two to a shard."""
    numbers = [number for number in range(samples) if f"s{number}" not in store.completed]
    for pair in batched(numbers, 2):
        store.write_shard([sample(f"s{number}", tokens=3 + number, start=number, head=head) for number in pair])


def batched(values: list[int], size: int) -> list[list[int]]:
    return [values[begin : begin + size] for begin in range(0, len(values), size)]


def kinds(error: ProblemsError) -> list[str]:
    return [problem.kind for problem in error.problems]
