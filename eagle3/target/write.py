"""What every engine that gives whole samples does with them: the store is opened, and what it lacks is written."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from eagle3.config import ExtractConfig, ImportConfig
from eagle3.data.store import StoredSample, StoreWriter
from eagle3.data.store_fingerprint import OtherStates
from eagle3.data.store_layout import StoreLayout
from eagle3.data.target_argmax import make_target_head, with_argmax
from eagle3.draft.loss import TargetHead
from eagle3.errors import problem_error
from eagle3.progress import progress
from eagle3.provenance import provenance
from eagle3.target.capture import shards_by_size
from eagle3.target.plan import ExtractPlan
from eagle3.target.resolve import TargetFiles, pick_device
from eagle3.target.shares import local_device
from eagle3.wiring.contract import WiringContract

Make = Callable[[Sequence[int]], Iterable[tuple[int, StoredSample]]]
"""Samples (by their numbers in the plan) -> each with its number, in any order."""
Complete = Callable[[StoredSample], StoredSample]
"""See `completing`."""


class StorePlan(Protocol):
    """What is to be in a store: an `ExtractPlan`, or an `ImportPlan`."""

    @property
    def cfg(self) -> ExtractConfig | ImportConfig: ...
    @property
    def folder(self) -> Path: ...
    @property
    def files(self) -> TargetFiles: ...
    @property
    def contract(self) -> WiringContract: ...
    @property
    def layout(self) -> StoreLayout: ...
    @property
    def settings(self) -> dict[str, Any]: ...
    @property
    def sample_tokens(self) -> Sequence[tuple[str, int]]:
        """Id and tokens of each sample."""
        ...

    @property
    def sizes(self) -> Sequence[int]:
        """Bytes of each sample in a shard."""
        ...


Done = TypeVar("Done", covariant=True)


class Write(Protocol[Done]):
    """Where an engine's samples go: into a store (`write_store`) or a ring."""

    def __call__(
        self,
        plan: ExtractPlan,
        target_head: Mapping[str, torch.Tensor],
        make: Make,
        other_states: OtherStates | None = None,
        told: Mapping[str, Any] | None = None,
        label: str = "extract",
    ) -> Done:
        """Makes and writes what is lacking.

        Args:
            plan: of the extraction.
            target_head, other_states: see `StoreWriter`.
            make: gives the samples; equal ones for equal numbers.
            told: further provenance.
            label: of the progress bar.
        """
        ...


def write_store(
    plan: ExtractPlan,
    target_head: Mapping[str, torch.Tensor],
    make: Make,
    other_states: OtherStates | None = None,
    told: Mapping[str, Any] | None = None,
    label: str = "extract",
) -> int:
    """A `Write` into a store; how many samples were added."""
    with open_store(plan, target_head, other_states, told) as writer:
        return write_missing(plan, writer, make, completing(plan, target_head), label)


@contextmanager
def open_store(
    plan: StorePlan,
    target_head: Mapping[str, torch.Tensor],
    other_states: OtherStates | None = None,
    told: Mapping[str, Any] | None = None,
) -> Iterator[StoreWriter]:
    """The plan's store, begun or resumed; says which damaged shards will be redone.

    Args:
        plan: of the extraction.
        target_head, other_states: see `StoreWriter`.
        told: further provenance.
    """
    with StoreWriter(
        plan.folder,
        plan.contract,
        plan.settings,
        plan.files.text_config,
        target_head,
        provenance=origin(plan.cfg, told),
        other_states=other_states,
        last_rows=plan.layout.last_rows,
    ) as writer:
        for problem in writer.redone:
            print(f"redone: {problem}", file=sys.stderr)
        yield writer


def origin(cfg: ExtractConfig | ImportConfig, told: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a store or ring says of where it came from: command line, versions, config and what else is `told`."""
    return {**provenance(), "config": cfg.model_dump(mode="json"), **(told or {})}


def completing(plan: StorePlan, target_head: Mapping[str, torch.Tensor]) -> Complete:
    """Gives a sample that has no greedy tokens those of its states, on `target.device`, where the head is put for the
    first one that needs it; always there, since another device might round otherwise.

    Raises:
        ProblemsError: the first use, kind `target.device`; any, kind `target.memory`, the device has no room for it.
    """

    @cache
    def head() -> TargetHead:
        device = pick_device(local_device(plan.cfg.target.device))
        return make_target_head(target_head, plan.files.text_config, plan.contract.last_hidden_states).to(device)

    def complete(sample: StoredSample) -> StoredSample:
        if not plan.layout.has_argmax or sample.target_argmax is not None:
            return sample
        try:
            return with_argmax(sample, plan.layout, head())
        except torch.OutOfMemoryError as error:
            reason = str(error).splitlines()[0]
            message = f"the device has no room for the target's head, which finds the greedy tokens: {reason:.200}"
            fix = "end what else uses the device, or set target.device=cpu, which is slower"
            raise problem_error("target.device", "target.memory", message, fix) from error

    return complete


def collect(
    make: Make, numbers: Sequence[int], advance: Callable[[int], None], complete: Complete
) -> list[StoredSample]:
    """Makes and completes these samples; in their order. `advance` is told the tokens of each as it comes."""
    made: dict[int, StoredSample] = {}
    for number, sample in make(numbers):
        made[number] = complete(sample)
        advance(len(sample.input_ids))
    return [made[number] for number in numbers]


def write_missing(plan: StorePlan, writer: StoreWriter, make: Make, complete: Complete, label: str = "extract") -> int:
    """Makes and writes, a shard at a time, the samples that the store lacks; returns how many.

    Which samples share a shard depends on the whole set and the limits alone: a killed run leaves whole shards, and the
    resumed store equals an uninterrupted one bit for bit, if `make` gives equal samples for equal numbers.
    """
    shards = shards_by_size(plan.sizes, plan.cfg.shard_max_bytes, plan.cfg.shard_max_samples)
    samples = plan.sample_tokens
    work = [[index for index in shard if samples[index][0] not in writer.completed] for shard in shards]
    tokens = sum(samples[index][1] for shard in work for index in shard)
    with progress(label, tokens, "tokens") as advance:
        for missing in filter(None, work):
            writer.write_shard(collect(make, missing, advance, complete))
    return sum(map(len, work))
