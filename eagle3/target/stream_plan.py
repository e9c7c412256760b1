"""What a streamed extraction will do: how much goes through the target at once, and which samples go together.

The sizes are those of the store where it is begun, else as configured, else fitted to this machine's memory; from then
on they are part of the store's settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from eagle3.config import ExtractConfig
from eagle3.data.store_format import MANIFEST_FILE, Manifest, load_manifest, shard_files, shard_name
from eagle3.errors import Problem, raise_problems
from eagle3.target.plan import ExtractPlan
from eagle3.target.resolve import pick_device
from eagle3.target.shares import Chunk, Process, Shard, cut_chunks, even_chunk_tokens, local_device, this_process
from eagle3.target.streaming.memory import MemoryPlan, plan_memory
from eagle3.target.streaming.skeleton import Skeleton
from eagle3.wiring.layers import is_size

SIZES = ("chunk_tokens", "micro_tokens")


@dataclass(frozen=True)
class StreamPlan:
    """An extraction whose sizes are settled.

    Attributes:
        plan: its config and settings name the sizes.
        process: this one, among those that share the work.
        memory: what a chunk needs.
    """

    plan: ExtractPlan
    process: Process
    skeleton: Skeleton
    memory: MemoryPlan

    @cached_property
    def chunks(self) -> list[Chunk]:
        """All chunks, whoever does them."""
        cfg = self.plan.cfg
        return cut_chunks(
            self.lengths,
            self.plan.sizes,
            self.memory.sizes.chunk_tokens,
            cfg.shard_max_bytes,
            cfg.shard_max_samples,
        )

    @property
    def lengths(self) -> list[int]:
        return [tokens for _, tokens in self.plan.sample_tokens]

    @property
    def shares(self) -> list[list[Chunk]]:
        """The chunks of each process: every `count`-th."""
        return [self.chunks[index :: self.process.count] for index in range(self.process.count)]

    @property
    def share(self) -> list[Chunk]:
        """This process's chunks."""
        return self.shares[self.process.index]

    def advice(self) -> list[str]:
        """What to change where the chunks do not divide evenly among the processes."""
        chunks, count = len(self.chunks), self.process.count
        if chunks % count == 0:
            return []
        even = even_chunk_tokens(self.lengths, self.memory.sizes.chunk_tokens, count)
        most = -(-chunks // count)
        return [
            f"advice: {chunks:,} chunks do not divide evenly among {count:,} processes: the first have {most:,}, the "
            f"others {most - 1:,}; in a new store, stream.chunk_tokens={even} gives each equally many of equal size"
        ]

    def tokens(self, chunk: Chunk) -> int:
        return sum(self.plan.sample_tokens[index][1] for index in chunk.samples)


def begun_manifest(plan: ExtractPlan) -> Manifest | None:
    """The store's manifest, if it is begun."""
    return load_manifest(plan.folder) if (plan.folder / MANIFEST_FILE).exists() else None


def begun_settings(plan: ExtractPlan) -> Mapping[str, Any] | None:
    """The store's settings, if it is begun."""
    manifest = begun_manifest(plan)
    return None if manifest is None else manifest.settings


def settle_sizes(plan: ExtractPlan, begun: Mapping[str, Any] | None) -> ExtractPlan:
    """The plan with those sizes that the store says and this run leaves open; complete ones go into its settings."""
    stream, stored = plan.cfg.stream, _stored_sizes(begun)
    sizes = {key: getattr(stream, key) or stored.get(key) for key in SIZES}
    cfg = plan.cfg.model_copy(update={"stream": stream.model_copy(update=sizes)})
    if None in sizes.values():
        return replace(plan, cfg=cfg)
    limits = {"shard_max_bytes": cfg.shard_max_bytes, "shard_max_samples": cfg.shard_max_samples}
    return replace(plan, cfg=cfg, settings={**plan.settings, "stream": {**sizes, **limits}})


def _stored_sizes(begun: Mapping[str, Any] | None) -> dict[str, int]:
    """The sizes that a store's settings say; what is none there is left out, and refused when settings are compared."""
    stored = (begun or {}).get("stream")
    sizes = stored if isinstance(stored, dict) else {}
    return {key: sizes[key] for key in SIZES if is_size(sizes.get(key))}


def make_stream_plan(plan: ExtractPlan, begun: Mapping[str, Any] | None) -> StreamPlan:
    """Settles the sizes and checks them against this machine; reads the headers of the checkpoint, no weights.

    Raises:
        ProblemsError: the checkpoint cannot be read (every reason is listed), a chunk does not fit this machine's
            memory, this process's number makes no sense, or the folder holds another store's shards.
    """
    target = plan.cfg.target
    device = local_device(target.device)
    cfg = plan.cfg.model_copy(update={"target": target.model_copy(update={"device": device})})
    plan = settle_sizes(replace(plan, cfg=cfg), begun)
    process = this_process(plan.cfg.stream)
    skeleton = Skeleton(plan.files, getattr(torch, target.dtype), plan.contract.num_hidden_layers)
    longest = max(tokens for _, tokens in plan.sample_tokens)
    memory = plan_memory(skeleton, plan.cfg.stream, longest, pick_device(device), scratch_folder(plan.cfg))
    sizes = {key: getattr(memory.sizes, key) for key in SIZES}
    cfg = plan.cfg.model_copy(update={"stream": plan.cfg.stream.model_copy(update=sizes)})
    result = StreamPlan(settle_sizes(replace(plan, cfg=cfg), None), process, skeleton, memory)
    raise_problems(_foreign_shards(result) if begun is not None else ())
    return result


def _foreign_shards(stream: StreamPlan) -> Iterator[Problem]:
    """Files of a begun store that have a shard's name, and that none of its chunks would write."""
    own = {shard_name(shard.number) for chunk in stream.chunks for shard in chunk.shards}
    for path in shard_files(stream.plan.folder):
        if path.name not in own:
            message = "is a shard of another store: this one has none of that number"
            yield Problem(str(path), "store.foreign_shard", message, "move it away")


def scratch_folder(cfg: ExtractConfig) -> Path:
    """Where the residual stream's file would lie."""
    return Path(cfg.stream.scratch or cfg.output)


def missing_shards(chunks: Sequence[Chunk], manifest: Manifest | None) -> list[tuple[Chunk, list[Shard]]]:
    """Those of the chunks of which the manifest lacks shards, and those shards."""
    listed = set() if manifest is None else {shard.file for shard in manifest.shards}
    work = [(chunk, [shard for shard in chunk.shards if shard_name(shard.number) not in listed]) for chunk in chunks]
    return [(chunk, shards) for chunk, shards in work if shards]
