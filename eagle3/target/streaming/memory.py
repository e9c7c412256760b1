"""What a walk needs of device, host and disk, planned before a weight is read.

Legend: T tokens of a micro-batch, H hidden, I width of an MLP or expert, K experts of a token.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import nn

from eagle3.config import StreamSection
from eagle3.data.target_argmax import BLOCK_ROWS
from eagle3.errors import Problem, problem_error, raise_problems
from eagle3.files import existing_folder, size_text
from eagle3.target.streaming.checkpoint import Recipe, decoded_bytes
from eagle3.target.streaming.fused import find_experts
from eagle3.target.streaming.reader import BLOCK_BYTES, BLOCKS_PER_THREAD, raw_offsets
from eagle3.target.streaming.residual import Placement
from eagle3.target.streaming.skeleton import Skeleton
from eagle3.target.streaming.walk import StreamSizes

_GIB = 2**30
_CHUNK_TOKENS = 524_288
_MICRO_TOKENS = (65_536, 32_768, 16_384, 8_192, 4_096, 2_048, 1_024, 512, 256, 128)
_LEAST_MICRO = 8_192
_SHARE_OF_FREE = 0.92
_SHARE_OF_HOST = 0.7
# Beside what is counted: workspaces of the matrix products, the allocator's rounding.
_OVERHEAD = 1 * _GIB


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes of a walk, and what they need.

    Attributes:
        sizes: see `StreamSizes`.
        device_bytes: planned peak on the device.
        device_limit: that it had to stay under.
        host_bytes: of host memory (pinned, for a GPU).
        scratch_bytes: of the residual stream's file.
    """

    sizes: StreamSizes
    device_bytes: int
    device_limit: int
    host_bytes: int
    scratch_bytes: int

    def lines(self) -> list[str]:
        """For the estimate that is printed before the start."""
        sizes = self.sizes
        group = "all of a layer" if sizes.expert_group is None else f"{sizes.expert_group} at a time"
        return [
            f"chunks of {sizes.chunk_tokens:,} tokens, at most {sizes.micro_tokens:,} in a call of a layer; residual "
            f"stream: {sizes.residual}; experts: {group}",
            f"planned peak: {size_text(self.device_bytes)} on the device (limit {size_text(self.device_limit)}), "
            f"{size_text(self.host_bytes)} of host memory, {size_text(self.scratch_bytes)} of scratch file",
        ]


def plan_memory(
    skeleton: Skeleton, cfg: StreamSection, longest: int, device: torch.device, scratch: Path, greedy: bool = True
) -> MemoryPlan:
    """Chooses what the config leaves open: the largest micro-batch that fits, then where the residual stream lies
    (the device, else host memory, else a scratch file), then groups of experts.

    Args:
        skeleton: of the target.
        cfg: what is wanted.
        longest: tokens of the longest sample, which goes through a layer whole.
        device: that computes.
        scratch: folder of the scratch file.
        greedy: the target's greedy tokens are found at the end, which takes its head.

    Raises:
        ProblemsError: kind `stream.memory` (device or host) or `stream.disk`, with what it would need.
    """
    limit = _device_limit(cfg, device)
    problems: list[Problem] = []
    for sizes in _candidates(skeleton, cfg, device):
        plan = _needs(skeleton, cfg, sizes, max(sizes.micro_tokens, longest), limit, device, greedy)
        problems = [*_device_problems(plan), *_host_problems(plan, scratch)]
        if not problems:
            return plan
    raise_problems(problems)
    raise AssertionError("there is no candidate")


def _device_limit(cfg: StreamSection, device: torch.device) -> int:
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # held by the allocator
        free = _SHARE_OF_FREE * (torch.cuda.mem_get_info(device)[0] + unused)
    else:
        free = _SHARE_OF_HOST * psutil.virtual_memory().available
    return int(min(cfg.device_memory_gib * _GIB, free))


def _candidates(skeleton: Skeleton, cfg: StreamSection, device: torch.device) -> Iterator[StreamSizes]:
    """From what is fastest to what is smallest, within what the config fixes."""
    chunk = cfg.chunk_tokens or _CHUNK_TOKENS
    places: Sequence[Placement] = ("device", "host", "file") if cfg.residual == "auto" else (cfg.residual,)
    if device.type != "cuda":  # whose own memory is the host's
        places = tuple(dict.fromkeys("device" if place == "host" else place for place in places))
    experts = max((module.num_experts for layer in skeleton.layers for _, module in find_experts(layer)), default=0)
    groups: list[int | None] = [cfg.expert_group] if cfg.expert_group else [None]
    if experts and not cfg.expert_group:
        groups += [size for size in (128, 64, 32, 16, 8) if size < experts]
    smallest = chunk if cfg.chunk_tokens or device.type == "cuda" else min(chunk, 16_384)
    while True:
        micros = (
            [cfg.micro_tokens] if cfg.micro_tokens else [size for size in _MICRO_TOKENS if size <= max(chunk, 1024)]
        )
        for group in groups:
            for least in (_LEAST_MICRO, 0):
                for place in places:
                    yield from (StreamSizes(chunk, micro, place, group) for micro in micros if micro >= least)
        if chunk <= smallest:
            return
        chunk //= 2


def _needs(
    skeleton: Skeleton,
    cfg: StreamSection,
    sizes: StreamSizes,
    micro: int,
    limit: int,
    device: torch.device,
    greedy: bool,
) -> MemoryPlan:
    width = skeleton.files.facts.hidden_size * skeleton.dtype.itemsize
    outer = [part for part in (skeleton.embedding, skeleton.norm) if part is not None]
    parts = [*outer, *([] if skeleton.head is None else [skeleton.head]), *skeleton.layers]
    buffer = max(raw_offsets(skeleton.recipes(part))[1] for part in parts)
    live = max(_live(skeleton, layer, sizes.expert_group) for layer in skeleton.layers)
    fixed = sum(decoded_bytes(skeleton.recipes(part)) for part in outer)
    busy = micro * max(_token_bytes(skeleton, layer) for layer in skeleton.layers)
    busy = max(busy, _greedy_bytes(skeleton, micro) if greedy else 0)
    residual = max(sizes.chunk_tokens, micro) * width
    staged = cfg.read_threads * BLOCKS_PER_THREAD * BLOCK_BYTES if device.type == "cuda" else 0
    return MemoryPlan(
        sizes=sizes,
        device_bytes=buffer + live + fixed + busy + (residual if sizes.residual == "device" else 0) + _overhead(device),
        device_limit=limit,
        host_bytes=staged + (residual if sizes.residual == "host" else 0),
        scratch_bytes=residual if sizes.residual == "file" else 0,
    )


def _overhead(device: torch.device) -> int:
    return _OVERHEAD if device.type == "cuda" else 0


def _live(skeleton: Skeleton, layer: nn.Module, group: int | None) -> int:
    """Bytes of a layer's unpacked weights; of experts no more than `group` at a time."""
    experts: list[Recipe] = skeleton.expert_recipes(layer)
    whole = decoded_bytes(skeleton.recipes(layer))
    if group is None or not experts:
        return whole
    packed = decoded_bytes(experts)
    return whole - packed + packed * min(group, experts[0].shape[0]) // experts[0].shape[0]


def _token_bytes(skeleton: Skeleton, layer: nn.Module) -> int:
    """Bytes that a token of a micro-batch takes on the device at the widest place of a layer."""
    hidden = skeleton.files.facts.hidden_size
    # What a layer's own matrices put out for a token, all at once: an upper bound of what lives at the same time.
    experts = dict(find_experts(layer))
    attention = mlp = 0
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear) and not any(name.startswith(f"{inside}.") for inside in experts):
            if "attn" in name:
                attention += module.out_features
            else:
                mlp += module.out_features
    for module in experts.values():
        chosen = getattr(skeleton.model.config, "num_experts_per_tok", 1)
        inner = module.down_proj.shape[2]
        mlp += chosen * max(hidden + 2 * inner, 3 * inner)
    # The residual, the normed states, the result and the sum of both; a sample's captured states on their way out.
    return (6 * hidden + max(2 * attention, mlp)) * skeleton.dtype.itemsize


def _greedy_bytes(skeleton: Skeleton, micro: int) -> int:
    """Bytes of what finds the greedy tokens after the last layer: the head (beside the embedding that is there anyway,
    unless it is that), logits of a block and their reduction, and the last hidden states of a micro-batch, normed and
    picked."""
    facts = skeleton.files.facts
    head = 0 if skeleton.head is None else decoded_bytes(skeleton.recipes(skeleton.head))
    logits = 2 * BLOCK_ROWS * facts.vocab_size * skeleton.dtype.itemsize
    return head + logits + micro * 6 * facts.hidden_size * skeleton.dtype.itemsize


@contextmanager
def explained_memory() -> Iterator[None]:
    """Makes a problem, kind `stream.memory`, of an allocation that fails although it was planned."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch raises a plain RuntimeError for the CPU's
        reason = (str(error) or "out of memory").splitlines()[0]
        if "out of memory" not in reason and "allocate memory" not in reason:
            raise
        fix = "end what else uses it, or set a smaller stream.device_memory_gib, so that less is planned"
        raise problem_error("memory", "stream.memory", f"ran out during the walk: {reason:.200}", fix) from error


def _device_problems(plan: MemoryPlan) -> Iterator[Problem]:
    if plan.device_bytes <= plan.device_limit:
        return
    message = (
        f"needs {size_text(plan.device_bytes)} for {plan.sizes.micro_tokens:,} tokens in a call of a layer, "
        f"{size_text(plan.device_limit)} may be used (stream.device_memory_gib, and what is free)"
    )
    fix = "set a smaller stream.micro_tokens, stream.chunk_tokens, stream.expert_group or data.max_length"
    yield Problem("device memory", "stream.memory", message, fix)


def _host_problems(plan: MemoryPlan, scratch: Path) -> Iterator[Problem]:
    free = psutil.virtual_memory().available
    if plan.host_bytes > _SHARE_OF_HOST * free:
        message = f"needs {size_text(plan.host_bytes)}, of {size_text(free)} free {_SHARE_OF_HOST:.0%} may be used"
        fix = "set stream.residual=file, a smaller stream.chunk_tokens or fewer stream.read_threads"
        yield Problem("host memory", "stream.memory", message, fix)
    if plan.scratch_bytes:
        there = existing_folder(scratch)
        left = shutil.disk_usage(there).free
        if not there.is_dir() or not os.access(there, os.W_OK):
            message = f"the scratch file cannot be made: {there} is no folder that this process may write to"
            yield Problem(str(scratch), "stream.disk", message, "set stream.scratch")
        elif plan.scratch_bytes > left:
            message = f"the scratch file needs {size_text(plan.scratch_bytes)}, {size_text(left)} are free"
            yield Problem(str(scratch), "stream.disk", message, "set stream.scratch, or a smaller stream.chunk_tokens")
