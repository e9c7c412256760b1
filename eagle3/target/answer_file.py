"""A JSONL file of answers that a kill cannot spoil: lines are appended to `<path>.partial` and synced; the file
itself appears when all are there. `<path>.settings.json` holds what the answers depend on.

An answer belongs to the prompt whose digest its line holds, not to a place in the input. One that the input does not
ask for (any more), or that was cut off and is to be dropped, is kept in `<path>.spare.jsonl`; a later run finds it.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from eagle3.data.store_folder import setting_differences
from eagle3.errors import problem_error, raise_problems
from eagle3.files import explained_os_errors, read_json_object, write_json_atomic, write_text_atomic

Line = dict[str, Any]
_OLD_SETTINGS = ("conversations",)
"""Which earlier releases wrote, when answers belonged to a whole file of prompts."""


class AnswerFile:
    """Starts the file, or goes on with one that the same settings began. A context manager.

    Args:
        settings: what the answers depend on, besides their prompts.
        names: ids of the answers that are asked for now.
        digest_of: of the prompt of a line that does not hold it, as earlier releases wrote them.

    Raises:
        ProblemsError: another run is at work; the file has other settings (each is listed) or none; a line is
            damaged.
    """

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any],
        names: Collection[str] = (),
        digest_of: Callable[[Line], str] | None = None,
    ) -> None:
        if path.is_dir() or not path.name:
            fix = "give the name of a .jsonl file"
            raise problem_error(str(path), "regenerate.output", "is a folder, expected a file", fix)
        self.path = path
        self._partial = path.with_name(f"{path.name}.partial")
        self._spare = path.with_name(f"{path.name}.spare.jsonl")
        self._names = frozenset(names)
        sidecar = path.with_name(f"{path.name}.settings.json")
        with explained_os_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = open(self._partial, "ab+", buffering=0)  # noqa: SIM115 (held until the block ends)
        try:
            self._lock()
            if sidecar.exists():
                begun = read_json_object(sidecar, "settings")
                begun = {key: value for key, value in begun.items() if key not in _OLD_SETTINGS}
                raise_problems(setting_differences(begun, dict(settings), str(path)))
            elif path.exists() or self._partial.stat().st_size:
                message = f"is there, but not its settings ({sidecar.name})"
                raise problem_error(str(path), "regenerate.foreign", message, "choose another output")
            write_json_atomic(sidecar, settings)
            _drop_half_line(self._partial)
            self._lines: dict[tuple[str, str], Line] = {}
            """By id and digest of the prompt; of lines that are there twice, the last one."""
            self._by_digest: dict[str, list[Line]] = {}
            for line in (line for file in (self._spare, path, self._partial) for line in _read_lines(file)):
                if "prompt_digest" not in line:
                    line["prompt_digest"] = digest_of(line) if digest_of else ""
                self._lines[line["id"], line["prompt_digest"]] = line
            for line in self._lines.values():
                self._by_digest.setdefault(line["prompt_digest"], []).append(line)
        except BaseException:  # Ctrl-C too: closing gives the lock back; raised again
            self._handle.close()
            raise

    def __len__(self) -> int:
        return len(self._lines)

    def find(self, name: str, digest: str) -> Line | None:
        """The answer to this prompt that is there already, under this id or one that nobody asks for any more."""
        if line := self._lines.get((name, digest)):
            return line
        for line in self._by_digest.get(digest, ()):
            if line["id"] not in self._names:
                self._by_digest[digest].remove(line)
                del self._lines[line["id"], digest]
                moved = {**line, "id": name}
                self._lines[name, digest] = moved
                return moved
        return None

    def append(self, lines: Sequence[Line]) -> None:
        """Adds answers; when it returns, they are on disk."""
        text = _text(lines)
        with explained_os_errors(self.path):
            left = memoryview(text.encode())
            while left:  # unbuffered: a full disk must not fail once more when the file is closed
                left = left[self._handle.write(left) :]
            os.fsync(self._handle.fileno())
        for line in lines:
            self._lines[line["id"], line.get("prompt_digest", "")] = line

    def finish(self, lines: Sequence[Line]) -> None:
        """Writes the file with these answers, in this order, whole; others that are there go to the spare file."""
        chosen = {(line["id"], line.get("prompt_digest", "")) for line in lines}
        spare = [line for key, line in self._lines.items() if key not in chosen]
        if self._spare.exists() or spare:  # a kill between two of these writes must not lose a line that changes files
            write_text_atomic(self._spare, _text([*spare, *lines]))
        write_text_atomic(self.path, _text(lines))
        if spare:
            write_text_atomic(self._spare, _text(spare))
        else:
            self._spare.unlink(missing_ok=True)
        self._partial.unlink()

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


def _text(lines: Sequence[Line]) -> str:
    return "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)


def _drop_half_line(path: Path) -> None:
    """A kill in the middle of a write leaves a last line without its end."""
    data = path.read_bytes()
    os.truncate(path, data.rfind(b"\n") + 1)


def _read_lines(path: Path) -> list[Line]:
    lines: list[Line] = []
    for number, text in enumerate(path.read_bytes().splitlines() if path.exists() else (), start=1):
        try:
            line = json.loads(text)
            if line["finish"] not in ("stop", "length") or not isinstance(line.get("answer_ids", []), list):
                raise TypeError
            if not isinstance(line["id"], str) or not isinstance(line.get("prompt_digest", ""), str):
                raise TypeError
            lines.append(line)
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
            message = "is not an answer; the file was changed or damaged"
            raise problem_error(f"{path}:{number}", "regenerate.damaged", message, "remove that line") from None
    return lines
