"""What share of the supervised tokens a draft vocab of each size would hold.

Shapes: V target vocab.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from eagle3.data.show.printable import printable_name
from eagle3.data.vocab_count import SupervisedCounts, count_tokens
from eagle3.draft.vocab import DraftVocab
from eagle3.wiring.report import aligned

SIZES = (8_000, 16_000, 32_000, 64_000)
_SURE = 1.96
"""Standard errors on either side of 95% of a normal distribution."""


@dataclass(frozen=True)
class Share:
    """A share of supervised tokens.

    Attributes:
        error: None if every sample was counted. Else `share` is an estimate: what a vocab chosen from half of the
            sampled samples holds of all the data is within `share` +- `error`, 19 times out of 20.
    """

    share: float
    error: float | None = None

    def __str__(self) -> str:
        return f"{self.share:.2%}" + ("" if self.error is None else f" ± {self.error:.2%}")


@dataclass(frozen=True)
class Coverage:
    """What a vocab of `size` tokens holds, of all supervised tokens and of each source's."""

    size: int
    overall: Share
    by_source: dict[str, Share]


@dataclass(frozen=True)
class CoverageReport:
    """Coverage by size, and what was counted.

    Attributes:
        forced: tokens that every vocab holds, whatever their count.
        distinct: different tokens that were supervised.
        left_out: sizes that cannot be: above the target's vocab, or below the forced tokens.
    """

    rows: list[Coverage]
    samples: int
    of: int
    tokens: int
    distinct: int
    forced: int
    vocab_size: int
    left_out: list[int]

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    def render(self) -> str:
        drawn = f"{self.samples:,} of {self.of:,} samples, drawn at random"
        lines = [
            f"{self.tokens:,} supervised tokens ({drawn if self.samples < self.of else f'all {self.of:,} samples'}), "
            f"{self.distinct:,} different ones of the target's {self.vocab_size:,}; {self.forced:,} tokens are forced",
        ]
        sources = sorted({name for row in self.rows for name in row.by_source})
        table = [("draft vocab", "supervised tokens it holds", *map(printable_name, sources))]
        table += [
            (f"{row.size:,}", *map(str, (row.overall, *(row.by_source[name] for name in sources)))) for row in self.rows
        ]
        lines += [f"  {line}" for line in aligned(table)]
        if self.samples < self.of:
            lines.append("  each half of them by the vocab that the other half chooses: one of all samples holds more")
        if self.left_out:
            lines.append(f"  left out: {', '.join(f'{size:,}' for size in self.left_out)}")
        return "\n".join(lines)


def coverage_report(
    counts: SupervisedCounts, keep_ids: Iterable[int] = (), sizes: Sequence[int] = SIZES
) -> CoverageReport:
    """Coverage of the vocabs of these sizes that these counts choose; `keep_ids` are in each of them."""
    keep, total = sorted(set(keep_ids)), int(counts.total.sum())
    vocab_size = counts.total.numel()
    fitting = [size for size in sizes if max(len(keep), 1) <= size <= vocab_size]
    return CoverageReport(
        rows=[_coverage(counts, size, keep) for size in fitting],
        samples=counts.samples,
        of=counts.of,
        tokens=total,
        distinct=int((counts.total > 0).sum()),
        forced=len(keep),
        vocab_size=vocab_size,
        left_out=[size for size in sizes if size not in fitting],
    )


def held(counts: torch.Tensor, vocab: DraftVocab) -> float:
    """Share of counted tokens, int64 [V], that are in the vocab; 1 if nothing was counted."""
    total = int(counts.sum())
    return float(counts[vocab.ids].sum()) / total if total else 1.0


def _coverage(counts: SupervisedCounts, size: int, keep: list[int]) -> Coverage:
    if counts.keeps_parts:
        return _estimate(counts, size, keep)
    vocab = DraftVocab.from_counts(counts.total, size, keep)
    by_source = {name: Share(held(of, vocab)) for name, of in counts.by_source.items()}
    return Coverage(size, Share(held(counts.total, vocab)), by_source)


def _estimate(counts: SupervisedCounts, size: int, keep: list[int]) -> Coverage:
    """Each half of the samples is measured by the vocab of the other half, so that no token speaks for itself."""
    halves, vocab_size = (counts.parts[0::2], counts.parts[1::2]), counts.total.numel()
    measured: list[tuple[str | None, int, int]] = []
    for half, other in (halves, halves[::-1]):
        seen = count_tokens(((part, torch.ones_like(part, dtype=torch.bool)) for _, part in other), vocab_size)
        known = DraftVocab.from_counts(seen, size, keep).t2d
        measured += [(source, int(known[part].sum()), part.numel()) for source, part in half]
    unseen = 1 - counts.samples / counts.of
    by_source = {name: _ratio([row[1:] for row in measured if row[0] == name], unseen) for name in counts.by_source}
    return Coverage(size, _ratio([row[1:] for row in measured], unseen), by_source)


def _ratio(pairs: Sequence[tuple[int, int]], unseen: float) -> Share:
    """Ratio of two totals over samples drawn without replacement, `unseen` of them left, with its error.

    Args:
        pairs: supervised tokens of each sample that the vocab holds, and all of them.
    """
    total, count = sum(length for _, length in pairs), len(pairs)
    if not total:
        return Share(1.0, 0.0)
    share = sum(inside for inside, _ in pairs) / total
    spread = sum((inside - share * length) ** 2 for inside, length in pairs) * count / max(count - 1, 1)
    return Share(share, _SURE * math.sqrt(spread * unseen) / total)
