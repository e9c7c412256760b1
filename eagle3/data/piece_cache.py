"""A folder of files that came from elsewhere, never above its limit: what will be read next is fetched beforehand, what
is needed last goes first.

A file appears by a rename, so a killed process leaves nothing half-read. One process at a time uses a folder.

Who reads a file holds it, and waits for no other one meanwhile (but for those of `hold`, which never go): so whoever
waits for room gets it in the end.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from eagle3.data.cache_order import AT_ONCE, Need, Piece, ReadingOrder
from eagle3.errors import Problem, ProblemsError, problem_error
from eagle3.files import TEMPORARY_SUFFIX, existing_folder, explained_os_errors, size_text, write_atomic

__all__ = ["Piece", "PieceCache"]

LOCK_FILE = "process.lock"
_BLOCK = 4096
_OTHER_CACHE = "wait for it to end, or give this one another cache folder"


class PieceCache:
    """The cache of one process; `shared` gives the one that it has for a folder.

    Args:
        folder: made if absent.
        max_bytes: of all files in it, those that are being fetched included.
        threads: that fetch beforehand.

    Raises:
        ProblemsError: kinds `cache.in_use`, `cache.not_a_cache`, `cache.too_large`, `disk.*`.
    """

    _open: dict[tuple[int, Path], PieceCache] = {}  # noqa: RUF012 (one a process and folder)
    _opening = threading.Lock()

    def __init__(self, folder: Path, max_bytes: int, threads: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        if not folder.exists():  # else the folder would be made, and then refused
            _check_disk(folder, max_bytes, 0)
        self._lock = _locked(folder)
        try:
            self._files = _found(folder)
            self._used = sum(self._files.values())
            _check_disk(folder, max_bytes, self._used)
            self._unchecked = set(self._files)
            self._flying: dict[str, int] = {}
            self._pins: Counter[str] = Counter()
            self._fixed: set[str] = set()
            self._failed: set[str] = set()
            self._order = ReadingOrder()
            for name in self._files:
                self._order.use(name)
            self._evict(0, AT_ONCE)
        except BaseException:  # Ctrl-C too: nobody else would close it; raised again
            self._lock.close()
            raise
        self._changed = threading.Condition()
        self._changes, self._full_since = 0, -1
        self._waiting = 0
        self._closed = False
        self._threads = [threading.Thread(target=self._work, name=f"fetch-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    @classmethod
    def shared(cls, folder: Path, max_bytes: int, threads: int) -> PieceCache:
        """The cache that this process has in that folder; opened if it has none.

        Raises:
            ProblemsError: as `PieceCache`; kind `cache.in_use` if it has one there with another limit.
        """
        key = (os.getpid(), folder.absolute())
        with cls._opening:
            if key not in cls._open:
                cls._open[key] = cls(key[1], max_bytes, threads)
            cache = cls._open[key]
        if cache.max_bytes != max_bytes:
            message = f"this process uses it already, with max_bytes={cache.max_bytes}, not {max_bytes}"
            raise problem_error(str(folder), "cache.in_use", message, "give the same limit, or another cache folder")
        return cache

    def close(self) -> None:
        """Ends its threads and lets other processes use the folder; who reads must have ended."""
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
                if not self._pins[piece.name]:
                    del self._pins[piece.name]
                self._note_change()

    def hold(self, piece: Piece) -> Path:
        """As `held`, for as long as the cache is open."""
        self._pin(piece)
        with self._changed:
            self._fixed.add(piece.name)
        return self.folder / piece.name

    def drop(self, name: str) -> None:
        """Removes a file that is not needed again, unless it is held."""
        with self._changed:
            if name in self._files and name not in self._pins:
                self._remove(name)
                self._note_change()

    def forget(self, folder: str, keep: str) -> None:
        """Removes what is in a folder of the cache, but for its folder `keep` and what is held."""
        prefix, kept = f"{folder}/", f"{folder}/{keep}/"
        with self._changed:
            for name in [name for name in self._files if name.startswith(prefix) and not name.startswith(kept)]:
                if name not in self._pins:
                    self._remove(name)
            self._note_change()

    @contextmanager
    def ahead(self, names: Sequence[str], piece: Callable[[int], Piece]) -> Iterator[Callable[[int], None]]:
        """Fetches what will be read, in order, as far as there is room, while the block runs.

        Args:
            names: of the pieces.
            piece: the piece at a place of `names`; called by the fetching threads.

        Yields:
            `done(count)`: so many more of them have been read.
        """
        with self._changed:
            self._failed.clear()
            plan = self._order.begin(names, piece)
            self._note_change()

        def done(count: int) -> None:
            with self._changed:
                self._order.done(plan, count)
                self._note_change()

        try:
            yield done
        finally:
            with self._changed:
                self._order.end(plan)
                self._note_change()

    def check_fits(self, needed: int, what: str, where: str) -> None:
        """Refuses what cannot be in the cache at once, beside what stays there.

        Args:
            where: the store or what else is read.

        Raises:
            ProblemsError: kind `cache.too_small`.
        """
        with self._changed:
            fixed = sum(self._files[name] for name in self._fixed if name in self._files)
        if needed + fixed > self.max_bytes:
            message = (
                f"the cache {self.folder} has a limit of {size_text(self.max_bytes)} ({self.max_bytes:,} bytes); "
                f"{what} may take {needed:,} bytes, beside {fixed:,} that stay there (manifest and target head)"
            )
            raise problem_error(where, "cache.too_small", message, "raise cache.max_bytes (--cache-max-bytes)")

    def _pin(self, piece: Piece) -> None:
        with self._changed:
            assert not self._closed, f"{piece.name}: the cache is closed"
            while piece.name in self._flying:
                self._changed.wait()
            if piece.name in self._files and self._is_usable(piece):
                self._pins[piece.name] += 1
                self._order.use(piece.name, piece.kept)
                return
            self._flying[piece.name] = 0
        self._bring(piece, AT_ONCE)

    def _is_usable(self, piece: Piece) -> bool:
        """Whether a listed file is there, and whole if an earlier process left it; else it is listed no longer."""
        path = self.folder / piece.name
        with self._named(piece), explained_os_errors(path):
            try:
                os.utime(path)  # the next process finds by it what was used last
                if piece.name not in self._unchecked or piece.is_whole(path):
                    self._unchecked.discard(piece.name)
                    return True
            except FileNotFoundError:  # somebody removed it: it is fetched again
                pass
            self._remove(piece.name)
        return False

    def _note_change(self) -> None:
        """Wakes who waits for room, or for a file."""
        self._changes += 1
        self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                while (job := self._next()) is None and not self._closed:
                    self._changed.wait()
                if job is None or self._closed:
                    return
                piece, need = job
                self._flying[piece.name] = 0
            with suppress(Exception):  # it is noted as failed: who reads it fetches it, and raises what is wrong
                self._bring(piece, need)

    def _next(self) -> tuple[Piece, Need] | None:
        """What to fetch beforehand; nothing while there is no room for it, or somebody waits for room."""
        if self._full_since == self._changes or self._waiting:
            return None
        return self._order.next(self._files.__contains__, lambda name: name in self._flying or name in self._failed)

    def _bring(self, piece: Piece, need: Need) -> None:
        """Fetches a piece that is marked as flying. One that is needed at once is pinned; another one is left where
        there is no room: it only pushes out what is needed later.
        """
        name, brought, failed = piece.name, False, True
        try:
            with self._named(piece):
                size = piece.size()
                if self._reserve(piece, _charge(size), need):
                    write_atomic(self.folder / name, lambda path: _fetch(piece, size, path))
                    brought = True
            failed = False
        finally:
            with self._changed:
                charge = self._flying.pop(name)
                if brought:
                    self._files[name] = charge
                    self._order.use(name, piece.kept)
                    self._pins.update([name] if need == AT_ONCE else [])
                else:
                    self._used -= charge
                if failed and need != AT_ONCE:
                    self._failed.add(name)
                self._changes += brought or charge > 0
                self._changed.notify_all()

    def _reserve(self, piece: Piece, charge: int, need: Need) -> bool:
        """Makes room for a piece; what is needed at once waits for it."""
        self.check_fits(charge, "this file", piece.where)
        with self._changed:
            self._waiting += need == AT_ONCE
            try:
                while not self._evict(charge, need):
                    if need != AT_ONCE:
                        self._full_since = self._changes
                        return False
                    self._changed.wait()
            finally:
                self._waiting -= need == AT_ONCE
            self._flying[piece.name] = charge
            self._used += charge
        return True

    def _evict(self, charge: int, need: Need) -> bool:
        """Makes room by removing what is needed later than `need`, the last first; whether there is room now."""
        while self._used + charge > self.max_bytes:
            victim = self._order.last(need, self._pins)
            if victim is None:
                return False
            self._remove(victim)
        return True

    def _remove(self, name: str) -> None:
        path = self.folder / name
        with explained_os_errors(path):
            path.unlink(missing_ok=True)
        self._used -= self._files.pop(name)
        self._unchecked.discard(name)
        self._order.forget(name)

    @contextmanager
    def _named(self, piece: Piece) -> Iterator[None]:
        """Problems of the cache's disk say what was to be read."""
        try:
            yield
        except ProblemsError as error:
            inside = str(self.folder)
            raise ProblemsError(
                [_of(piece, item) if item.where.startswith(inside) else item for item in error.problems]
            ) from error


def _of(piece: Piece, problem: Problem) -> Problem:
    fix = f"{problem.fix}; or lower cache.max_bytes" if problem.kind == "disk.full" else problem.fix
    return replace(problem, where=piece.where, message=f"its copy {problem.where}: {problem.message}", fix=fix)


def _fetch(piece: Piece, size: int, path: Path) -> None:
    piece.fetch(path)
    if (written := path.stat().st_size) != size:
        message = f"{written:,} bytes came, {size:,} were expected"
        raise problem_error(piece.where, "remote.wrong_size", message, "verify the store, then run the command again")


def _locked(folder: Path) -> TextIO:
    """Makes the folder and locks it, until what is returned is closed."""
    with explained_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / LOCK_FILE).exists() and any(folder.iterdir()):
            message = "holds files that no cache left: they would be counted, and removed for room"
            raise problem_error(str(folder), "cache.not_a_cache", message, "give a folder of its own")
        handle = open(folder / LOCK_FILE, "w")  # noqa: SIM115 (held until `close`)
        try:
            fcntl.flock(handle.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.close()
            message = "another process uses this cache"
            raise problem_error(str(folder), "cache.in_use", message, _OTHER_CACHE) from None
        except BaseException:  # Ctrl-C too: nobody else would close it; raised again
            handle.close()
            raise
    return handle


def _found(folder: Path) -> dict[str, int]:
    """What an earlier process left, the least recently used first; what it left half-written is removed."""
    found = []
    with explained_os_errors(folder):
        for path in folder.rglob("*"):
            if path.name.endswith(TEMPORARY_SUFFIX) and not path.is_dir():
                path.unlink()
            elif path.is_file() and path.name != LOCK_FILE:
                status = path.stat()
                found.append((status.st_mtime_ns, path.relative_to(folder).as_posix(), _charge(status.st_size)))
    return {name: size for _, name, size in sorted(found)}


def _check_disk(folder: Path, max_bytes: int, used: int) -> None:
    with explained_os_errors(folder):
        free = shutil.disk_usage(existing_folder(folder)).free
    if max_bytes - used > free:
        message = f"its limit is {max_bytes:,} bytes, it holds {used:,}, and the disk has {free:,} left"
        fix = "lower cache.max_bytes (--cache-max-bytes), or give a folder on a larger disk"
        raise problem_error(str(folder), "cache.too_large", message, fix)


def _charge(size: int) -> int:
    """What a file takes on a disk: whole blocks."""
    return -(-size // _BLOCK) * _BLOCK
