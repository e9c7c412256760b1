"""Progress bars with rate and time left; plain lines where there is no terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

_PLAIN_INTERVAL_SECONDS = 15.0
_CONSOLE = Console(stderr=True)
"""One console for all bars, so that a bar inside another (an evaluation within training) is drawn below it."""


class _RateColumn(ProgressColumn):
    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else _rate(speed, self.unit))


@contextmanager
def progress(label: str, total: int, unit: str) -> Iterator[Callable[..., None]]:
    """Shows a bar on stderr while the block runs: on the first rank only, and not if there is nothing to do.

    Yields:
        `advance(count, note="")`: `count` more of `total` units are done; `note` is shown beside the bar.
    """
    if total == 0 or os.environ.get("RANK", "0") != "0":
        yield lambda count, note="": None
        return
    if not _CONSOLE.is_terminal:
        yield from _plain(label, total, unit)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        _RateColumn(unit),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=_CONSOLE) as bar:
        task = bar.add_task(label, total=total, note="")

        def advance(count: int, note: str = "") -> None:
            bar.update(task, advance=count)
            if note:
                bar.update(task, note=note)

        yield advance


def _plain(label: str, total: int, unit: str) -> Iterator[Callable[..., None]]:
    start = last = time.monotonic()
    done = 0

    def line(note: str) -> None:
        seconds = max(time.monotonic() - start, 1e-9)
        rate = _rate(done / seconds, unit)
        time_left = f", {(total - done) * seconds / done:.0f} s left" if 0 < done < total else ""
        print(f"{label}: {done:,}/{total:,} {unit}, {rate}{time_left} {note}".rstrip(), file=sys.stderr)

    def advance(count: int, note: str = "") -> None:
        nonlocal done, last
        done += count
        if time.monotonic() - last >= _PLAIN_INTERVAL_SECONDS:
            last = time.monotonic()
            line(note)

    yield advance
    line("done" if done >= total else "stopped")


def _rate(per_second: float, unit: str) -> str:
    return f"{per_second:,.{0 if per_second >= 10 else 1}f} {unit}/s"
