"""What a server counts of all its traffic: how much of it was not ours, and acceptance where requests do not say.

`/metrics` is Prometheus text: SGLang's (`--enable-metrics`) in `observability/metrics_collector.py`, vLLM's in
`v1/spec_decode/metrics.py`. Its counters run since the start, so only differences say anything; probes of health are
left out of SGLang's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eagle3.serve.bench.rounds import Rounds

_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})?\s+(\S+)\s*$")
_REQUESTS = ("sglang:num_requests_total", "vllm:request_success_total")
_TOKENS = ("sglang:generation_tokens_total", "vllm:generation_tokens_total")
_VERIFIES = ("sglang:spec_verify_calls_total", "vllm:spec_decode_num_drafts_total")
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


@dataclass(frozen=True)
class Counters:
    """Of a server since it was started; None where it does not count that.

    Attributes:
        requests: answered.
        tokens: of answers.
        verifies: of speculative decoding.
        accepted: drafts.
    """

    requests: int | None = None
    tokens: int | None = None
    verifies: int | None = None
    accepted: int | None = None

    def since(self, before: Counters) -> Counters | None:
        """What was added; None where a count fell: another process counts."""
        pairs = [
            (getattr(self, name), getattr(before, name)) for name in ("requests", "tokens", "verifies", "accepted")
        ]
        if any(after is not None and old is not None and after < old for after, old in pairs):
            return None
        return Counters(*(None if after is None or old is None else after - old for after, old in pairs))

    @property
    def rounds(self) -> Rounds | None:
        """All requests' together: the first token of each came from its prefill."""
        if not self.verifies:
            return None
        if self.accepted is not None:
            return Rounds(self.verifies, self.verifies + self.accepted)
        if self.tokens is None or self.requests is None:
            return None
        return Rounds(self.verifies, self.tokens - self.requests)


def read_counters(text: str) -> Counters:
    """Sums over all labels (models, schedulers, engines) of a page of `/metrics`."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if match := _LINE.match(line):
            try:
                sums[match[1]] = sums.get(match[1], 0.0) + float(match[2])
            except ValueError:
                continue

    def first(names: Sequence[str]) -> int | None:
        found = next((sums[name] for name in names if name in sums), None)
        return None if found is None or not math.isfinite(found) else int(found)

    return Counters(first(_REQUESTS), first(_TOKENS), first(_VERIFIES), first([_ACCEPTED]))


@dataclass(frozen=True)
class SchedulerAcceptance:
    """What one scheduler of a data-parallel server says: acceptance length over so many verifies since its start."""

    length: float
    verifies: int


def pooled_schedulers(
    before: Mapping[int, SchedulerAcceptance | None], after: Mapping[int, SchedulerAcceptance | None]
) -> Rounds | None:
    """The rounds between two looks at a server's schedulers, each weighing as many as it verified.

    Args:
        before, after: by number of the scheduler; None of one that has verified nothing.

    Returns:
        None where none verified anything: no data, which is neither 0 nor 1.
    """
    verifies, committed = 0, 0.0
    for number, found in after.items():
        if found is None:
            continue
        old = before.get(number) or SchedulerAcceptance(0.0, 0)
        verifies += found.verifies - old.verifies
        committed += found.length * found.verifies - old.length * old.verifies
    return Rounds(verifies, round(committed)) if verifies > 0 else None
