"""Records on disk in place of memory: a scratch file without a name, gone with the process however that ends. In memory
stay 8 bytes a record."""

from __future__ import annotations

import os
import shutil
import tempfile
from array import array
from collections.abc import Callable
from pathlib import Path

from eagle3.errors import problem_error
from eagle3.files import existing_folder, explained_os_errors, size_text

_BUFFER = 1 << 20


class Scratch:
    """Records in the order in which they were added; each is read again whenever it is asked for."""

    def __init__(self, folder: Path, share: Callable[[], float | None] = lambda: None) -> None:
        """Args:
        folder: whose disk holds them; where it is not there yet, or may not be written to, one that is.
        share: about which share of all records was added, 0 to 1; None if that is not known. With it, room for all
            of them is looked for before the first byte is written, and each time that the file has doubled.
        """
        found = existing_folder(folder)
        self._folder = found if os.access(found, os.W_OK) else Path(tempfile.gettempdir())
        with explained_os_errors(self._folder):
            self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 (as long as the object)
        self._share, self._look_again = share, 0
        self._waiting = bytearray()
        self._ends = array("Q", [0])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def add(self, record: bytes) -> int:
        """Appends it; returns its number.

        Raises:
            ProblemsError: kind `chat.scratch`, the disk cannot hold them all; kinds `disk.*`, it is full, for example.
        """
        self._ends.append(self._ends[-1] + len(record))
        self._waiting += record
        if len(self._waiting) >= _BUFFER:
            self._flush()
        return len(self) - 1

    def read(self, number: int) -> bytes:
        """The record of this number, from 0."""
        begin, end = self._ends[number], self._ends[number + 1]
        written = self._ends[-1] - len(self._waiting)
        if begin >= written:
            return bytes(self._waiting[begin - written : end - written])
        record = os.pread(self._file.fileno(), end - begin, begin)
        assert len(record) == end - begin, "a scratch file without a name is nobody else's to cut"
        return record

    def _flush(self) -> None:
        end = self._ends[-1]
        if self._waiting and end >= self._look_again:
            self._look_again = 2 * end
            self._check_room()
        with explained_os_errors(self._folder):
            rest = memoryview(bytes(self._waiting))
            while rest:
                rest = rest[os.pwrite(self._file.fileno(), rest, end - len(rest)) :]
        self._waiting.clear()

    def _check_room(self) -> None:
        share, disk = self._share(), shutil.disk_usage(self._folder)
        if not share or not disk.total:  # some file systems do not say what they have
            return
        whole = int(self._ends[-1] / share)
        if whole - self._ends[-1] + len(self._waiting) > disk.free:
            message = f"the scratch file needs about {size_text(whole)}, {size_text(disk.free)} are free"
            fix = "free space, choose another disk (data.cache, or the output), or take fewer (data.limit)"
            raise problem_error(str(self._folder), "chat.scratch", message, fix)
