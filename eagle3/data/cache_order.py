"""In which order the files of a cache are needed: what to fetch next, and what can go first."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Need = tuple[int, int]
"""How soon a file is read, the soonest the greatest: the number of the plan (later ones come first), and its place
there, negative."""

AT_ONCE: Need = (1 << 62, 0)


@dataclass(frozen=True)
class Piece:
    """A file of the cache that can be fetched.

    Attributes:
        name: its path inside the cache.
        where: what it is a copy of, for messages: URL, and sample if it is one's.
        size: its exact size in bytes; may have to ask the remote store.
        fetch: writes it to a path.
        is_whole: whether a file that an earlier process left is still as it was written.
        kept: goes only when there is nothing else.
    """

    name: str
    where: str
    size: Callable[[], int]
    fetch: Callable[[Path], None]
    is_whole: Callable[[Path], bool] = lambda path: True
    kept: bool = False


@dataclass(eq=False)
class Plan:
    """What is read next, in order.

    Attributes:
        number: later plans have greater ones.
        names: of the pieces.
        piece: the piece at a place of `names`.
        done: how many of them have been read.
        first: the first place of each name.
        next: all before this place are there, or have been read.
    """

    number: int
    names: Sequence[str]
    piece: Callable[[int], Piece]
    done: int = 0
    first: dict[str, int] = field(init=False)
    next: int = 0

    def __post_init__(self) -> None:
        self.first = {name: place for place, name in reversed(list(enumerate(self.names)))}


class ReadingOrder:
    """The plans, and the files that are there by how soon they are needed. Each call but those that begin or end a plan
    takes logarithmic time, however many files there are.
    """

    def __init__(self) -> None:
        self._plans: list[Plan] = []
        self._begun = 0
        self._kept: dict[str, None] = {}
        self._unneeded: dict[str, None] = {}
        self._needed: dict[str, Need] = {}
        self._heap: list[tuple[Need, str]] = []

    def begin(self, names: Sequence[str], piece: Callable[[int], Piece]) -> Plan:
        """Adds a plan, which comes before all others."""
        self._begun += 1
        self._plans.append(plan := Plan(self._begun, names, piece))
        self._sort_again()
        return plan

    def end(self, plan: Plan) -> None:
        self._plans.remove(plan)
        self._sort_again()

    def done(self, plan: Plan, count: int) -> None:
        """So many more pieces of the plan have been read."""
        passed = plan.names[plan.done : plan.done + count]
        plan.done += count
        for name in passed:
            if name in self._needed:
                self._place(name)

    def use(self, name: str, kept: bool = False) -> None:
        """A file has come, or is read."""
        self._take_out(name)
        if kept:
            self._kept[name] = None
        else:
            self._place(name)

    def forget(self, name: str) -> None:
        """A file has gone."""
        self._take_out(name)
        for plan in self._plans:
            if (place := plan.first.get(name, -1)) >= plan.done:
                plan.next = min(plan.next, place)

    def next(self, is_there: Callable[[str], bool], is_coming: Callable[[str], bool]) -> tuple[Piece, Need] | None:
        """The piece that is needed first of those that are neither there nor coming."""
        for plan in reversed(self._plans):
            plan.next = max(plan.next, plan.done)
            for place in range(plan.next, len(plan.names)):
                name = plan.names[place]
                if is_there(name):
                    plan.next += place == plan.next
                elif not is_coming(name):
                    return plan.piece(place), (plan.number, -place)
        return None

    def last(self, before: Need, spared: Container[str]) -> str | None:
        """The file that is needed last, if that is later than `before`: one that no plan needs, the least recently used
        first; else the furthest; a kept one only for what is needed at once.
        """
        if (name := _first(self._unneeded, spared)) is not None:
            return name
        held = []
        while self._heap and self._heap[0][0] < before:
            need, name = self._heap[0]
            if self._needed.get(name) != need:  # it has gone, or moved
                heapq.heappop(self._heap)
            elif name in spared:
                held.append(heapq.heappop(self._heap))
            else:
                break
        found = self._heap[0][1] if self._heap and self._heap[0][0] < before else None
        for entry in held:
            heapq.heappush(self._heap, entry)
        return found if found is not None or before != AT_ONCE else _first(self._kept, spared)

    def _take_out(self, name: str) -> None:
        for files in (self._kept, self._unneeded, self._needed):
            files.pop(name, None)

    def _place(self, name: str) -> None:
        need = self._need(name)
        if need is None:
            self._needed.pop(name, None)
            self._unneeded[name] = None
        elif self._needed.get(name) != need:
            self._needed[name] = need
            heapq.heappush(self._heap, (need, name))

    def _need(self, name: str) -> Need | None:
        for plan in reversed(self._plans):
            place = plan.first.get(name, -1)
            if place >= plan.done:
                return plan.number, -place
        return None

    def _sort_again(self) -> None:
        names = [*self._unneeded, *self._needed]
        self._unneeded, self._needed, self._heap = {}, {}, []
        for name in names:
            self._place(name)


def _first(names: dict[str, None], spared: Container[str]) -> str | None:
    return next((name for name in names if name not in spared), None)
