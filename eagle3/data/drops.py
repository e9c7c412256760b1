"""What was left out: how many, for which reason, of which source."""

from __future__ import annotations

from collections import Counter


class Drops:
    """Counts of what was left out; `source` is where a record says that it comes from."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str | None]] = Counter()

    def add(self, reason: str, source: str | None, count: int = 1) -> None:
        """Counts one, or more, that were left out."""
        self._counts[reason, source] += count

    def update(self, other: Drops) -> None:
        """Adds another's counts."""
        self._counts.update(other._counts)

    def __bool__(self) -> bool:
        return self.total() > 0

    def total(self) -> int:
        return self._counts.total()

    def by_reason(self, source: str | None = None, every_source: bool = True) -> Counter[str]:
        """Counts by reason: of every source, or of `source` alone."""
        found: Counter[str] = Counter()
        for (reason, of), count in self._counts.items():
            if every_source or of == source:
                found[reason] += count
        return found

    def sources(self) -> set[str | None]:
        return {source for _, source in self._counts}
