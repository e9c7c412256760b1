"""A log file that grows, is not there yet, is cut, or is replaced while it is read."""

from __future__ import annotations

import os
import re
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO

_CHUNK = 1 << 20
_LONGEST_LINE = 1 << 20
_LINE_ENDS = re.compile(rb"\r\n|\n|\r")  # progress bars write over their line with a carriage return


class LogFile:
    """Hands out the lines that are new.

    Attributes:
        path: of the file.
        started_over: how often it was cut or replaced.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.started_over = 0
        self._file: BinaryIO | None = None
        self._inode: tuple[int, int] | None = None
        self._offset = 0
        self._rest = b""

    def exists(self) -> bool:
        """Whether it is there, or was."""
        return self._file is not None or self.path.is_file()

    def new_lines(self) -> list[str]:
        """What was written since the last call, whole lines only; bytes that are no text are marked.

        Raises:
            OSError: it cannot be read.
        """
        lines: list[str] = []
        if self._file is not None and self._is_another():
            lines += self._read()  # what the old file still got
            self._file.close()
            self._begin_again()
        if self._file is None and not self._open():
            return lines
        assert self._file is not None
        if os.fstat(self._file.fileno()).st_size < self._offset:
            self._file.seek(0)
            self._offset, self._rest = 0, b""
            self.started_over += 1
        return lines + self._read()

    def last_line(self) -> str:
        """What stands behind the last end of a line."""
        return self._rest.decode(errors="replace")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> bool:
        try:
            if not S_ISREG(self.path.stat().st_mode):
                raise OSError("it is no file that grows (a folder, a pipe or a device)")
            self._file = self.path.open("rb")
        except FileNotFoundError:
            return False
        status = os.fstat(self._file.fileno())
        self._inode = (status.st_dev, status.st_ino)
        return True

    def _is_another(self) -> bool:
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return False  # moved away, and the new one is not there yet
        return (status.st_dev, status.st_ino) != self._inode

    def _begin_again(self) -> None:
        self._file, self._offset, self._rest = None, 0, b""
        self.started_over += 1

    def _read(self) -> list[str]:
        assert self._file is not None
        lines: list[str] = []
        while chunk := self._file.read(_CHUNK):
            self._offset += len(chunk)
            *whole, self._rest = _LINE_ENDS.split(self._rest + chunk)
            if len(self._rest) > _LONGEST_LINE:
                whole, self._rest = [*whole, self._rest], b""
            lines += [line.decode(errors="replace") for line in whole if line]
        return lines
