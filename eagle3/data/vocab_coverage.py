"""What share of the supervised tokens a draft vocab of each size would hold.

Shapes: V target vocab.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eagle3.data.vocab_count import SupervisedCounts, count_tokens
from eagle3.draft.vocab import DraftVocab
from eagle3.wiring.report import aligned

SIZES = (8_000, 16_000, 32_000, 64_000)
_SURE = 1.96
"""Standard errors on either side of 95% of a normal distribution."""


@dataclass(frozen=True)
class Coverage:
    """Of a vocab of `size` tokens.

    Attributes:
        share: of all supervised tokens that were counted; or an estimate, see `error`.
        error: None if every sample was counted. Else the share of the whole data that a vocab chosen from half of the
            sampled samples would hold is within `share` +- `error`, 19 times out of 20.
        by_source: share of each source's tokens, of the samples that were counted.
    """

    size: int
    share: float
    error: float | None
    by_source: dict[str, float]


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
        return {**vars(self), "rows": [vars(row) for row in self.rows]}

    def render(self) -> str:
        drawn = f"{self.samples:,} of {self.of:,} samples, drawn at random"
        lines = [
            f"{self.tokens:,} supervised tokens ({drawn if self.samples < self.of else f'all {self.of:,} samples'}), "
            f"{self.distinct:,} different ones of the target's {self.vocab_size:,}; {self.forced:,} tokens are forced",
        ]
        sources = sorted({name for row in self.rows for name in row.by_source})
        table = [("draft vocab", "supervised tokens it holds", *sources)]
        table += [
            (f"{row.size:,}", _share(row), *(f"{row.by_source[name]:.2%}" for name in sources)) for row in self.rows
        ]
        lines += [f"  {line}" for line in aligned(table)]
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
    vocab = DraftVocab.from_counts(counts.total, size, keep)
    share, error = (held(counts.total, vocab), None) if not counts.keeps_parts else _estimate(counts, size, keep)
    return Coverage(size, share, error, {name: held(of, vocab) for name, of in counts.by_source.items()})


def _estimate(counts: SupervisedCounts, size: int, keep: list[int]) -> tuple[float, float]:
    """Each half of the samples is measured by the vocab of the other half, so that no token speaks for itself.

    The error is that of a ratio of two totals over samples drawn without replacement.
    """
    halves, vocab_size = (counts.parts[0::2], counts.parts[1::2]), counts.total.numel()
    pairs: list[tuple[int, int]] = []
    for half, other in (halves, halves[::-1]):
        seen = count_tokens(((part, torch.ones_like(part, dtype=torch.bool)) for part in other), vocab_size)
        known = DraftVocab.from_counts(seen, size, keep).t2d
        pairs += [(int(known[part].sum()), part.numel()) for part in half]
    total = sum(length for _, length in pairs)
    if not total:
        return 1.0, 0.0
    share, count = sum(inside for inside, _ in pairs) / total, len(pairs)
    spread = sum((inside - share * length) ** 2 for inside, length in pairs) * count / max(count - 1, 1)
    return share, _SURE * math.sqrt(spread * (1 - count / counts.of)) / total


def _share(row: Coverage) -> str:
    return f"{row.share:.2%}" + ("" if row.error is None else f" ± {row.error:.2%}")
