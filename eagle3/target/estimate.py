"""`eagle3 extract --dry-run`: what an extraction will read, write and take, from configs, data and headers alone.

Hours are an estimate: rates measured on one card, scaled by what a token computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import get_args

import torch

from eagle3.config import ExtractConfig
from eagle3.config.schema import StoreDtype
from eagle3.data.ring_folder import check_ring_plan
from eagle3.data.store_check import check_shard
from eagle3.data.store_layout import LastRows, StoreLayout
from eagle3.errors import Problem, ProblemsError
from eagle3.files import size_text
from eagle3.target.engines.sglang_server import newest_start_command
from eagle3.target.plan import ExtractPlan, check_resume, disk_estimate, make_plan, process_problems
from eagle3.target.resolve import pick_device
from eagle3.target.ring_extract import for_ring, plan_ring, ring_estimate
from eagle3.target.stream_plan import (
    StreamPlan,
    begun_manifest,
    begun_settings,
    make_stream_plan,
    missing_shards,
    settle_sizes,
)
from eagle3.target.stream_ring import plan_streamed_ring
from eagle3.wiring.report import aligned

# Kimi-K2.5 on one H200, documents of 2k tokens; see docs/benchmarks.md, "Extraction of Kimi-K2.5".
_RATES = {"streamed": 8_110.0, "transformers": 5_230.0}
_RATED_PARAMETERS = 30.5e9
"""Parameters of Kimi-K2.5's decoder layers that a token goes through."""
_SHARES_SHOWN = 16


@dataclass(frozen=True)
class DryRun:
    """What would be done, and what bars it."""

    lines: Sequence[str]
    problems: Sequence[Problem]

    def render(self) -> str:
        return "\n".join([*self.lines, *map(str, self.problems), "dry run: nothing was written"])


def dry_run(cfg: ExtractConfig, by_dtype: bool = False) -> DryRun:
    """Plans an extraction; loads no weights, downloads none and writes nothing.

    With `by_dtype`, also says what the store would take in each type.

    Raises:
        ProblemsError: the target or the data cannot be used, so that nothing can be said.
    """
    plan = make_plan(cfg, download=False)
    if cfg.ring is not None:
        return _ring_dry_run(plan)
    if plan.engine == "streamed":
        plan = settle_sizes(plan, begun_settings(plan))
    disk, problems = disk_estimate(plan)
    lines = [f"engine: {plan.engine}", str(plan.prepared), disk, *(_by_dtype(plan) if by_dtype else ())]
    try:
        if check_resume(plan):
            return DryRun([*lines, "the store is complete"], problems)
    except ProblemsError as error:
        problems += error.problems
    try:
        problems += process_problems(plan)
        lines += _streamed(make_stream_plan(plan, begun_settings(plan))) if plan.engine == "streamed" else _whole(plan)
    except ProblemsError as error:
        problems += error.problems
    return DryRun(lines, problems)


def _ring_dry_run(plan: ExtractPlan) -> DryRun:
    lines, problems = [f"engine: {plan.engine}", str(plan.prepared)], process_problems(plan)
    try:
        plan = for_ring(plan)
        if plan.engine == "streamed":
            stream, ring = plan_streamed_ring(plan)
            passes, read = ring.shards[-1].unit + 1, stream.skeleton.pass_bytes
            lines += stream.memory.lines()
            lines.append(f"{passes:,} chunks, each a pass over {size_text(read)} of weights")
        else:
            ring = plan_ring(plan)
            lines += _whole(plan)
        text, disk = ring_estimate(plan, ring)
        lines.append(text)
        problems += disk
        check_ring_plan(plan.folder, ring)
    except ProblemsError as error:
        problems += error.problems
    return DryRun(lines, problems)


def _by_dtype(plan: ExtractPlan) -> Iterator[str]:
    table = [("store_dtype", "last_hidden_rows", "bytes a token", "all samples")]
    for dtype, rows in product(get_args(StoreDtype), get_args(LastRows)):
        layout = StoreLayout(replace(plan.contract, dtype=dtype), rows)
        size = layout.tensor_bytes(plan.prepared.tokens, plan.prepared.supervised_tokens)
        chosen = " (this config)" if layout == plan.layout else ""
        table.append((dtype, rows, f"{size / plan.prepared.tokens:,.0f}", f"{size_text(size)}{chosen}"))
    yield from aligned(table)


def active_parameters(layers: Sequence[torch.nn.Module], chosen: int) -> int:
    """Parameters of decoder layers that one token goes through; of E experts, `chosen`."""
    return sum(
        parameter.numel() * chosen // parameter.shape[0] if ".experts." in f".{name}" else parameter.numel()
        for layer in layers
        for name, parameter in layer.named_parameters()
    )


def _streamed(stream: StreamPlan) -> Iterator[str]:
    yield from stream.memory.lines()
    manifest = begun_manifest(stream.plan)
    if manifest is not None:
        sound = [shard for shard in manifest.shards if not check_shard(stream.plan.folder, shard, manifest.layout)]
        if bad := len(manifest.shards) - len(sound):
            yield f"{bad:,} shards are missing or damaged, and are done again"
        manifest = replace(manifest, shards=tuple(sound))
    left = [[chunk for chunk, _ in missing_shards(chunks, manifest)] for chunks in stream.shares]
    passes, count = sum(map(len, left)), stream.process.count
    skeleton = stream.skeleton
    pass_bytes = skeleton.pass_bytes
    most = max(map(len, left))
    yield (
        f"{len(stream.chunks):,} chunks, {passes:,} of them to be done, each a pass over {size_text(pass_bytes)} of "
        f"weights: {size_text(passes * pass_bytes)} read in all, at most {size_text(most * pass_bytes)} by a process"
    )
    rate, source = _rate(stream.plan, skeleton.layers)
    tokens = [sum(map(stream.tokens, chunks)) for chunks in left]
    yield f"rate: {source}"
    if rate is not None:
        needed = pass_bytes * rate / max(stream.memory.sizes.chunk_tokens, 1) / 1e9
        together = f", {_duration(max(tokens) / rate)} for {count:,}" if count > 1 else ""
        yield (
            f"time, estimated: {_duration(sum(tokens) / rate)} for one process{together}, where each is given "
            f"{needed:,.2f} GB/s of weights (a node's processes share its page cache)"
        )
    yield from _shares(tokens, list(map(len, left)), rate)
    yield from stream.advice()


def _whole(plan: ExtractPlan) -> Iterator[str]:
    model = plan.files.spec.empty(plan.files.folder, getattr(torch, plan.cfg.target.dtype))
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    if plan.engine == "transformers":
        read = sum(path.stat().st_size for path in plan.files.folder.glob("*.safetensors"))
        yield f"one process reads the weights once: {size_text(read)}; {size_text(weights)} in memory, beside a batch"
    else:
        yield f"how to start the server: {newest_start_command(plan.files, plan.contract.wiring)}"
    rate, source = _rate(plan, plan.files.spec.decoder_layers(model))
    yield f"rate: {source}"
    if rate is not None:
        yield f"time, estimated: {_duration(plan.prepared.tokens / rate)} for all samples"


def _rate(plan: ExtractPlan, layers: Sequence[torch.nn.Module]) -> tuple[float | None, str]:
    """Tokens per second of one process, and where that is from."""
    if given := plan.cfg.stream.tokens_per_second:
        return given, f"{given:,.0f} tokens/s a process, as stream.tokens_per_second says"
    if plan.engine not in _RATES:
        return None, "how fast the server is, is not known here; stream.tokens_per_second would say"
    active = active_parameters(layers, plan.files.text_config.get("num_experts_per_tok") or 1)
    rate = _RATES[plan.engine] * _RATED_PARAMETERS / active
    slower = "" if pick_device(plan.cfg.target.device).type == "cuda" else "; there is no GPU here: far slower"
    return rate, (
        f"{rate:,.0f} tokens/s a process: {_RATES[plan.engine]:,.0f} of Kimi-K2.5 on one H200 (docs/benchmarks.md), "
        f"scaled to the {active / 1e6:,.1f}M parameters that a token goes through here; for another card, set "
        f"stream.tokens_per_second{slower}"
    )


def _shares(tokens: Sequence[int], chunks: Sequence[int], rate: float | None) -> Iterator[str]:
    """The share of each process, and how uneven they are."""
    if len(tokens) == 1 or not sum(tokens):
        return
    for index, (count, share) in enumerate(zip(chunks, tokens, strict=True)):
        if index < _SHARES_SHOWN:
            took = "" if rate is None else f", {_duration(share / rate)}"
            yield f"  process {index}: {count:,} chunks, {share:,} tokens{took}"
    if len(tokens) > _SHARES_SHOWN:
        yield f"  and {len(tokens) - _SHARES_SHOWN:,} more"
    mean = sum(tokens) / len(tokens)
    yield f"the largest share is {max(tokens) / mean:.2f} times the mean"


def _duration(seconds: float) -> str:
    if seconds >= 3600:
        return f"{seconds / 3600:,.1f} hours"
    return f"{seconds / 60:.1f} minutes" if seconds >= 60 else f"{seconds:.1f} seconds"
