"""Progress of a start on stderr: one line that changes on a terminal, else a line now and then."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from eagle3.serve.wait.ready import Progress

_PLAIN_SECONDS = 15.0


@contextmanager
def shown_progress() -> Iterator[Callable[[Progress], None]]:
    """Yields what `wait_until_ready` takes as `on_progress`."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _plain()
        return
    with console.status("waiting") as status:
        yield lambda progress: status.update(_line(progress), spinner_style="none")


def _plain() -> Callable[[Progress], None]:
    last: tuple[str, str, float] | None = None

    def show(progress: Progress) -> None:
        nonlocal last
        if last is None or (progress.phase, progress.note) != last[:2] or progress.elapsed - last[2] >= _PLAIN_SECONDS:
            last = (progress.phase, progress.note, progress.elapsed)
            print(_line(progress), file=sys.stderr, flush=True)

    return show


def _line(progress: Progress) -> str:
    return f"{progress.elapsed:.0f} s: {progress}"
