"""A target that does not fit in memory: one decoder layer at a time is read from the checkpoint, run for a large chunk
of tokens, and dropped.

The layers are Transformers' own; their weights come from the checkpoint's safetensors by name, unpacked on the device.
Documents are packed without padding and never see each other. See docs/extraction.md.

Legend: T tokens, A aux layers, H target hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch

from eagle3.config import TargetConfig
from eagle3.data.target_argmax import make_target_head
from eagle3.draft.loss import TargetHead
from eagle3.target.resolve import TargetFiles, pick_device
from eagle3.target.streaming.skeleton import Skeleton
from eagle3.target.streaming.walk import LAST, LayerWalk, StateKey, StateSink, StreamSizes, WalkTimes
from eagle3.wiring.layers import LayerWiring

__all__ = ["StateSink", "StreamSizes", "StreamedEngine"]


class StreamedEngine:
    """Captures `wiring`'s layers and the states that the head reads, one layer in memory at a time.

    Its GPU becomes the process's current one.

    Args:
        files: the target.
        target: type and device that it computes in.
        wiring: layers to capture.
        last_hidden_states: what the head reads, after or before the final norm; None if it is not wanted, and layers
            above the captured ones then are neither read nor run.
        sizes: see `StreamSizes`.
        read_threads: threads that read weights.
        scratch: folder for the residual stream, if `sizes` puts it into a file; default: the working directory.
        skeleton: of the target, of the depth that is needed, if there is one already.

    Raises:
        ProblemsError: whatever bars the checkpoint from being read (missing, unexpected or mis-shaped tensors, an
            unknown quantization, a damaged file), all of it; or there is no such device.
    """

    def __init__(
        self,
        files: TargetFiles,
        target: TargetConfig,
        wiring: LayerWiring,
        last_hidden_states: Literal["post_norm", "pre_norm"] | None,
        sizes: StreamSizes,
        read_threads: int = 8,
        scratch: Path | None = None,
        skeleton: Skeleton | None = None,
    ) -> None:
        self.wiring = wiring
        self.spec = files.spec
        self.last_hidden_states = last_hidden_states
        self.device = pick_device(target.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # Triton launches kernels on the process's current GPU, wherever data is
        layers = files.facts.num_hidden_layers
        depth = layers if last_hidden_states else max(wiring.boundaries)
        self.skeleton = skeleton or Skeleton(files, getattr(torch, target.dtype), depth)
        post_norm = last_hidden_states == "post_norm"
        self.layer_walk = LayerWalk(
            self.skeleton, self.device, sizes, post_norm, read_threads, Path() if scratch is None else scratch
        )

    def walk(self, batch: Sequence[Sequence[int]], sink: StateSink, advance: Callable[[float], None]) -> WalkTimes:
        """One pass over the weights for these samples; see `LayerWalk.run`."""
        return self.layer_walk.run(batch, sink, advance)

    def states(self, batch: Sequence[Sequence[int]]) -> list[dict[StateKey, torch.Tensor]]:
        """States [T, H] of every captured layer, and "last" if it is wanted, of each sample, on the CPU."""
        keys: list[StateKey] = [*self.wiring.output_indices, *([LAST] if self.last_hidden_states else [])]
        sink = _Memory(frozenset(keys))
        self.walk(batch, sink, lambda _: None)
        lengths = [len(tokens) for tokens in batch]
        by_key = {key: sink.states(key).split(lengths) for key in keys}
        return [{key: rows[place] for key, rows in by_key.items()} for place in range(len(batch))]

    def head_tensors(self) -> dict[str, torch.Tensor]:
        """`embed_tokens.weight` [V, H], `norm.weight` [H] and, unless tied, `lm_head.weight` [V, H], on the CPU."""
        return self._head_tensors

    def target_head(self) -> TargetHead:
        """What turns "last", which must be wanted, into logits, on the walk's device; a copy of its own where the
        target does not tie it to its embedding. `streaming.memory` plans for it, and for `greedy_tokens` with it."""
        assert self.last_hidden_states is not None
        tensors = {**self.head_tensors(), "embed_tokens.weight": self.skeleton.embedding.weight}
        return make_target_head(tensors, self.skeleton.files.text_config, self.last_hidden_states).to(self.device)

    @cached_property
    def _head_tensors(self) -> dict[str, torch.Tensor]:
        return self.layer_walk.head_tensors()

    def close(self) -> None:
        """Stops the threads that read."""
        self.layer_walk.close()


class _Memory:
    """Keeps what it is given, on the CPU."""

    def __init__(self, keys: frozenset[StateKey]) -> None:
        self.keys = keys
        self._parts: dict[StateKey, list[torch.Tensor]] = {key: [] for key in keys}

    def put(self, key: StateKey, begin: int, states: torch.Tensor) -> None:
        self._parts[key].append(states.to("cpu", copy=True))

    def states(self, key: StateKey) -> torch.Tensor:
        return torch.cat(self._parts[key])
