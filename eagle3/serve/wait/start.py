"""How far a start has come, line by line of its log."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from itertools import pairwise

from eagle3.serve.wait import causes
from eagle3.serve.wait.lines import (
    ARGUMENTS,
    READY,
    Line,
    argument,
    find_access,
    find_bar,
    find_capture,
    graph_timings,
    split_line,
)
from eagle3.serve.wait.polls import Polls
from eagle3.serve.wait.ready import PHASES, Graphs, Progress

_KEPT_LINES = 4000
_ORDER = {phase: number for number, phase in enumerate(PHASES)}


class Start:
    """One start of a server; a new `server_args=` line begins another.

    Attributes:
        progress: phase, and how much of it is done.
        ready: it has said so.
        fatal: the first line after which it never becomes ready.
        listens: what uvicorn says it listens on.
    """

    def __init__(self, passive_health: bool) -> None:
        self._passive_health = passive_health
        self.begin_again()

    def begin_again(self) -> None:
        """Forgets all: another start, or another log."""
        self.progress = Progress("starting")
        self.ready = False
        self.fatal: str | None = None
        self.listens: str | None = None
        self.polls = Polls(self._passive_health)
        self.reasons: dict[str, None] = {}
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._times: dict[str, float] = {}
        self._clock: float | None = None
        self._captured: set[str] = set()
        self._timings: dict[str, float] | None = None
        self._arguments = ""
        self._target_loaded = False
        self._capturing = ""
        self._graphs_over = False

    @property
    def lines(self) -> list[str]:
        """The last lines, without time and rank."""
        return list(self._lines)

    def feed(self, raw: str) -> None:
        """Takes a line, in the order of the log."""
        line = split_line(raw)
        if line.text.startswith(ARGUMENTS):
            self.begin_again()
            self._arguments = line.text
        if line.time is not None:
            self._clock = line.time
            self._times.setdefault(self.progress.phase, line.time)
        self._lines.append(line.text)
        if self.fatal is None and not self.ready and causes.FATAL.search(line.text):
            self.fatal = line.text
        access = find_access(line.text)
        if access is not None and not self.ready:
            self.polls.add(access)
        if line.leading:
            self._follow(line)

    def peek(self, unfinished: str) -> None:
        """Takes a line that is still being written: a progress bar ends its lines late."""
        line = split_line(unfinished)
        if line.leading and find_bar(line.text) is not None and self._is_bar(line.text):
            self._count(line.text)

    def _is_bar(self, text: str) -> bool:
        weights = "oading" in text and "shards" in text and self.progress.phase in ("weights", "draft_weights")
        return weights or "Capturing batches" in text

    def _follow(self, line: Line) -> None:
        text = line.text
        if READY in text:
            self.ready, self._graphs_over = True, True
            self._enter("ready")
        elif "Load weight begin" in text:
            self._enter("draft_weights" if self._target_loaded else "weights")
        elif "Load weight end" in text:
            self._target_loaded = True
        elif "KV Cache is allocated" in text or "Memory pool end" in text:
            self._enter("kv_cache")
        elif (capture := find_capture(text)) is not None:
            self._capture(*capture)
        elif self._is_bar(text):
            self._count(text)
        elif (timings := graph_timings(text)) is not None:
            self._timings = timings
        elif text.startswith("Disable") and "graph because" in text and "prefill" not in text:
            self.reasons[text] = None
        elif "Started server process" in text or "Uvicorn running on" in text:
            self._graphs_over = True
            self._enter("warm_up")
            if "Uvicorn running on" in text:
                self.listens = text.partition("Uvicorn running on ")[2].split(" ")[0]

    def _enter(self, phase: str) -> None:
        if phase != self.progress.phase and _ORDER[phase] >= _ORDER[self.progress.phase]:
            self.progress = Progress(phase)
            if self._clock is not None:
                self._times.setdefault(phase, self._clock)

    def _count(self, text: str) -> None:
        bar = find_bar(text)
        if bar is not None:
            self.progress = replace(
                self.progress, done=bar.done, total=bar.total, seconds_left=bar.seconds_left, note=self._capturing
            )

    def _capture(self, what: str, ended: bool) -> None:
        self._enter("graphs")
        self._capturing = "" if ended else what
        self.progress = Progress("graphs", note=self._capturing)
        if ended:
            self._captured.add(what)

    @property
    def phases(self) -> dict[str, float]:
        """Seconds in each phase that is over, by the server's clock (whole seconds)."""
        entered = [(phase, self._times[phase]) for phase in PHASES if phase in self._times]
        return {phase: end - begin for (phase, begin), (_, end) in pairwise(entered)}

    @property
    def graphs(self) -> Graphs:
        """Which graphs were captured; all None until captures are over, and on a CPU."""
        if not self._graphs_over or not self._arguments or argument(self._arguments, "device") == "cpu":
            return Graphs()
        captured = self._captured | {name for name, seconds in (self._timings or {}).items() if seconds > 0}
        drafter = argument(self._arguments, "speculative_algorithm") not in (None, "None")
        if not drafter:
            return Graphs(decode=bool(captured & {"decode", "target"}))
        one_step = argument(self._arguments, "speculative_num_steps") == "1"
        return Graphs(
            verify=bool(captured & {"verify", "target"}),
            draft=None if one_step else "draft" in captured,
            draft_extend="draft_extend" in captured,
        )
