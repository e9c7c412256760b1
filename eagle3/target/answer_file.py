"""A JSONL file of answers that a kill cannot spoil: lines are appended to `<path>.partial` and synced; the file
itself appears when all are there. `<path>.settings.json` holds what the answers depend on.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from eagle3.data.store_folder import setting_differences
from eagle3.errors import problem_error, raise_problems
from eagle3.files import explained_os_errors, read_json, write_json_atomic, write_text_atomic


class AnswerFile:
    """Starts the file, or goes on with one that the same settings began. A context manager.

    Raises:
        ProblemsError: another run is at work; the file has other settings (each is listed) or none; a line is
            damaged.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        if path.is_dir() or not path.name:
            fix = "give the name of a .jsonl file"
            raise problem_error(str(path), "regenerate.output", "is a folder, expected a file", fix)
        self.path = path
        self._partial = path.with_name(f"{path.name}.partial")
        sidecar = path.with_name(f"{path.name}.settings.json")
        with explained_os_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = open(self._partial, "ab+", buffering=0)  # noqa: SIM115 (held until the block ends)
        try:
            self._lock()
            if sidecar.exists():
                raise_problems(setting_differences(read_json(sidecar, "settings"), dict(settings), str(path)))
            elif path.exists() or self._partial.stat().st_size:
                message = f"is there, but not its settings ({sidecar.name})"
                raise problem_error(str(path), "regenerate.foreign", message, "choose another output")
            write_json_atomic(sidecar, settings)
            _drop_half_line(self._partial)
            self.lines = {**_read_lines(self.path), **_read_lines(self._partial)}
            """Answers that are already there, by id."""
        except BaseException:  # Ctrl-C too: closing gives the lock back; raised again
            self._handle.close()
            raise

    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Adds answers; when it returns, they are on disk."""
        text = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)
        with explained_os_errors(self.path):
            left = memoryview(text.encode())
            while left:  # unbuffered: a full disk must not fail once more when the file is closed
                left = left[self._handle.write(left) :]
            os.fsync(self._handle.fileno())
        self.lines.update((line["id"], dict(line)) for line in lines)

    def finish(self, ids: Sequence[str]) -> list[dict[str, Any]]:
        """Writes the file, in the order of `ids`, whole, and removes the partial one."""
        lines = [self.lines[name] for name in ids]
        write_text_atomic(self.path, "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines))
        self._partial.unlink()
        return lines

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fix = "wait for it to end, or choose another output"
            raise problem_error(str(self.path), "regenerate.locked", "another run is writing it", fix) from None


def _drop_half_line(path: Path) -> None:
    """A kill in the middle of a write leaves a last line without its end."""
    data = path.read_bytes()
    os.truncate(path, data.rfind(b"\n") + 1)


def _read_lines(path: Path) -> dict[str, dict[str, Any]]:
    lines: dict[str, dict[str, Any]] = {}
    for number, text in enumerate(path.read_bytes().splitlines() if path.exists() else (), start=1):
        try:
            line = json.loads(text)
            if line["finish"] not in ("stop", "length") or not isinstance(line["answer_ids"], list):
                raise TypeError
            lines[line["id"]] = line
        except (ValueError, RecursionError, KeyError, TypeError):
            message = "is not an answer; the file was changed or damaged"
            raise problem_error(f"{path}:{number}", "regenerate.damaged", message, "remove that line") from None
    return lines
