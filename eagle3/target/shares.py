"""Which work is whose: samples into chunks and shards, and chunks to processes that never talk to each other.

The division depends on the samples and the limits alone, never on who does the work.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from eagle3.config.schema import StreamSection
from eagle3.errors import problem_error
from eagle3.target.capture import shards_by_size

_MOST_PROCESSES = 100_000
_MOST_DIGITS = 18


@dataclass(frozen=True)
class Process:
    """This process among those that share the work; `source` says where its number is from."""

    index: int = 0
    count: int = 1
    source: str = "alone"


@dataclass(frozen=True)
class Shard:
    """A shard: its number in the store, and its samples by index, ascending."""

    number: int
    samples: tuple[int, ...]


@dataclass(frozen=True)
class Chunk:
    """Samples that go through the target together, as whole shards."""

    number: int
    shards: tuple[Shard, ...]

    @property
    def samples(self) -> list[int]:
        return [index for shard in self.shards for index in shard.samples]


def cut_chunks(
    lengths: Sequence[int], sizes: Sequence[int], chunk_tokens: int, max_bytes: int, max_samples: int
) -> list[Chunk]:
    """Samples in their order, cut into chunks of at most `chunk_tokens`, and each chunk into shards.

    A longer sample is a chunk of its own. Shards are numbered through, from 0.

    Args:
        lengths: tokens of each sample.
        sizes: bytes of each sample in a shard; see `shards_by_size`.
    """
    chunks: list[Chunk] = []
    shards = 0
    for group in shards_by_size(lengths, chunk_tokens, len(lengths)):
        parts = shards_by_size([sizes[index] for index in group], max_bytes, max_samples)
        cut = (Shard(shards + place, tuple(group[at] for at in part)) for place, part in enumerate(parts))
        chunks.append(Chunk(len(chunks), tuple(cut)))
        shards += len(parts)
    return chunks


def even_chunk_tokens(lengths: Sequence[int], chunk_tokens: int, count: int) -> int:
    """A chunk size, at most the one given, that gives the processes equally many chunks of nearly equal size, without
    a further pass over the weights for any of them.
    """
    chunks = len(shards_by_size(lengths, chunk_tokens, len(lengths)))
    wanted = -(-chunks // count) * count
    size = -(-sum(lengths) // wanted)
    while size < chunk_tokens and len(shards_by_size(lengths, size, len(lengths))) > wanted:
        size += max(size // 100, 1)
    return min(size, chunk_tokens)


def this_process(stream: StreamSection, environment: Mapping[str, str] | None = None) -> Process:
    """This process's number and how many there are: as configured, else as torchrun, accelerate or SLURM say.

    A SLURM array comes before the tasks of a job step. A batch script that is no job step is one process.

    Raises:
        ProblemsError: only one of the two is configured, a number is none, or it is not below the count.
    """
    values = os.environ if environment is None else environment
    if stream.process_index is not None or stream.process_count is not None:
        if stream.process_index is None or stream.process_count is None:
            fix = "give both stream.process_index and stream.process_count, or neither"
            raise problem_error("stream", "stream.process", "only one of process_index and process_count is set", fix)
        return _checked(stream.process_index, stream.process_count, "stream.process_index")
    if "RANK" in values and "WORLD_SIZE" in values:
        return _checked(_number(values, "RANK"), _number(values, "WORLD_SIZE"), "RANK")
    if "SLURM_ARRAY_TASK_ID" in values and "SLURM_ARRAY_TASK_COUNT" in values:
        first = _number(values, "SLURM_ARRAY_TASK_MIN")
        step = max(_number(values, "SLURM_ARRAY_TASK_STEP"), 1)
        index = (_number(values, "SLURM_ARRAY_TASK_ID") - first) // step
        return _checked(index, _number(values, "SLURM_ARRAY_TASK_COUNT"), "SLURM_ARRAY_TASK_ID")
    if "SLURM_PROCID" in values and "SLURM_STEP_NUM_TASKS" in values:
        return _checked(_number(values, "SLURM_PROCID"), _number(values, "SLURM_STEP_NUM_TASKS"), "SLURM_PROCID")
    return Process()


def local_device(name: str, environment: Mapping[str, str] | None = None) -> str:
    """`auto` and `cuda` are this process's own GPU where LOCAL_RANK or SLURM_LOCALID numbers it on its node."""
    values = os.environ if environment is None else environment
    gpus = torch.cuda.device_count()
    key = next((key for key in ("LOCAL_RANK", "SLURM_LOCALID") if key in values), None)
    if name not in ("auto", "cuda") or not gpus or key is None:
        return name
    return f"cuda:{_number(values, key) % gpus}"


def _number(values: Mapping[str, str], key: str) -> int:
    text = values.get(key, "0")
    if not text.isdecimal() or len(text) > _MOST_DIGITS:
        fix = "give stream.process_index and stream.process_count"
        raise problem_error(key, "stream.process", f"is {text!r:.40}, expected a number", fix)
    return int(text)


def _checked(index: int, count: int, source: str) -> Process:
    if 0 <= index < count <= _MOST_PROCESSES:
        return Process(index, count, source)
    most = f", at most {_MOST_PROCESSES:,} are supported" if count > _MOST_PROCESSES else ""
    message = f"this is process {index}, counted from 0, of {count}{most}"
    fix = "number the processes from 0 without gaps (stream.process_index and process_count do so in any case)"
    raise problem_error(source, "stream.process", message, fix)
