"""What is known of a server while it starts, and when it is ready."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

PHASES = ("starting", "weights", "draft_weights", "kv_cache", "graphs", "warm_up", "ready")
"""In the order of a start."""
LABELS = {
    "starting": "starting processes",
    "weights": "reading the target's weights",
    "draft_weights": "reading the drafter's weights",
    "kv_cache": "allocating the key/value cache",
    "graphs": "capturing CUDA graphs",
    "warm_up": "warming up",
    "ready": "ready",
}


@dataclass(frozen=True)
class Progress:
    """How far a start has come.

    Attributes:
        phase: one of `PHASES`; `unknown` where only a URL is known.
        done, total: shards or graphs of the phase; 0 where it says nothing.
        seconds_left: of the phase, by the server's own reckoning; None where it makes none.
        elapsed: seconds since we began to wait.
        note: what is special, e.g. that the log is not there yet.
    """

    phase: str
    done: int = 0
    total: int = 0
    seconds_left: float | None = None
    elapsed: float = 0.0
    note: str = ""

    def __str__(self) -> str:
        label = LABELS.get(self.phase, "no answer yet")
        count = f" {self.done}/{self.total}" if self.total else ""
        left = f", {self.seconds_left:.0f} s left of it" if self.seconds_left is not None else ""
        return f"{label}{count}{left}" + (f" ({self.note})" if self.note else "")


@dataclass(frozen=True)
class Graphs:
    """Which work runs in CUDA graphs: True, False, or None where the log does not say.

    Attributes:
        decode: decoding of a server without a drafter.
        verify: the target's verify.
        draft: the draft steps. There are none to capture at 1 step, which leaves it None.
        draft_extend: the drafter's pass over the accepted tokens.
    """

    decode: bool | None = None
    verify: bool | None = None
    draft: bool | None = None
    draft_extend: bool | None = None

    @property
    def off(self) -> tuple[str, ...]:
        """The names of those that are known to be off."""
        return tuple(name for name, value in asdict(self).items() if value is False)


@dataclass(frozen=True)
class Ready:
    """A server that takes requests.

    Attributes:
        url: None where only its log was followed.
        version: of the engine, as it says itself, else as told.
        how: what said so: `/ready`, `/health`, or `log`.
        seconds: that we waited.
        phases: seconds in each phase, as far as the log tells.
        graphs: which CUDA graphs were captured, as far as the log tells.
        served: the model that it says it serves.
        warnings: what a person should know before measuring it.
    """

    url: str | None
    version: str | None
    how: str
    seconds: float
    phases: Mapping[str, float] = field(default_factory=dict)
    graphs: Graphs = field(default_factory=Graphs)
    served: str | None = None
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """As in docs/schemas/ready.schema.json."""
        return {
            "format": "eagle3-ready",
            "format_version": 1,
            "url": self.url,
            "engine_version": self.version,
            "how": self.how,
            "seconds": round(self.seconds, 1),
            "phases": {name: round(seconds, 1) for name, seconds in self.phases.items()},
            "cuda_graphs": asdict(self.graphs),
            "served": self.served,
            "warnings": list(self.warnings),
        }

    def render(self, as_json: bool = False) -> str:
        if as_json:
            return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)
        what = f"ready after {self.seconds:.0f} s" + (f": {self.url}" if self.url else "")
        known = [
            f"{name} {'on' if value else 'off'}" for name, value in asdict(self.graphs).items() if value is not None
        ]
        lines = [what, f"  said by {self.how}" + (f", SGLang {self.version}" if self.version else "")]
        if self.served:
            lines.append(f"  serves {self.served}")
        if self.phases:
            lines.append("  " + ", ".join(f"{LABELS[name]} {seconds:.0f} s" for name, seconds in self.phases.items()))
        if known:
            lines.append(f"  CUDA graphs: {', '.join(known)}")
        return "\n".join([*lines, *(f"  warning: {warning}" for warning in self.warnings)])
