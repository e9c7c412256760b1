"""Samples of token ids, and what became of the conversations that they were made of."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from eagle3.data.drops import Drops
from eagle3.data.show.printable import printable_name

_MOST = 20
"""Sources that are named in words; the JSON has all."""


@dataclass(frozen=True)
class TokenSample:
    """A rendered conversation, or one answer of it with what goes before, cut to the longest length.

    Attributes:
        source: where the conversation comes from, as its record says.
    """

    id: str
    input_ids: list[int]
    loss_mask: list[bool]
    source: str | None = None


@dataclass
class PrepareReport:
    """What became of the conversations. `drops` counts by reason and source; tokens are those of the kept samples.

    Attributes:
        total: conversations, and records that are none.
        kept: conversations that gave a sample.
        split: of them, those that gave a sample for each answer.
        samples: more than `kept` where conversations were split.
        cut: samples cut at the longest length.
        kept_of: conversations kept, by source.
    """

    total: int = 0
    kept: int = 0
    split: int = 0
    samples: int = 0
    cut: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    drops: Drops = field(default_factory=Drops)
    kept_of: Counter[str | None] = field(default_factory=Counter)

    @property
    def dropped(self) -> Counter[str]:
        """What was left out, by reason."""
        return self.drops.by_reason()

    def add(self, sample: TokenSample, whole_length: int) -> None:
        """Counts a sample that was cut from `whole_length` tokens."""
        self.samples += 1
        self.cut += len(sample.input_ids) < whole_length
        self.tokens += len(sample.input_ids)
        self.supervised_tokens += sum(sample.loss_mask)

    def take_out(self, sample: TokenSample, reason: str) -> None:
        """Counts a sample that was kept so far as dropped; of a split conversation the others stay."""
        self.drops.add(reason, sample.source)
        self.samples -= 1
        if not self.split:
            self.kept -= 1
            self.kept_of[sample.source] -= 1
        self.tokens -= len(sample.input_ids)
        self.supervised_tokens -= sum(sample.loss_mask)

    def by_source(self) -> dict[str | None, dict[str, Any]]:
        """Conversations kept, and those dropped by reason, of each source."""
        names = {name for name, count in self.kept_of.items() if count} | self.drops.sources()
        return {
            name: {"kept": self.kept_of[name], "dropped": dict(self.drops.by_reason(name, every_source=False))}
            for name in sorted(names, key=lambda name: (name is None, name))
        }

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        counts = ("total", "kept", "split", "samples", "cut", "tokens", "supervised_tokens")
        sources = [{"source": name, **found} for name, found in self.by_source().items()]
        return {**{name: getattr(self, name) for name in counts}, "dropped": dict(self.dropped), "sources": sources}

    def __str__(self) -> str:
        lines = [
            f"{self.kept:,} of {self.total:,} conversations kept: {self.tokens:,} tokens, "
            f"{self.supervised_tokens:,} supervised; {self.cut:,} cut at the longest length"
        ]
        if self.split:
            lines.append(f"{self.split:,} of them split, a sample for each answer: {self.samples:,} samples in all")
        lines += [f"{count:,} of {self.total:,} dropped: {reason}" for reason, count in sorted(self.dropped.items())]
        found = self.by_source()
        if len(found) > 1:
            largest = sorted(found, key=lambda name: -found[name]["kept"] - sum(found[name]["dropped"].values()))
            lines += [f"  {printable_name(name or 'no source')}: {_words(**found[name])}" for name in largest[:_MOST]]
            lines += [f"  and {len(found) - _MOST:,} more sources"] if len(found) > _MOST else []
        return "\n".join(lines)


def _words(kept: int, dropped: dict[str, int]) -> str:
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(dropped.items()))
    return f"{kept:,} kept" + (f"; dropped: {reasons}" if reasons else "")
