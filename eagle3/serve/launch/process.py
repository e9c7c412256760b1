"""A server that runs as long as we do, and not longer."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from eagle3.errors import Problem, problem_error, raise_problems
from eagle3.files import explained_os_errors
from eagle3.serve.launch import guard
from eagle3.serve.launch.command import LaunchCommand
from eagle3.serve.launch.files import check_target_folder, is_path
from eagle3.serve.launch.installed import check_installed
from eagle3.serve.launch.ports import port_fault, wait_until_free

GRACE_SECONDS = 20.0
PORT_SECONDS = 60.0
"""A killed server can hold its port while its GPU memory is being given back."""


class ServerProcess:
    """A running server in a process group of its own; a context manager that ends it.

    However this process ends (an exception, Ctrl-C, SIGTERM or SIGHUP while the context is open, even SIGKILL), the
    server's whole group is ended.

    Attributes:
        command: what was started.
        log: file that gets its output.
        pid: of its group's leader.
    """

    def __init__(self, command: LaunchCommand, log: Path, process: subprocess.Popen[bytes], grace: float) -> None:
        self.command = command
        self.log = log
        self.pid = process.pid
        self.started = time.monotonic()
        self._process = process
        self._grace = grace
        self._guard = _start_guard(process.pid, grace)
        self._handlers: dict[int, Any] = {}

    @property
    def url(self) -> str:
        return self.command.url

    def poll(self) -> int | None:
        """Its exit code if it has ended (negative: the signal that ended it), else None."""
        return self._process.poll()

    def stop(self) -> int:
        """Ends it and all that it started; waits until its port can be taken again. May be called twice.

        Returns:
            Its exit code.

        Raises:
            ProblemsError: kind `launch.port_held`: somebody still holds the port a minute later.
        """
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(self._grace)
        with suppress(ProcessLookupError, PermissionError):  # macOS: EPERM for a group of zombies
            os.killpg(self.pid, signal.SIGKILL)
        code = self._process.wait()
        self._dismiss_guard()
        fault = wait_until_free(self.command.host, self.command.port, PORT_SECONDS)
        if fault is not None:
            where = f"{self.command.host}:{self.command.port}"
            message = f"cannot be taken {PORT_SECONDS:.0f} s after the server was ended: {fault}"
            raise problem_error(where, "launch.port_held", message, "find who listens there: ss -ltnp")
        return code

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                self._handlers[number] = signal.signal(number, _leave)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del kind, trace
        try:
            self.stop()
        except ValueError as held:
            if error is None:
                raise
            error.add_note(str(held))
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self._handlers.clear()

    def _dismiss_guard(self) -> None:
        assert self._guard.stdin is not None
        with suppress(BrokenPipeError, ValueError):
            self._guard.stdin.write(b"ended\n")
            self._guard.stdin.close()
        self._guard.wait()


def start_server(
    command: LaunchCommand, log_path: str | Path, *, grace: float = GRACE_SECONDS, check: bool = True
) -> ServerProcess:
    """Starts a server; returns at once. Use it in a `with`; `eagle3.serve.wait.wait_until_ready` waits for it.

    Args:
        command: from `build_command`.
        log_path: gets its output; what is there is replaced.
        grace: seconds between SIGTERM and SIGKILL when it is ended.
        check: look first at the target's folder and at the Python and its engine's version; at the port always.

    Raises:
        ProblemsError: kinds `launch.port_in_use`, `launch.target`, `launch.python`, `launch.other_version`, `disk.*`.
    """
    problems = _check_port(command)
    program = command.argv[0]
    if shutil.which(program) is None:
        message = f"{program!r} is no program on this machine"
        problems.append(Problem("python", "launch.python", message, "set python to that of the engine's environment"))
    elif check:
        problems += check_installed(command)
    if check and is_path(command.target):
        problems += check_target_folder(Path(command.target).expanduser(), command.argv)
    raise_problems(problems, "this server is not started")
    log = Path(log_path)
    with explained_os_errors(log.parent):
        log.parent.mkdir(parents=True, exist_ok=True)
        output = log.open("wb")
    with output:
        process = subprocess.Popen(
            command.argv,
            env={**os.environ, **command.env},
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        return ServerProcess(command, log, process, grace)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


def _check_port(command: LaunchCommand) -> list[Problem]:
    fault = port_fault(command.host, command.port)
    if fault is None:
        return []
    fix = "end what listens there (ss -ltnp shows it), or set another port"
    where = f"{command.host}:{command.port}"
    return [Problem(where, "launch.port_in_use", f"cannot be listened on: {fault}", fix)]


def _start_guard(group: int, grace: float) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", guard.__file__, str(group), str(grace)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _leave(number: int, frame: FrameType | None) -> None:
    """Turns a signal that would end us at once into an exception, so that servers are ended on the way out."""
    del frame
    raise SystemExit(128 + number)
