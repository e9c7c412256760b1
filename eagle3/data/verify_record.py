"""What a verification found whole so far, in a file outside the store: JSON lines, one a file, added as it is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Self

from eagle3.data.store_format import FileInfo, ShardInfo
from eagle3.errors import problem_error
from eagle3.files import digest_json, explained_os_errors, readable, write_text_atomic
from eagle3.wiring.contract import WiringContract

_FIRST_LINE = json.dumps({"format": "eagle3-verify", "format_version": 1})
_OTHER_FILE = "give a new file, or the one that an earlier `eagle3 data verify --resume` wrote"


class VerifyRecord:
    """The files of one store that were read and found whole. A context manager.

    A file counts only as long as its size, its time of change, its inode and what the manifest says of it stay.
    Only whole files are recorded, so what is wrong is read, and reported, again.

    Args:
        path: the record; made if absent.
        folder, contract: of the store.

    Raises:
        ProblemsError: the path is inside the store, holds something else, or cannot be read or written.
    """

    def __init__(self, path: Path, folder: Path, contract: WiringContract) -> None:
        self.path = path
        self._folder = folder.resolve()
        self._contract = contract
        check_outside(path, folder)
        self._lines = _read(path)
        write_text_atomic(
            path, "".join(f"{line}\n" for line in self._lines)
        )  # without the half line that a kill leaves
        self._known = set(self._lines)
        with explained_os_errors(path):
            self._handle = open(path, "a", encoding="utf-8")  # noqa: SIM115 (held until __exit__)

    def line(self, file: FileInfo) -> str:
        """What is recorded of this file as it is now. Take it before reading the file."""
        try:
            status = (self._folder / file.file).stat()
        except OSError as error:  # reading it will fail as well, and name it
            now: list[object] = [str(error)]
        else:
            now = [status.st_size, status.st_mtime_ns, status.st_ino]
        entry = file.to_dict() if isinstance(file, ShardInfo) else vars(file)
        said = digest_json([self._contract.to_dict(), entry])
        return json.dumps([file.file, *now, said], ensure_ascii=False)

    def __contains__(self, line: str) -> bool:
        return line in self._known

    def add(self, line: str) -> None:
        """Notes that the file is whole."""
        with explained_os_errors(self.path):
            self._handle.write(line + "\n")
            self._handle.flush()

    def remove(self) -> None:
        """There is nothing left to remember."""
        self.path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.close()


def check_outside(path: Path, folder: Path) -> None:
    """Refuses a file of a command's own inside the store.

    Raises:
        ProblemsError: kind `verify.inside_store`.
    """
    if path.resolve().is_relative_to(folder.resolve()):
        fix = "give a file outside the store, which stays as it is"
        raise problem_error(str(path), "verify.inside_store", "this file would be inside the store", fix)


def _read(path: Path) -> list[str]:
    """The whole lines of a record, its first one included; a new record's, if there is none yet.

    Raises:
        ProblemsError: the file is something else.
    """
    try:
        with readable(path):
            lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    except FileNotFoundError:
        return [_FIRST_LINE]
    if not lines or lines[0] != _FIRST_LINE:
        raise problem_error(str(path), "verify.other_file", "is not a record of verified files", _OTHER_FILE)
    return lines
