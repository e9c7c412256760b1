"""One pass over a target's layers for a chunk of tokens: each layer's weights are read once, all the chunk's tokens go
through it, and the boundaries that are wanted are handed out as they are passed.

Legend: T tokens of the chunk, H hidden.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import nn

from eagle3.target.streaming.checkpoint import Raw, Recipe
from eagle3.target.streaming.fused import fuse
from eagle3.target.streaming.moe import ExpertGroup
from eagle3.target.streaming.packing import MicroBatch, micro_batches, packed
from eagle3.target.streaming.reader import WeightReader, raw_offsets
from eagle3.target.streaming.residual import Placement, Residual, residual_stream
from eagle3.target.streaming.skeleton import LayerInputs, Skeleton
from eagle3.wiring.layers import EMBEDDING

LAST: Literal["last"] = "last"
StateKey = int | Literal["last"]


@dataclass(frozen=True)
class StreamSizes:
    """How much goes through at once.

    Attributes:
        chunk_tokens: tokens of a chunk; each chunk reads the checkpoint once.
        micro_tokens: most tokens in one call of a layer (a longer sample is a call of its own).
        residual: where a chunk's residual stream lies.
        expert_group: experts unpacked at a time, or None for all of a layer.
    """

    chunk_tokens: int
    micro_tokens: int
    residual: Placement = "device"
    expert_group: int | None = None


class StateSink(Protocol):
    """Takes the states that a walk passes.

    Attributes:
        keys: output indices that are wanted, and "last" for what the head reads.
    """

    keys: frozenset[StateKey]

    def put(self, key: StateKey, begin: int, states: torch.Tensor) -> None:
        """States [n, H] of rows `begin` to `begin + n` of the chunk, on the walk's device, valid during the call."""
        ...


@dataclass
class WalkTimes:
    """Seconds of a walk, for benchmarks.

    Attributes:
        layers: of each layer, from the moment its weights were there (GPU: by events on the stream).
        waits: that each layer waited for its weights.
    """

    layers: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)


class LayerWalk:
    """Runs chunks through the layers of a skeleton.

    Args:
        skeleton: of the target.
        device: that computes.
        sizes: see `StreamSizes`.
        post_norm: apply the final norm to the last hidden states.
        read_threads: threads that read weights.
        scratch: folder of the residual stream's file, if it lies in one.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        device: torch.device,
        sizes: StreamSizes,
        post_norm: bool,
        read_threads: int,
        scratch: Path,
    ) -> None:
        self.skeleton = skeleton
        self.device = device
        self.sizes = sizes
        self.post_norm = post_norm
        self.scratch = scratch
        self._live: dict[str, torch.Tensor] = {}
        self._groups: Callable[[], Iterator[ExpertGroup]] = partial(iter, ())
        outer = [part for part in (skeleton.embedding, skeleton.norm, skeleton.head) if part is not None]
        largest = max(raw_offsets(skeleton.recipes(part))[1] for part in (*outer, *skeleton.layers))
        self.reader = WeightReader(device, largest, read_threads)
        skeleton.place(device)
        for layer in skeleton.layers:
            fuse(layer, lambda: self._groups(), device, skeleton.dtype)
        for part in (skeleton.embedding, skeleton.norm):
            self.reader.start(skeleton.recipes(part))
            self._fill(part, self.reader.finish(), {})

    @torch.inference_mode()
    def run(
        self,
        batch: Sequence[Sequence[int]],
        sink: StateSink,
        advance: Callable[[float], None],
        order: Sequence[int] | None = None,
    ) -> WalkTimes:
        """Walks a chunk.

        Args:
            batch: token ids of its samples.
            sink: gets the states, layer by layer in ascending order, "last" at the end.
            advance: called with tokens done; all calls together give the chunk's tokens.
            order: layers to walk, for benchmarks; default: those that the sink needs.
        """
        layers = order if order is not None else range(self._depth(sink))
        micros = micro_batches(batch, self.sizes.micro_tokens, self.device)
        tokens = micros[-1].end
        clock = _Clock(self.device)
        hidden = self.skeleton.files.facts.hidden_size
        if layers:
            self.reader.start(self.skeleton.recipes(self.skeleton.layers[layers[0]]))
        with residual_stream(
            tokens, hidden, self.skeleton.dtype, self.device, self.sizes.residual, self.scratch
        ) as stream:
            arguments = []
            for micro in micros:
                states, inputs = self.skeleton.inputs(micro)
                arguments.append(inputs)
                self._pass_on(sink, EMBEDDING, micro, states)
                stream.put(micro.begin, states)
            share = 1 / max(len(layers), 1)
            for place, number in enumerate(layers):
                following = layers[place + 1] if place + 1 < len(layers) else None
                self._layer(number, following, micros, arguments, stream, sink, clock, share, advance)
            if LAST in sink.keys:
                for micro in micros:
                    states = stream.get(micro.begin, micro.end)
                    sink.put(LAST, micro.begin, self.normed(states) if self.post_norm else states)
        return clock.times()

    @torch.inference_mode()
    def normed(self, states: torch.Tensor) -> torch.Tensor:
        """The final norm of [T, H] on the walk's device."""
        result: torch.Tensor = self.skeleton.norm(states)
        return result

    def load(self, number: int) -> bool:
        """Fills one layer and waits for it; true if its experts are unpacked as they are used. For checks."""
        layer = self.skeleton.layers[number]
        self.reader.start(self.skeleton.recipes(layer))
        return self._prepare(layer, self.reader.finish())

    def head_tensors(self) -> dict[str, torch.Tensor]:
        """`embed_tokens.weight` [V, H], `norm.weight` [H] and, unless tied, `lm_head.weight` [V, H], on the CPU."""
        tensors = {
            "embed_tokens.weight": self.skeleton.embedding.weight.detach().cpu(),
            "norm.weight": self.skeleton.norm.weight.detach().cpu(),
        }
        if self.skeleton.head is not None:
            [recipe] = self.skeleton.recipes(self.skeleton.head)
            self.reader.start([recipe])
            raws = self.reader.finish()
            head = torch.empty(recipe.shape, dtype=recipe.dtype, device=self.device)
            recipe.decode([raws[raw] for raw in recipe.raws], head)
            if not (self.skeleton.tied and torch.equal(head, self.skeleton.embedding.weight)):
                tensors["lm_head.weight"] = head.cpu()
        return tensors

    def close(self) -> None:
        self.reader.close()

    def _depth(self, sink: StateSink) -> int:
        if LAST in sink.keys:
            return len(self.skeleton.layers)
        return max((key for key in sink.keys if isinstance(key, int)), default=EMBEDDING) + 1

    def _layer(
        self,
        number: int,
        following: int | None,
        micros: Sequence[MicroBatch],
        arguments: Sequence[LayerInputs],
        stream: Residual,
        sink: StateSink,
        clock: _Clock,
        share: float,
        advance: Callable[[float], None],
    ) -> None:
        layer = self.skeleton.layers[number]
        clock.wait()
        raws = self.reader.finish()
        clock.ready()
        ahead = None if following is None else self.skeleton.recipes(self.skeleton.layers[following])
        grouped = self._prepare(layer, raws)
        if ahead is not None and not grouped:
            self.reader.start(ahead)
        for micro, inputs in zip(micros, arguments, strict=True):
            with packed(micro):
                output = layer(stream.get(micro.begin, micro.end).unsqueeze(0), **inputs[number])
            states = layer_states(output)
            self._pass_on(sink, number, micro, states)
            stream.put(micro.begin, states)
            del output, states
            advance((micro.end - micro.begin) * share)
        layer.to("meta")
        if ahead is not None and grouped:
            self.reader.start(ahead)
        clock.done()

    def _pass_on(self, sink: StateSink, key: int, micro: MicroBatch, states: torch.Tensor) -> None:
        if key in sink.keys:
            sink.put(key, micro.begin, states)

    def _prepare(self, layer: nn.Module, raws: dict[Raw, torch.Tensor]) -> bool:
        """Fills the layer; true if its experts are unpacked as they are used, from the reader's buffer."""
        self._groups = partial(iter, ())  # or the last layer's experts would live on beside this one's
        experts = self.skeleton.expert_recipes(layer)
        grouped = bool(experts) and self.sizes.expert_group is not None
        self._live = self._fill(layer, raws, self._live, skip=experts if grouped else ())
        if grouped:
            self._groups = partial(_unpacked, experts, raws, self.sizes.expert_group or 1, self.device)
        elif experts:
            gate_up, down = (self._live[recipe.key] for recipe in experts)
            self._groups = lambda: iter([ExpertGroup(0, gate_up, down)])
        return grouped

    @torch.inference_mode()
    def _fill(
        self,
        module: nn.Module,
        raws: dict[Raw, torch.Tensor],
        live: dict[str, torch.Tensor],
        skip: Sequence[Recipe] = (),
    ) -> dict[str, torch.Tensor]:
        """Decodes the module's parameters, into `live`'s tensors where they fit, and assigns them."""
        wanted = [recipe for recipe in self.skeleton.recipes(module) if recipe not in skip]
        kept = {
            recipe.key: live[recipe.key]
            for recipe in wanted
            if recipe.key in live and (live[recipe.key].shape, live[recipe.key].dtype) == (recipe.shape, recipe.dtype)
        }
        live.clear()  # frees what does not fit before anything new is allocated
        for recipe in wanted:
            tensor = kept.get(recipe.key)
            if tensor is None:
                tensor = kept[recipe.key] = torch.empty(recipe.shape, dtype=recipe.dtype, device=self.device)
            recipe.decode([raws[raw] for raw in recipe.raws], tensor)
        module.load_state_dict(kept, assign=True, strict=not skip)
        return kept


def layer_states(output: Any) -> torch.Tensor:
    """States [T, H] of what a decoder layer returned for one row: [1, T, H], or a tuple that begins with it."""
    states: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return states[0]


def _unpacked(
    experts: Sequence[Recipe], raws: dict[Raw, torch.Tensor], size: int, device: torch.device
) -> Iterator[ExpertGroup]:
    """The experts, `size` at a time, unpacked when they are asked for."""
    count = experts[0].shape[0]
    for first in range(0, count, size):
        weights = []
        for recipe in experts:
            taken = min(size, count - first)
            out = torch.empty(taken, *recipe.shape[1:], dtype=recipe.dtype, device=device)
            parts = [_some(raws[raw], first, taken, count) for raw in recipe.raws]
            recipe.decode(parts, out)
            weights.append(out)
        yield ExpertGroup(first, *weights)


def _some(raw: torch.Tensor, first: int, taken: int, count: int) -> torch.Tensor:
    """The part of a raw tensor that belongs to `taken` experts from `first`; it has one or more matrices for each, or
    is one tensor of them all."""
    if raw.shape[0] == 1:
        return raw[:, first : first + taken]
    each = raw.shape[0] // count
    return raw[first * each : (first + taken) * each]


class _Clock:
    """Times layers and waits; on a GPU by events, so that nothing is synchronised while the walk goes on."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[torch.cuda.Event | float, ...]] = []
        self._open: list[torch.cuda.Event | float] = []

    def wait(self) -> None:
        self._open = [self._now()]

    def ready(self) -> None:
        self._open.append(self._now())

    def done(self) -> None:
        self._marks.append((*self._open, self._now()))

    def times(self) -> WalkTimes:
        if self._cuda:
            torch.cuda.synchronize()
        result = WalkTimes()
        for begin, ready, end in self._marks:
            result.waits.append(_between(begin, ready))
            result.layers.append(_between(ready, end))
        return result

    def _now(self) -> torch.cuda.Event | float:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between(begin: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
    if isinstance(begin, float) and isinstance(end, float):
        return end - begin
    assert isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
    return begin.elapsed_time(end) / 1000
