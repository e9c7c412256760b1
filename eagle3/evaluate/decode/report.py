"""The report of `eagle3 decode`: the field's table, and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from eagle3.data.show.printable import printable_name
from eagle3.errors import EXIT_OK, EXIT_PROBLEMS
from eagle3.evaluate.checkpoint import finite
from eagle3.evaluate.decode.compare import Deviation
from eagle3.evaluate.decode.result import SetResult, mean_length

_SHOWN = 20


@dataclass(frozen=True)
class DecodeReport:
    """What was asked, and what came of it.

    Attributes:
        drafting: steps, topk, draft_tokens and drafts.
        sampling: temperature, top_p, top_k and seed; None where it was greedy.
        sets: by name, in the order given.
        total: of all sets together.
        compared: answers that were held against the target's own.
        deviations: of those the ones that differ.
        left_out: turns with too long a prompt and records that are bad, by set, in words.
        output: the file of answers, if there is one.
        decoded: answers that this run made; the others were in the output.
    """

    checkpoint: str
    target: str
    dtype: str
    device: str
    drafting: Mapping[str, Any]
    sampling: Mapping[str, Any] | None
    sets: Mapping[str, SetResult]
    total: SetResult
    compared: int
    deviations: list[Deviation]
    left_out: Mapping[str, list[str]]
    output: str | None
    decoded: int

    @property
    def mean(self) -> float:
        """Plain mean of the sets' acceptance lengths."""
        return mean_length(list(self.sets.values()))

    @property
    def exit_code(self) -> int:
        """2 if a greedy answer is not the target's own, and rounding does not explain it."""
        return EXIT_OK if all(item.near_tie for item in self.deviations) else EXIT_PROBLEMS

    def render(self) -> str:
        """A row for each set, their mean, and what was found by comparing."""
        how = ", ".join(f"{name} {value}" for name, value in self.drafting.items())
        sampled = "greedy" if self.sampling is None else f"temperature {self.sampling['temperature']:g}"
        rows = {**self.sets, "all": self.total} if len(self.sets) > 1 else self.sets
        wide = max(4, *(len(printable_name(name)) for name in rows)) + 2
        titles = f"{'':<{wide}}{'answers':>8}{'tokens':>9}{'acceptance length':>19}{'95% interval':>18}{'rate':>8}"
        lines = [
            f"{self.checkpoint} on {self.target} ({self.dtype}, {self.device}): {how}; {sampled}",
            f"{titles}{'tokens/s':>10}{'alone':>9}{'speed-up':>10}",
            *(_row(printable_name(name), item, wide) for name, item in rows.items()),
        ]
        if len(self.sets) > 1:
            lines.append(f"{'mean':<{wide}}{_number(self.mean, 3):>36}")
        shares = ", ".join(
            f"{accepted}: {count / self.total.rounds:.1%}"
            for accepted, count in enumerate(self.total.histogram)
            if count
        )
        lines.append(f"rounds by accepted drafts: {shares or 'no data: no answer is longer than one token'}")
        lines += self._compared_lines()
        lines += [f"left out of {printable_name(name)}: {', '.join(items)}" for name, items in self.left_out.items()]
        if self.output is not None:
            lines.append(f"{self.output}: {self.total.answers:,} answers, {self.decoded:,} made by this run")
        return "\n".join(lines)

    def _compared_lines(self) -> list[str]:
        if not self.compared:
            return []
        equal = self.compared - len(self.deviations)
        lines = [f"{equal:,} of {self.compared:,} answers are the target's own, token for token"]
        lines += [f"  {item.render()}" for item in self.deviations[:_SHOWN]]
        more = len(self.deviations) - _SHOWN
        return [*lines, f"  and {more:,} more, see --json"] if more > 0 else lines

    def to_json(self) -> str:
        """Everything; see docs/schemas/decode.schema.json."""
        value = {
            "format": "eagle3-decode",
            "format_version": 1,
            **{name: item for name, item in asdict(self).items() if name != "deviations"},
            "mean_length": self.mean,
            "deviations": [{**asdict(item), "near_tie": item.near_tie} for item in self.deviations],
        }
        return json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False)


def _row(name: str, item: SetResult, wide: int) -> str:
    spread = "no data" if math.isnan(item.length) else f"{item.interval[0]:.3f} to {item.interval[1]:.3f}"
    rate = "-" if math.isnan(item.rate) else f"{item.rate:.1%}"
    alone = "-" if item.own_tokens_per_second is None else f"{item.own_tokens_per_second:.1f}"
    gain = "-" if item.speed_up is None else f"{item.speed_up:.2f}x"
    counts = f"{name:<{wide}}{item.answers:>8,}{item.tokens:>9,}{_number(item.length, 3):>19}{spread:>18}{rate:>8}"
    return f"{counts}{_number(item.tokens_per_second, 1):>10}{alone:>9}{gain:>10}"


def _number(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"
