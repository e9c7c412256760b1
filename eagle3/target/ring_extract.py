"""`eagle3 extract --stream`: states into a ring that a trainer consumes at the same time.

Everything about the order is settled here, before the target runs: see docs/ring.md.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from eagle3.config import ExtractConfig
from eagle3.config.schema import RingWriteSection
from eagle3.data.chat import PrepareReport
from eagle3.data.chat.sample_file import chosen
from eagle3.data.ring_folder import check_ring_plan
from eagle3.data.ring_format import RingPlan
from eagle3.data.ring_order import Cut, order_shards
from eagle3.data.ring_writer import RingWriter
from eagle3.data.shard_file import sample_info
from eagle3.data.store_fingerprint import OtherStates
from eagle3.data.store_folder import plain_json
from eagle3.data.store_format import SAMPLE_COUNT
from eagle3.data.vocab_count import count_tokens
from eagle3.errors import Problem, problem_error, raise_problems
from eagle3.files import size_text
from eagle3.progress import progress
from eagle3.target.capture import shards_by_size
from eagle3.target.plan import ExtractPlan, room_estimate
from eagle3.target.shares import cut_chunks, this_process
from eagle3.target.write import Make, collect, completing, origin


@dataclass(frozen=True)
class RingReport:
    """What a run of the writer did.

    Attributes:
        output: the ring's folder.
        shards: in all epochs.
        written: by this run.
        finished: the trainer said that it needs no more.
        waited, seconds: for room, and in all.
    """

    output: str
    shards: int
    written: int
    finished: bool
    waited: float
    seconds: float
    prepared: PrepareReport

    def render(self) -> str:
        share = self.waited / self.seconds if self.seconds else 0.0
        end = "the trainer needs no more" if self.finished else "all shards are made"
        return (
            f"{self.output}: {self.written:,} of {self.shards:,} shards made by this run, {end}; it waited for room "
            f"{share:.0%} of its time ({self.waited:.0f} s)"
        )


def ring_section(cfg: ExtractConfig) -> RingWriteSection:
    """The config's ring, which is given."""
    assert cfg.ring is not None
    return cfg.ring


def for_ring(plan: ExtractPlan) -> ExtractPlan:
    """The plan without the samples that have nothing to train on; its settings say what the order depends on.

    Raises:
        ProblemsError: no sample has a supervised token; several processes were started.
    """
    process = this_process(plan.cfg.stream)
    if process.count > 1 and process.source != "SLURM_ARRAY_TASK_ID":
        message = f"this is process {process.index} of {process.count}, and a ring has one writer"
        raise problem_error(process.source, "ring.one_process", message, "start one process, or write a store")
    numbers = array("Q", (number for number, sample in enumerate(plan.samples) if any(sample.loss_mask)))
    samples = chosen(plan.samples, numbers)
    if not samples:
        message = f"none of its {len(plan.samples)} samples has a supervised token"
        raise problem_error("data", "train.nothing_supervised", message, "raise data.max_length, or take other data")
    if dropped := len(plan.samples) - len(samples):
        print(f"{dropped} of {len(plan.samples)} samples have no supervised token: left out", file=sys.stderr)
    ring = ring_section(plan.cfg)
    limits = {"shard_max_bytes": plan.cfg.shard_max_bytes, "shard_max_samples": plan.cfg.shard_max_samples}
    order = {"epochs": ring.epochs, "seed": ring.seed, "max_bytes": ring.max_bytes, **limits}
    settings = {**plan.settings, SAMPLE_COUNT: len(samples), "ring": order}
    return replace(plan, samples=samples, settings=settings)


def plan_ring(plan: ExtractPlan, chunk_tokens: int | None = None) -> RingPlan:
    """The ring of a plan that went through `for_ring`.

    Args:
        chunk_tokens: tokens that go through a streamed target together; None where shards are made one by one.

    Raises:
        ProblemsError: kind `ring.too_small`, it cannot hold the shards that are made together.
    """
    ring = ring_section(plan.cfg)
    infos = tuple(replace(sample_info(sample), source=None) for sample in plan.samples)  # no evaluation reads a ring
    shards = order_shards(plan.layout, infos, ring.epochs, ring.seed, _cut(plan, chunk_tokens))
    made = RingPlan(
        plan.layout, plain_json(plan.settings), plain_json(plan.files.text_config), ring.max_bytes, infos, shards
    )
    largest = max(made.bytes_between(number, end) for number, end in enumerate(made.unit_ends))
    if largest > ring.max_bytes:
        what = "a shard takes" if chunk_tokens is None else "the shards of a chunk, which are made together, take"
        lower = "shard_max_bytes or shard_max_samples" if chunk_tokens is None else "stream.chunk_tokens"
        message = f"holds {size_text(ring.max_bytes)}, {what} up to {size_text(largest)}"
        fix = f"set ring.max_bytes to several times {largest}, or lower {lower}"
        raise problem_error("ring.max_bytes", "ring.too_small", message, fix)
    return made


def _cut(plan: ExtractPlan, chunk_tokens: int | None) -> Cut:
    cfg, lengths = plan.cfg, [len(sample.input_ids) for sample in plan.samples]

    def cut(order: Sequence[int]) -> list[list[list[int]]]:
        sizes = [plan.sizes[place] for place in order]
        if chunk_tokens is None:
            parts = shards_by_size(sizes, cfg.shard_max_bytes, cfg.shard_max_samples)
            return [[[order[at] for at in part]] for part in parts]
        tokens = [lengths[place] for place in order]
        chunks = cut_chunks(tokens, sizes, chunk_tokens, cfg.shard_max_bytes, cfg.shard_max_samples)
        return [[[order[at] for at in shard.samples] for shard in chunk.shards] for chunk in chunks]

    return cut


def ring_estimate(plan: ExtractPlan, ring: RingPlan) -> tuple[str, list[Problem]]:
    """What the ring takes, in words, and a problem if that does not fit the disk."""
    needed = min(ring.max_bytes, ring.ends[-1]) + plan.head_bytes
    tokens = sum(sample.tokens for sample in ring.samples)
    said = (
        f"ring: {len(ring.samples):,} samples, {tokens:,} tokens, {ring.epochs} epoch(s), {len(ring.shards):,} shards: "
        f"{size_text(ring.ends[-1])} in all, at most {size_text(ring.max_bytes)} at a time; with the target's head"
    )
    return room_estimate(plan.folder, said, needed, plan.cfg.free_disk_fraction, "lower ring.max_bytes")


def check_ring(plan: ExtractPlan, ring: RingPlan) -> None:
    """Refuses, before the target is loaded, what the disk cannot hold, and a folder with something else in it.

    Raises:
        ProblemsError: kind `extract.disk`; as `check_ring_plan`.
    """
    print(plan.prepared, file=sys.stderr)
    estimate, problems = ring_estimate(plan, ring)
    print(estimate, file=sys.stderr)
    raise_problems(problems)
    check_ring_plan(plan.folder, ring)


@contextmanager
def open_ring(
    plan: ExtractPlan, ring: RingPlan, target_head: Mapping[str, torch.Tensor], told: Mapping[str, Any] | None = None
) -> Iterator[RingWriter]:
    """The plan's ring, begun or resumed; says which damaged shards will be made anew."""
    tokens = ((torch.tensor(item.input_ids), torch.tensor(item.loss_mask, dtype=torch.bool)) for item in plan.samples)
    counts = count_tokens(tokens, plan.contract.vocab_size)
    wait_seconds = ring_section(plan.cfg).wait_seconds
    with RingWriter(plan.folder, ring, target_head, counts, origin(plan.cfg, told), wait_seconds) as writer:
        for problem in writer.redone:
            print(f"made anew: {problem}", file=sys.stderr)
        yield writer


def write_ring(
    plan: ExtractPlan,
    target_head: Mapping[str, torch.Tensor],
    make: Make,
    other_states: OtherStates | None = None,
    told: Mapping[str, Any] | None = None,
    label: str = "extract",
) -> RingReport:
    """Makes and writes the shards that are needed until none is. A `Write`.

    A shard's bytes depend on the plan alone if `make` gives equal samples for equal numbers: a restarted writer makes
    the shards that it would have made.
    """
    with (
        open_ring(plan, plan_ring(plan), target_head, told) as writer,
        progress(label, writer.tokens_left(), "tokens") as advance,
    ):
        complete = completing(plan, target_head)
        while numbers := writer.next_unit():
            for number in numbers:
                places = writer.ring.shards[number].samples
                writer.write_shard(number, collect(make, places, advance, complete), other_states)
    return ring_report(plan, writer)


def ring_report(plan: ExtractPlan, writer: RingWriter) -> RingReport:
    """What this writer did."""
    shards = len(writer.ring.shards)
    return RingReport(
        plan.cfg.output, shards, writer.written, writer.finished, writer.waited, writer.seconds, plan.prepared
    )
