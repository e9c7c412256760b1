"""Small rings of random samples, for tests that need no target model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from eagle3.config import TrainConfig
from eagle3.data.ring_format import RingPlan
from eagle3.data.ring_order import order_shards
from eagle3.data.ring_writer import RingWriter
from eagle3.data.store import StoredSample
from eagle3.data.store_layout import FORMAT_VERSION, StoreLayout
from eagle3.target.capture import shards_by_size
from tests.stores import HIDDEN, TARGET_CONFIG, VOCAB, greedy, random_contract, random_sample, train_config

COUNT = 14
SHARD_SAMPLES = 2


def ring_samples(count: int = COUNT, seed: int = 0) -> list[StoredSample]:
    """Samples `s00`, ... of 6 to 16 tokens."""
    lengths = torch.randint(6, 17, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    samples = [random_sample(f"s{n:02}", length, (2, length), 1000 * seed + n) for n, length in enumerate(lengths)]
    return [greedy(sample, head()) for sample in samples]


def head(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
        "norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
    }


def ring_plan(
    samples: list[StoredSample],
    epochs: int = 2,
    shards: float = 4,
    unit: int = 1,
    seed: int = 0,
    dtype: str = "float32",
    version: int = FORMAT_VERSION,
) -> RingPlan:
    """Two samples a shard, `unit` shards made together, and room for about so many of the largest shard."""
    layout = StoreLayout(replace(random_contract(), dtype=dtype), version=version)

    def cut(order: list[int]) -> list[list[list[int]]]:
        parts = [[order[at] for at in part] for part in shards_by_size([1] * len(order), 100, SHARD_SAMPLES)]
        return [parts[at : at + unit] for at in range(0, len(parts), unit)]

    infos = tuple(sample.info for sample in samples)
    made = order_shards(layout, infos, epochs, seed, cut)  # type: ignore[arg-type]
    settings = {"keep_ids": [0, 1], "ring": {"epochs": epochs, "seed": seed, "shards": shards, "unit": unit}}
    most = int(shards * max(shard.bytes for shard in made))
    return RingPlan(layout, settings, TARGET_CONFIG, most, infos, made)


def open_writer(folder: Path, plan: RingPlan, samples: list[StoredSample], wait_seconds: float = 20) -> RingWriter:
    counts = torch.zeros(VOCAB, dtype=torch.int64)
    for sample in samples:
        counts += torch.bincount(sample.input_ids[sample.loss_mask].long(), minlength=VOCAB)
    return RingWriter(folder, plan, head(), counts, {}, wait_seconds)


def write_ring(
    folder: Path,
    plan: RingPlan,
    samples: list[StoredSample],
    wait_seconds: float = 20,
    before: Callable[[int], object] = lambda number: None,
) -> None:
    """What a writer does until it ends; `before` is called before each shard."""
    with open_writer(folder, plan, samples, wait_seconds) as writer:
        while numbers := writer.next_unit():
            for number in numbers:
                before(number)
                writer.write_shard(number, [samples[place] for place in plan.shards[number].samples])


def slowly(number: int) -> None:
    time.sleep(0.02)


def ring_config(folder: Path, output: Path, **values: object) -> TrainConfig:
    """A config for `ring_plan`: two epochs, two samples a step."""
    two = {} if "batch_tokens" in values else {"batch_size": 2}
    return train_config(folder, output, **{"ring": {"wait_seconds": 20}, "epochs": 2, **two, "save_every": 5, **values})


def without_ring(config: TrainConfig, dataset: Path, output: Path) -> TrainConfig:
    return config.model_copy(update={"ring": None, "dataset": str(dataset), "output": str(output)})


def of_type(samples: list[StoredSample], dtype: str) -> list[StoredSample]:
    """The samples as a store of that type takes them."""
    given = StoreLayout(replace(random_contract(), dtype=dtype)).value_dtype
    return [
        replace(
            sample,
            aux_hidden_states=sample.aux_hidden_states.to(given),
            last_hidden_states=sample.last_hidden_states.to(given),
        )
        for sample in samples
    ]


def other_masks(samples: list[StoredSample]) -> list[StoredSample]:
    return [replace(sample, loss_mask=~sample.loss_mask) for sample in samples]
