"""A folder of files that came from elsewhere, never above its limit: what will be read next is fetched beforehand, what
is needed last goes first.

A file appears by a rename, so a killed process leaves nothing half-read. One process at a time uses a folder.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from eagle3.errors import ProblemsError, problem_error
from eagle3.files import TEMPORARY_SUFFIX, explained_os_errors, size_text, write_atomic

LOCK_FILE = "process.lock"
_BLOCK = 4096
_NEVER = (1 << 62, 0)
_OTHER_CACHE = "wait for it to end, or give this one another cache folder"
Distance = tuple[int, int]


@dataclass(frozen=True)
class Piece:
    """A file of the cache that can be fetched.

    Attributes:
        name: its path inside the cache.
        size: its exact size in bytes; may have to ask the remote store.
        fetch: writes it to a path.
        kept: goes only when there is nothing else.
    """

    name: str
    size: Callable[[], int]
    fetch: Callable[[Path], None]
    kept: bool = False


@dataclass
class _Plan:
    """What is read next, in order."""

    names: Sequence[str]
    piece: Callable[[int], Piece]
    places: dict[str, int] = field(init=False)
    done: int = 0
    next: int = 0

    def __post_init__(self) -> None:
        self.places = {name: place for place, name in reversed(list(enumerate(self.names)))}


class PieceCache:
    """The cache of one process; `shared` gives the one that it has for a folder.

    Args:
        folder: made if absent.
        max_bytes: of all files in it, those that are being fetched included.
        threads: that fetch beforehand.

    Raises:
        ProblemsError: kinds `cache.in_use`, `cache.too_large`, `disk.*`.
    """

    _open: dict[tuple[int, Path], PieceCache] = {}  # noqa: RUF012 (one a process and folder)

    def __init__(self, folder: Path, max_bytes: int, threads: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        with explained_os_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = open(folder / LOCK_FILE, "w")  # noqa: SIM115 (held until `close`)
        try:
            fcntl.flock(self._lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise problem_error(str(folder), "cache.in_use", "another process uses this cache", _OTHER_CACHE) from None
        self._changed = threading.Condition()
        self._files = self._found()
        self._used = sum(self._files.values())
        self._flying: dict[str, int] = {}
        self._pins: Counter[str] = Counter()
        self._fixed: set[str] = set()
        self._kept: set[str] = set()
        self._failed: set[str] = set()
        self._plans: list[_Plan] = []
        self._changes, self._full_since = 0, -1
        self._closed = False
        self._check_disk()
        self._evict(0, (-1, 0), spare_kept=False)
        self._threads = [threading.Thread(target=self._work, name=f"fetch-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    @classmethod
    def shared(cls, folder: Path, max_bytes: int, threads: int) -> PieceCache:
        """The cache that this process has in that folder; opened if it has none."""
        key = (os.getpid(), folder.absolute())
        if key not in cls._open:
            cls._open[key] = cls(key[1], max_bytes, threads)
        return cls._open[key]

    def close(self) -> None:
        """Ends its threads and lets other processes use the folder."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._lock.close()
        self._open.pop((os.getpid(), self.folder), None)

    def __contains__(self, name: str) -> bool:
        """Whether a file is there or on its way."""
        with self._changed:
            return name in self._files or name in self._flying

    @contextmanager
    def held(self, piece: Piece) -> Iterator[Path]:
        """The file, which stays until the block ends; fetched if it is not there.

        Raises:
            ProblemsError: it cannot be fetched; kind `cache.too_small`; the disk refuses.
        """
        self._pin(piece)
        try:
            yield self.folder / piece.name
        finally:
            with self._changed:
                self._pins[piece.name] -= 1
                self._note_change()

    def hold(self, piece: Piece) -> Path:
        """As `held`, for as long as the cache is open."""
        self._pin(piece)
        with self._changed:
            self._fixed.add(piece.name)
        return self.folder / piece.name

    def _pin(self, piece: Piece) -> None:
        name = piece.name
        while True:
            with self._changed:
                while name in self._flying:
                    self._changed.wait()
                if name in self._files and self._touch(name):
                    self._pins[name] += 1
                    return
                self._flying[name] = 0
            self._bring(piece, None)

    def _note_change(self) -> None:
        """Wakes who waits for room, or for a file."""
        self._changes += 1
        self._changed.notify_all()

    def drop(self, name: str) -> None:
        """Removes a file that is not needed again."""
        with self._changed:
            if name in self._files and not self._pins[name]:
                self._remove(name)

    def forget(self, folder: str, keep: str) -> None:
        """Removes what is in a folder of the cache, but for its folder `keep`."""
        with self._changed:
            prefix, kept = f"{folder}/", f"{folder}/{keep}/"
            for name in [name for name in self._files if name.startswith(prefix) and not name.startswith(kept)]:
                self._remove(name)

    @contextmanager
    def ahead(self, names: Sequence[str], piece: Callable[[int], Piece]) -> Iterator[Callable[[int], None]]:
        """Fetches what will be read, in order, as far as there is room, while the block runs.

        Args:
            names: of the pieces.
            piece: the piece at a place of `names`; called by the fetching threads.

        Yields:
            `done(count)`: so many more of them have been read.
        """
        plan = _Plan(names, piece)

        def done(count: int) -> None:
            with self._changed:
                plan.done += count
                self._note_change()

        with self._changed:
            self._failed.clear()
            self._plans.append(plan)
            self._note_change()
        try:
            yield done
        finally:
            with self._changed:
                self._plans.remove(plan)
                self._note_change()

    def check_fits(self, needed: int, what: str) -> None:
        """Refuses what cannot be in the cache at once, beside what stays there.

        Raises:
            ProblemsError: kind `cache.too_small`.
        """
        with self._changed:
            fixed = self._fixed_bytes()
        if needed + fixed > self.max_bytes:
            message = (
                f"its limit is {size_text(self.max_bytes)} ({self.max_bytes:,} bytes); {what} take up to {needed:,} "
                f"bytes, beside {fixed:,} of the manifest and the target head"
            )
            raise problem_error(str(self.folder), "cache.too_small", message, "raise cache.max_bytes")

    def _found(self) -> dict[str, int]:
        """What an earlier process left, the least recently used first; what it left half-written is removed."""
        found = []
        with explained_os_errors(self.folder):
            for path in self.folder.rglob("*"):
                if path.name.endswith(TEMPORARY_SUFFIX):
                    path.unlink()
                elif path.is_file() and path.name != LOCK_FILE:
                    status = path.stat()
                    found.append(
                        (status.st_mtime_ns, path.relative_to(self.folder).as_posix(), _charge(status.st_size))
                    )
        return {name: size for _, name, size in sorted(found)}

    def _check_disk(self) -> None:
        free = shutil.disk_usage(self.folder).free
        if self.max_bytes - self._used > free:
            message = f"its limit is {self.max_bytes:,} bytes, it holds {self._used:,}, and the disk has {free:,} left"
            fix = "lower cache.max_bytes, or give a folder on a larger disk"
            self._lock.close()
            raise problem_error(str(self.folder), "cache.too_large", message, fix)

    def _work(self) -> None:
        while True:
            with self._changed:
                while (job := self._next()) is None and not self._closed:
                    self._changed.wait()
                if job is None or self._closed:
                    return
                piece, distance = job
                self._flying[piece.name] = 0
            try:
                self._bring(piece, distance)
            except ProblemsError:  # who reads it fetches it itself, and says what is wrong
                with self._changed:
                    self._failed.add(piece.name)

    def _next(self) -> tuple[Piece, Distance] | None:
        """The nearest piece that is not there, newest plan first; none while there is no room for it."""
        if self._full_since == self._changes:
            return None
        for rank, plan in enumerate(reversed(self._plans)):
            plan.next = max(plan.next, plan.done)
            for place in range(plan.next, len(plan.names)):
                name = plan.names[place]
                if name not in self._files and name not in self._flying and name not in self._failed:
                    return plan.piece(place), (rank, place)
                if place == plan.next and name in self._files:
                    plan.next += 1
        return None

    def _bring(self, piece: Piece, distance: Distance | None) -> None:
        """Fetches a piece that is marked as flying. One that comes beforehand has a distance, and is left where there
        is no room: it only pushes out what is further.
        """
        name, brought = piece.name, False
        try:
            size = piece.size()
            if not self._reserve(piece, _charge(size), distance):
                return
            path = self.folder / name
            write_atomic(path, piece.fetch)
            assert path.stat().st_size == size, f"{name}: {path.stat().st_size} bytes, {size} said"
            brought = True
        finally:
            with self._changed:
                charge = self._flying.pop(name)
                if brought:
                    self._files[name] = charge
                    self._changes += 1
                    if piece.kept:
                        self._kept.add(name)
                else:
                    self._used -= charge
                self._changed.notify_all()

    def _reserve(self, piece: Piece, charge: int, distance: Distance | None) -> bool:
        if charge > self.max_bytes:
            self.check_fits(charge, piece.name)
        with self._changed:
            while not self._evict(charge, distance or (-1, 0), spare_kept=distance is not None):
                if distance is not None:
                    self._full_since = self._changes
                    return False
                if charge + self._fixed_bytes() > self.max_bytes:
                    self.check_fits(charge, piece.name)
                self._changed.wait()
            self._flying[piece.name] = charge
            self._used += charge
        return True

    def _fixed_bytes(self) -> int:
        return sum(self._files[name] for name in self._fixed if name in self._files)

    def _evict(self, charge: int, distance: Distance, spare_kept: bool) -> bool:
        """Makes room by removing what is further than `distance`, the furthest first; whether there is room now."""
        while self._used + charge > self.max_bytes:
            victim = self._victim(distance, spare_kept)
            if victim is None:
                return False
            self._remove(victim)
        return True

    def _victim(self, distance: Distance, spare_kept: bool) -> str | None:
        furthest, victim = distance, None
        spared = None
        for name in self._files:  # the least recently used first
            if self._pins[name]:
                continue
            if name in self._kept:
                spared = spared or name
                continue
            there = self._distance(name)
            if there == _NEVER:
                return name
            if there > furthest:
                furthest, victim = there, name
        return victim if victim is not None or spare_kept else spared

    def _distance(self, name: str) -> Distance:
        for rank, plan in enumerate(reversed(self._plans)):
            place = plan.places.get(name, -1)
            if place >= plan.done:
                return rank, place
        return _NEVER

    def _touch(self, name: str) -> bool:
        """Makes a file the most recently used one; false if somebody removed it."""
        self._files[name] = self._files.pop(name)
        try:
            os.utime(self.folder / name)
        except FileNotFoundError:
            self._used -= self._files.pop(name)
            return False
        return True

    def _remove(self, name: str) -> None:
        self._used -= self._files.pop(name)
        self._kept.discard(name)
        (self.folder / name).unlink(missing_ok=True)


def _charge(size: int) -> int:
    """What a file takes on a disk: whole blocks."""
    return -(-size // _BLOCK) * _BLOCK
