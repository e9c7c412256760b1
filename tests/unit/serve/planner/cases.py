"""Configs, and worlds that obey the model exactly."""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle3.config import PlanConfig

INCIDENT: dict[str, Any] = {
    "points": [
        {"steps": 5, "draft_tokens": 6, "tok_s": 71.3, "draft_ms": 0.87, "verify_ms": 28.7},
        {"steps": 10, "draft_tokens": 11, "tok_s": 60},
    ],
    "baseline": 90,
}


def config(**values: Any) -> PlanConfig:
    return PlanConfig.model_validate(values)


class World:
    """A server whose every number is known; written apart from the model that is tested."""

    def __init__(self, rates: list[float], fixed: float, per_token: float, draft: float, overhead: float = 0.0) -> None:
        self.rates, self.fixed, self.per_token = rates, fixed, per_token
        self.draft, self.overhead = draft, overhead

    def length(self, steps: int) -> float:
        total = reached = 1.0
        for depth in range(steps):
            reached *= self.rates[min(depth, len(self.rates) - 1)]
            total += reached
        return total

    def cycle(self, steps: int, batch: int = 1) -> float:
        verify = self.fixed + self.per_token * (steps + 1) * batch
        return verify + self.draft * steps + self.overhead

    def tok_s(self, steps: int, batch: int = 1) -> float:
        return batch * self.length(steps) / self.cycle(steps, batch) * 1000

    def point(self, steps: int, *names: str, batch: int = 1) -> dict[str, Any]:
        everything = {
            "tok_s": self.tok_s(steps, batch),
            "verify_ms": self.fixed + self.per_token * (steps + 1) * batch,
            "draft_ms": self.draft * steps,
            "cycle_ms": self.cycle(steps, batch),
            "acceptance_length": self.length(steps),
        }
        return {"steps": steps, "batch": batch, **{name: everything[name] for name in names}}

    def noisy(self, point: dict[str, Any], error: float, generator: np.random.Generator) -> dict[str, Any]:
        measured = ("tok_s", "verify_ms", "draft_ms", "cycle_ms")
        return {
            name: value * float(np.exp(error * generator.standard_normal())) if name in measured else value
            for name, value in point.items()
        }
