"""Waiting for a server: its process, its log and its passive endpoints, whichever of them there are."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import httpx

from eagle3.errors import ProblemsError, problem_error, raise_problems
from eagle3.serve.launch.command import LaunchCommand
from eagle3.serve.wait.causes import EXCEPTION, diagnose
from eagle3.serve.wait.endpoints import Answer, Endpoints
from eagle3.serve.wait.lines import ARGUMENTS
from eagle3.serve.wait.log_file import LogFile
from eagle3.serve.wait.ready import LABELS, Graphs, Progress, Ready
from eagle3.serve.wait.start import Start
from eagle3.wiring.version import Version

SETTLE_SECONDS = 3.0
"""After a fatal line, so that the rest of what it says is read too."""
QUIET_SECONDS = 30.0
"""A log that has ended in an exception for so long is that of a dead server; a server that answered and then is not
reached for so long is gone; one whose log says ready is then not where we ask."""


class _Process(Protocol):
    """A `ServerProcess`, or what a test puts in its place."""

    @property
    def command(self) -> LaunchCommand: ...
    @property
    def log(self) -> Path: ...
    def poll(self) -> int | None: ...


def wait_until_ready(
    url: str | None,
    *,
    log: str | Path | None = None,
    process: _Process | None = None,
    version: str | None = None,
    timeout: float | None = None,
    passive_health: bool | None = None,
    api_key: str | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    poll_seconds: float = 1.0,
    transport: httpx.BaseTransport | None = None,
) -> Ready:
    """Waits until a server takes requests, without making it generate a token.

    Args:
        url: of the server; None to follow its log only.
        log: its output; default: the process's.
        process: what `start_server` returned, for a server of ours.
        version: of the engine; default: the process's, else it is found out.
        timeout: seconds; default: as long as it takes, since nothing but the log tells how long a model loads.
        passive_health: the server was started so that `/health` generates nothing; default: as the process was.
        api_key: sent as a bearer token.
        on_progress: called at each poll.
        poll_seconds: between two polls.
        transport: instead of the network.

    Raises:
        ProblemsError: it died, with the cause (docs/problem-kinds.md, kinds `start.*`), or it cannot be waited for.
    """
    command = process.command if process is not None else None
    log = log if log is not None else process.log if process is not None else None
    if url is None and log is None:
        raise problem_error("serve wait", "start.what", "there is neither a URL nor a log", "give one of them, or both")
    if passive_health is None:
        passive_health = command is not None and command.passive_health
    if version is None and command is not None:
        version = command.version
    endpoints = Endpoints(url, version, passive_health, api_key, transport) if url is not None else None
    waiting = _Waiting(endpoints, None if log is None else LogFile(Path(log)), process, version, passive_health)
    begun = time.monotonic()
    try:
        while True:
            elapsed = time.monotonic() - begun
            ready = waiting.look(elapsed)
            if ready is not None:
                return ready
            if on_progress is not None:
                on_progress(replace(waiting.progress, elapsed=elapsed))
            if timeout is not None and elapsed > timeout:
                message = f"not ready after {elapsed:.0f} s, but not dead either: {waiting.progress}"
                raise problem_error(waiting.where, "start.timeout", message, "wait on with a longer --timeout, or none")
            time.sleep(poll_seconds)
    finally:
        waiting.close()


class _Waiting:
    """What is known between two looks."""

    def __init__(
        self,
        endpoints: Endpoints | None,
        log: LogFile | None,
        process: _Process | None,
        version: str | None,
        passive_health: bool,
    ) -> None:
        self.endpoints, self.log, self.process, self.version = endpoints, log, process, version
        self.start = Start(passive_health)
        self.note = ""
        self._started_over = 0
        self._answered = False
        self._since: dict[str, float] = {}

    @property
    def where(self) -> str:
        """For problems."""
        return str(self.log.path) if self.log is not None else self.endpoints.url if self.endpoints is not None else ""

    @property
    def progress(self) -> Progress:
        found = self.start.progress
        if self.log is None or not self.log.exists():
            found = Progress("warm_up" if self._answered else "unknown")
        return replace(found, note=", ".join(part for part in (found.note, self.note) if part))

    def close(self) -> None:
        if self.log is not None:
            self.log.close()
        if self.endpoints is not None:
            self.endpoints.close()

    def look(self, elapsed: float) -> Ready | None:
        """One look at everything; None while it starts.

        Raises:
            ProblemsError: it is dead, or not what we wait for.
        """
        code = (
            self.process.poll() if self.process is not None else None
        )  # before the log: what it said last is in there
        grew = self._read_log()
        if code is not None:
            self._died(code)
        if self.start.fatal is not None and not grew and self._lasts("fatal", True, elapsed) >= SETTLE_SECONDS:
            self._died(None)
        quiet = not grew and not self.start.ready and bool(self.start.lines) and self._ends_in_an_exception()
        if self._lasts("exception", quiet, elapsed) >= QUIET_SECONDS:
            self._died(None)
        answer = self.endpoints.ask() if self.endpoints is not None and self.start.fatal is None else None
        return self._judge(answer, elapsed)

    def _judge(self, answer: Answer | None, elapsed: float) -> Ready | None:
        self._notes(answer)
        if answer is None:
            return self._ready("log", elapsed) if self.endpoints is None and self.start.ready else None
        if answer.state == "ready":
            return self._ready(answer.how, elapsed)
        if answer.state == "cannot_say":
            if self.log is None:
                message = (
                    "this release has no passive endpoint that tells whether it is ready, and its log is not given"
                )
                fix = (
                    "give its log (--log), or start it with SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0 and say so "
                    "(--passive-health)"
                )
                raise problem_error(self.where, "start.no_passive_endpoint", message, fix)
            return self._ready("log", elapsed) if self.start.ready else None
        silent = answer.state == "silent"
        self._answered = self._answered or not silent
        if self._lasts("gone", silent and self._answered, elapsed) >= QUIET_SECONDS and not self.start.ready:
            message = f"answered, and has not been reached for {QUIET_SECONDS:.0f} s"
            fix = "look at its log; with --log the cause is told here"
            raise problem_error(self.where, "start.gone", message, fix)
        if self._lasts("elsewhere", silent and self.start.ready, elapsed) >= QUIET_SECONDS:
            assert self.endpoints is not None
            message = (
                f"its log says that it is ready on {self.start.listens}, but nobody answers at {self.endpoints.url}"
            )
            raise problem_error(self.where, "start.other_address", message, "give its address, or its own log")
        return None

    def _read_log(self) -> bool:
        if self.log is None:
            return False
        try:
            lines = self.log.new_lines()
        except OSError as error:
            message = f"cannot be read: {error.strerror or error}"
            raise problem_error(str(self.log.path), "start.log", message, "give a log that you may read") from None
        if self.log.started_over != self._started_over:
            self._started_over = self.log.started_over
            if not any(ARGUMENTS in line for line in lines):
                self.note = "the log was cut or replaced"
        for line in lines:
            self.start.feed(line)
        if self.log.last_line():
            self.start.peek(self.log.last_line())
        return bool(lines)

    def _notes(self, answer: Answer | None) -> None:
        if self.log is not None and not self.log.exists():
            self.note = "the log is not there yet"
        elif self.log is None:
            dead = "without its log nobody can tell loading from dead"
            said = "" if answer is None else answer.note
            self.note = f"{said}; {dead}" if answer is not None and answer.state == "silent" else said
        elif self.note == "the log is not there yet":
            self.note = ""

    def _ends_in_an_exception(self) -> bool:
        return EXCEPTION.match(next((line for line in reversed(self.start.lines) if line.strip()), "")) is not None

    def _lasts(self, what: str, holds: bool, elapsed: float) -> float:
        """Seconds for which something has held at every look."""
        if not holds:
            self._since.pop(what, None)
            return 0.0
        return elapsed - self._since.setdefault(what, elapsed)

    def _died(self, code: int | None) -> None:
        phase = LABELS.get(self.start.progress.phase, self.start.progress.phase)
        title = "the server died"
        raise_problems(diagnose(self.start.lines, self.where, code, phase), title)

    def _ready(self, how: str, elapsed: float) -> Ready:
        served = version = None
        if self.endpoints is not None:
            served = self.endpoints.served()
            version = self.endpoints.version()
            self._check_identity(served, version)
            self._read_log()
        warnings = [*self.start.polls.warnings(), *self._graph_warnings(self.start.graphs)]
        return Ready(
            url=None if self.endpoints is None else self.endpoints.url,
            version=version or self.version,
            how=how,
            seconds=elapsed,
            phases=self.start.phases,
            graphs=self.start.graphs,
            served=served,
            warnings=tuple(warnings),
        )

    def _check_identity(self, served: str, version: str | None) -> None:
        command = self.process.command if self.process is not None else None
        if command is not None and not _same(served, command.target):
            message = f"serves {served}, the server that we started serves {command.target}: another one has the port"
            raise problem_error(command.url, "start.other_target", message, "end that server, or set another port")
        if version is not None and self.version is not None and not _same_version(version, self.version):
            message = f"is SGLang {version}, expected {self.version}: layer ids and arguments differ by version"
            fix = f"run `eagle3 wiring check` with --engine-version {version}, or serve with {self.version}"
            assert self.endpoints is not None
            raise problem_error(self.endpoints.url, "start.other_version", message, fix)

    def _graph_warnings(self, graphs: Graphs) -> list[str]:
        if not graphs.off:
            return []
        reasons = "; ".join(self.start.reasons)
        why = f" ({reasons})" if reasons else ""
        asked = self.process is not None and not self.process.command.cuda_graphs
        meant = ", as its command asks for" if asked else ""
        return [f"CUDA graphs are off for {', '.join(graphs.off)}{meant}{why}: each step then waits for the CPU"]


def _same(one: str, other: str) -> bool:
    return one == other or Path(one).expanduser().absolute() == Path(other).expanduser().absolute()


def _same_version(one: str, other: str) -> bool:
    try:
        return Version(one) == Version(other)
    except ProblemsError:
        return one == other
