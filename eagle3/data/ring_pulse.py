"""How the two sides of a ring know of each other: each keeps one small file fresh, on a folder that both see.

Nobody compares clocks: a side lives while its file's time of change moves, by the watcher's own clock.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, Self

from eagle3.errors import ProblemsError, problem_error
from eagle3.files import explained_os_errors, write_text_atomic

QUIET_SECONDS = 30.0
"""A side that shows no sign of life for longer is worth a word; on a shared folder signs come late."""
_BEAT_SECONDS = 2.0
_FIRST_SECONDS = 5.0
_AGAIN_SECONDS = 60.0


class Pulse:
    """Says what this side does, and that it lives. A context manager.

    Args:
        path: of its file.
        values: JSON values that it says first.
    """

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self._path = path
        self._ended, self._lock = Event(), Lock()
        self._failed: OSError | ProblemsError | None = None
        self._thread = Thread(target=self._beat, name="pulse", daemon=True)
        self.say(values)

    def say(self, values: dict[str, Any]) -> None:
        """Replaces what the file holds.

        Raises:
            ProblemsError: the file cannot be written.
        """
        with explained_os_errors(self._path):
            if self._failed is not None:
                raise self._failed
        with self._lock:
            self._text = json.dumps(values, indent=2, sort_keys=True) + "\n"
            write_text_atomic(self._path, self._text)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT_SECONDS):
            try:
                with self._lock:
                    self._refresh()
            except (OSError, ProblemsError) as error:
                self._failed = error  # raised by the next `say`
                return

    def _refresh(self) -> None:
        """Somebody may have deleted the file or put an old copy in its place: the other side must not go by that."""
        if not self._path.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._path.parent))
        with suppress(FileNotFoundError):  # it goes at any moment
            if self._path.read_bytes() == self._text.encode():
                os.utime(self._path)
                return
        write_text_atomic(self._path, self._text)


class Watch:
    """For how long the other side's file has not changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = self._stamp()
        self._since = time.monotonic()

    def silent(self) -> float:
        """Seconds without a sign of life; from the first look at it on."""
        stamp = self._stamp()
        if stamp != self._seen:
            self._seen, self._since = stamp, time.monotonic()
        return time.monotonic() - self._since

    def _stamp(self) -> tuple[int, int]:
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return (0, 0)
        return (found.st_mtime_ns, found.st_ino)


class Reminder:
    """When somebody who waits should say so: after 5 seconds, then once a minute."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _FIRST_SECONDS

    def is_due(self) -> bool:
        """Whether it is time; if so, the next time is a minute away."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + _AGAIN_SECONDS
        return True


@contextmanager
def only_one(folder: Path, lock_file: str, who: str) -> Iterator[None]:
    """Makes the folder and holds a lock in it, which ends with the process.

    Raises:
        ProblemsError: kind `ring.locked`, another `who` is at work.
    """
    with explained_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle = open(folder / lock_file, "a")  # noqa: SIM115 (held until the block ends)
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fix = "wait for it to end, or use another folder"
            raise problem_error(str(folder), "ring.locked", f"another {who} is at work here", fix) from None
        yield
