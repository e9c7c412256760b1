"""A request's rounds of speculative decoding, from what a server says of it, counted as docs/evaluation.md does.

SGLang's `meta_info`, in the last piece of a streamed answer (read in 0.5.16 and 0.5.23, `batch_result_processor.py`):
`spec_verify_ct` counts the verifies; `spec_accept_length` is `completion_tokens` / verifies, so that the first token,
which the prefill gives, counts there and does not here; the histogram counts verifies by accepted drafts *before* the
last one is cut at the end of the answer. It is called `spec_accept_histogram` in older releases,
`spec_correct_drafts_histogram` in newer, and is absent in still older ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

_HISTOGRAMS = ("spec_correct_drafts_histogram", "spec_accept_histogram")


class SenselessError(ValueError):
    """What the server says of a request cannot be."""


@dataclass(frozen=True)
class Rounds:
    """Of one request, or of several together.

    Attributes:
        verifies: rounds.
        committed: tokens that they committed: all of the answer but the first, which comes from the prefill.
        histogram: rounds by number of accepted drafts, the last one cut at the end of the answer; None where unknown.
        reached: rounds that reach each depth: every draft before it was accepted, and the answer goes on there.
        unsure: requests whose last round is not known to have been cut at another place; it is taken as it came.
    """

    verifies: int
    committed: int
    histogram: tuple[int, ...] | None = None
    reached: tuple[int, ...] | None = None
    unsure: int = 0

    @property
    def taken(self) -> tuple[int, ...] | None:
        """Rounds that accept the draft at each depth."""
        if self.histogram is None:
            return None
        return tuple(sum(self.histogram[depth:]) for depth in range(1, len(self.histogram)))

    @property
    def accepted(self) -> int:
        """Accepted drafts that were committed."""
        if self.histogram is None:
            return max(self.committed - self.verifies, 0)
        return sum(count * accepted for accepted, count in enumerate(self.histogram))


def rounds_of(
    meta: Mapping[str, Any], tokens: int, pieces: Sequence[int] = (), depth: int | None = None
) -> Rounds | None:
    """A finished request's rounds; None where the server says nothing of them.

    Args:
        meta: SGLang's `meta_info` of the whole answer.
        tokens: of the answer.
        pieces: tokens of each streamed piece, in order: with as many after the first as there were verifies, each is
            one round.
        depth: drafts a path, where the server says so: the histogram may be longer than any count it has.

    Raises:
        SenselessError: the numbers contradict each other.
    """
    verifies = meta.get("spec_verify_ct")
    length = meta.get("spec_accept_length")
    if verifies is None and _number(length):
        if length < 1:
            raise SenselessError(f"spec_accept_length is {length}, expected at least 1")
        verifies = round(tokens / length)
    if verifies is None:
        return None
    if type(verifies) is not int or verifies < 0:
        raise SenselessError(f"spec_verify_ct is {str(verifies)[:40]!r}, expected a count")
    committed = max(tokens - 1 - _retracted(meta), 0)
    if verifies > committed:
        raise SenselessError(f"{verifies} verifies cannot have committed only {committed} tokens")
    if verifies == 0:
        if committed:
            raise SenselessError(f"{committed} tokens were committed without a verify")
        return Rounds(0, 0, (0,) * ((depth or 0) + 1), (0,) * (depth or 0))
    each = list(pieces[1:]) if len(pieces) == verifies + 1 and pieces[0] == 1 and sum(pieces) == tokens else None
    raw = next((meta[name] for name in _HISTOGRAMS if isinstance(meta.get(name), list)), None)
    if raw is None:
        return Rounds(verifies, committed)
    if not all(type(item) is int and item >= 0 for item in raw) or sum(raw) != verifies:
        raise SenselessError(f"the histogram {str(raw)[:80]} does not hold {verifies} verifies")
    width = max(len(raw), (depth or 0) + 1)
    return _cut([*raw, *[0] * (width - len(raw))], verifies, committed, each)


def _cut(raw: list[int], verifies: int, committed: int, each: list[int] | None) -> Rounds:
    """The last round ends where the answer does: what it accepted beyond is taken away."""
    surplus = sum(count * (accepted + 1) for accepted, count in enumerate(raw)) - committed
    if surplus < 0:
        raise SenselessError(f"rounds that accept {raw} cannot have committed {committed} tokens")
    depth = len(raw) - 1
    reached = [sum(raw[place:]) for place in range(depth)]
    if surplus == 0:
        return Rounds(verifies, committed, tuple(raw), tuple(reached))
    # What the last round accepted, as it came: one more than it kept where the answer ends with its last draft.
    possible = [accepted for accepted in range(surplus, depth + 1) if raw[accepted]]
    if each is not None:
        possible = [accepted for accepted in possible if accepted + 1 - surplus == each[-1]]
    if not possible:
        raise SenselessError(f"no round of {raw} could have been cut by {surplus} tokens at the end of the answer")
    if len(possible) > 1:
        return Rounds(verifies, committed, tuple(raw), tuple(reached), unsure=1)
    came, left = possible[0], possible[0] + 1 - surplus
    raw[came] -= 1
    raw[left] += 1
    for place in range(left, min(came + 1, depth)):
        reached[place] -= 1
    return Rounds(verifies, committed, tuple(raw), tuple(reached))


def pooled(items: Iterable[Rounds]) -> Rounds:
    """Sums; no histogram where one lacks it."""
    found = list(items)
    width = max((len(item.histogram) for item in found if item.histogram is not None), default=1)
    complete = all(item.histogram is not None for item in found) and bool(found)
    return Rounds(
        sum(item.verifies for item in found),
        sum(item.committed for item in found),
        _sums([item.histogram or () for item in found], width) if complete else None,
        _sums([item.reached or () for item in found], width - 1) if complete else None,
        sum(item.unsure for item in found),
    )


def _sums(rows: Sequence[Sequence[int]], width: int) -> tuple[int, ...]:
    return tuple(sum(row[place] for row in rows if place < len(row)) for place in range(width))


def _retracted(meta: Mapping[str, Any]) -> int:
    """Times that a server short of memory threw the request out; each next prefill gives one token more."""
    count = meta.get("num_retractions", meta.get("retraction_count"))
    return count if type(count) is int and count > 0 else 0


def _number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
