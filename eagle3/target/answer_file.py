"""A JSONL file of answers that a kill cannot spoil: lines are appended to `<path>.partial` and synced; the file
itself appears when all are there. `<path>.settings.json` holds what the answers depend on.

An answer belongs to the prompt whose digest its line holds, not to a place in the input. One that the input does not
ask for (any more), or that was cut off and is to be dropped, is kept in `<path>.spare.jsonl`; a later run finds it.

Answers are read again from these files whenever they are asked for; in memory stay two digests of each, and its place.
"""

from __future__ import annotations

import fcntl
import json
import os
from array import array
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import ExitStack
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from eagle3.data.store_folder import setting_differences
from eagle3.errors import problem_error, raise_problems
from eagle3.files import explained_os_errors, read_json_object, write_atomic, write_json_atomic

Line = dict[str, Any]
_BLOCK = 1 << 20
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
        names: Container[str] = (),
        digest_of: Callable[[Line], str] | None = None,
    ) -> None:
        if path.is_dir() or not path.name:
            fix = "give the name of a .jsonl file"
            raise problem_error(str(path), "regenerate.output", "is a folder, expected a file", fix)
        self.path = path
        self._partial = path.with_name(f"{path.name}.partial")
        self._spare = path.with_name(f"{path.name}.spare.jsonl")
        self._names = names
        self._opened: list[int] = []
        self._file_of, self._stopped = bytearray(), bytearray()
        self._begins, self._sizes, self._tokens = array("Q"), array("Q"), array("Q")
        self._places: dict[bytes, int] = {}
        """By id and digest of the prompt; of lines that are there twice, the last one's."""
        self._unasked: dict[bytes, list[int]] = {}
        """By digest of the prompt, of those whose id nobody asks for."""
        self._renamed: dict[int, str] = {}
        self._undated: dict[int, str] = {}
        """Digests of the prompts of lines that do not hold them."""
        sidecar = path.with_name(f"{path.name}.settings.json")
        self._files = ExitStack()
        with explained_os_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = self._files.enter_context(open(self._partial, "ab+", buffering=0))  # noqa: SIM115
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
            self._end = _drop_half_line(self._handle.fileno())
            for file in (self._spare, path, self._partial):
                self._read(file, digest_of)
        except BaseException:  # Ctrl-C too: closing gives the lock back; raised again
            self._files.close()
            raise

    def __len__(self) -> int:
        return len(self._places)

    def find(self, name: str, digest: str) -> Line | None:
        """The answer to this prompt that is there already, under this id or one that nobody asks for any more."""
        place = self.place(name, digest)
        return None if place is None else self.line(place)

    def place(self, name: str, digest: str) -> int | None:
        """The place of the answer that `find` gives."""
        key, prompt = _key(name, digest), _key(digest)
        if key in self._places:
            return self._places[key]
        while candidates := self._unasked.get(prompt):
            place = candidates.pop(0)
            earlier = _key(self.line(place)["id"], digest)
            if self._places.get(earlier) == place:  # else the same answer is there again
                del self._places[earlier]
                self._renamed[place] = name
                self._places[key] = place
                return place
        return None

    def line(self, place: int) -> Line:
        """The answer at a place that `place` or `expect` gave."""
        raw = os.pread(self._opened[self._file_of[place]], self._sizes[place], self._begins[place])
        line: Line = json.loads(raw)
        if place in self._undated:
            line["prompt_digest"] = self._undated[place]
        return {**line, "id": self._renamed[place]} if place in self._renamed else line

    def stopped(self, place: int) -> bool:
        """Whether that answer ended by itself."""
        return bool(self._stopped[place])

    def tokens(self, place: int) -> int:
        """Of that answer."""
        return self._tokens[place]

    def expect(self, line: Line) -> int:
        """The place of an answer that is about to be appended, or was."""
        key = _key(line["id"], line.get("prompt_digest", ""))
        if key not in self._places:
            self._places[key] = self._add(0, 0, 0)
        return self._places[key]

    def append(self, lines: Sequence[Line]) -> None:
        """Adds answers; when it returns, they are on disk."""
        texts = [_text(line) for line in lines]
        with explained_os_errors(self.path):
            left = memoryview(b"".join(texts))
            while left:  # unbuffered: a full disk must not fail once more when the file is closed
                left = left[self._handle.write(left) :]
            os.fsync(self._handle.fileno())
        for line, text in zip(lines, texts, strict=True):
            self._put(self.expect(line), len(self._opened) - 1, self._end, len(text), line)
            self._end += len(text)

    def finish(self, lines: Iterable[Line]) -> None:
        """As `finish_places`, with answers that were found or appended."""
        self.finish_places([self.expect(line) for line in lines])

    def finish_places(self, places: Sequence[int]) -> None:
        """Writes the file with the answers of these places, in this order, whole; others go to the spare file."""
        chosen = bytearray(len(self._begins))
        for place in places:
            chosen[place] = 1
        spare = array("Q", (place for place in self._places.values() if not chosen[place]))
        if self._spare.exists() or spare:  # a kill between two of these writes must not lose a line that changes files
            self._write(self._spare, chain(spare, places))
        self._write(self.path, places)
        if spare:
            self._write(self._spare, spare)
        else:
            self._spare.unlink(missing_ok=True)
        self._partial.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    def _read(self, path: Path, digest_of: Callable[[Line], str] | None) -> None:
        """Notes the answers of a file, which stays open: it may be replaced while they are read again."""
        if not path.exists():
            return
        file = self._files.enter_context(open(path, "rb"))  # noqa: SIM115
        self._opened.append(file.fileno())
        begin = 0
        for number, text in enumerate(file, start=1):
            line = _parsed(text, f"{path}:{number}")
            place = self._add(len(self._opened) - 1, begin, len(text), line)
            begin += len(text)
            if "prompt_digest" not in line:
                self._undated[place] = digest_of(line) if digest_of else ""
            digest = line.get("prompt_digest", self._undated.get(place, ""))
            self._places[_key(line["id"], digest)] = place
            if line["id"] not in self._names:
                self._unasked.setdefault(_key(digest), []).append(place)

    def _add(self, file: int, begin: int, size: int, line: Line | None = None) -> int:
        place = len(self._begins)
        for values in (self._begins, self._sizes, self._tokens, self._file_of, self._stopped):
            values.append(0)
        if line is not None:
            self._put(place, file, begin, size, line)
        return place

    def _put(self, place: int, file: int, begin: int, size: int, line: Line) -> None:
        self._file_of[place], self._begins[place], self._sizes[place] = file, begin, size
        self._stopped[place], self._tokens[place] = line["finish"] == "stop", answer_tokens(line)

    def _write(self, path: Path, places: Iterable[int]) -> None:
        def write(temporary: Path) -> None:
            with open(temporary, "wb") as file:
                file.writelines(_text(self.line(place)) for place in places)

        write_atomic(path, write)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fix = "wait for it to end, or choose another output"
            raise problem_error(str(self.path), "regenerate.locked", "another run is writing it", fix) from None


def answer_tokens(line: Line) -> int:
    """How many tokens an answer has."""
    return len(line["answer_ids"]) if "answer_ids" in line else int(line.get("answer_tokens", 0))


def _key(*parts: str) -> bytes:
    return blake2b("\0".join(parts).encode(), digest_size=16).digest()


def _text(line: Line) -> bytes:
    return f"{json.dumps(line, ensure_ascii=False)}\n".encode()


def _drop_half_line(descriptor: int) -> int:
    """A kill in the middle of a write leaves a last line without its end; returns the bytes that stay."""
    end = os.fstat(descriptor).st_size
    while end:
        begin = max(0, end - _BLOCK)
        found = os.pread(descriptor, end - begin, begin).rfind(b"\n")
        end = begin + found + 1
        if found >= 0:
            break
    os.ftruncate(descriptor, end)
    return end


def _parsed(text: bytes, where: str) -> Line:
    try:
        line: Line = json.loads(text)
        if line["finish"] not in ("stop", "length") or not isinstance(line.get("answer_ids", []), list):
            raise TypeError
        if not isinstance(line["id"], str) or not isinstance(line.get("prompt_digest", ""), str):
            raise TypeError
        if type(line.get("answer_tokens", 0)) is not int or line.get("answer_tokens", 0) < 0:
            raise TypeError
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        message = "is not an answer; the file was changed or damaged"
        raise problem_error(where, "regenerate.damaged", message, "remove that line") from None
    return line
