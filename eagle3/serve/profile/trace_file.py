"""Reads a Chrome trace one event after the other, so that its size does not matter.

torch writes one JSON object: small facts, and `traceEvents`, a list of up to millions of events.
"""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from stat import S_ISREG
from typing import IO, Any, cast

from eagle3.errors import Eagle3Error, problem_error
from eagle3.files import readable

FIX = "pass a .json or .json.gz file that torch's profiler wrote, whole, e.g. by SGLang's /start_profile"
EVENTS = "traceEvents"
_BYTES = 1 << 20
_LONGEST = 1 << 26
"""Characters of one event, or of one fact beside them, above which it is none."""
_SPACE = re.compile(r"[\s,]*")
_OPENING = re.compile(r"\s*\{")
_GZIP = b"\x1f\x8b"


class TraceFile:
    """The events of a trace, to be gone through once.

    Attributes:
        facts: what the file says beside its events; complete after the last event.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts: dict[str, Any] = {}
        self._decoder = json.JSONDecoder(strict=False)
        self._text = ""
        self._at = 0
        self._dropped = 0
        self._ended = False
        self._stream: IO[bytes] | None = None
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """
        Raises:
            ProblemsError: kinds `file.missing`, `file.unreadable`; `trace.truncated`, `trace.damaged`, `trace.format`.
        """
        try:
            with readable(self.path):
                if not S_ISREG(self.path.stat().st_mode):
                    raise problem_error(str(self.path), "file.missing", "is no file, expected a trace", FIX)
                with self.path.open("rb") as raw:
                    packed = raw.read(2) == _GZIP
                    raw.seek(0)
                    self._stream = cast(IO[bytes], gzip.GzipFile(fileobj=raw) if packed else raw)
                    yield from self._events()
        except (FileNotFoundError, NotADirectoryError):
            raise problem_error(str(self.path), "file.missing", "no such file (trace)", "check the path") from None

    def _events(self) -> Iterator[dict[str, Any]]:
        self._fill()
        if not _OPENING.match(self._text):
            raise self._wrong("format", "does not begin with {: it is no trace")
        self._at = self._text.index("{") + 1
        found = False
        while self._peek() != "}":
            key = self._value()
            if not isinstance(key, str) or self._peek() != ":":
                raise self._wrong("damaged", "has no name of a value")
            self._at += 1
            if key == EVENTS:
                if self._peek() != "[":
                    raise self._wrong("format", f"{EVENTS} is no list")
                found = True
                self._at += 1
                yield from self._elements()
            else:
                self.facts[key] = self._value()
        if not found:
            raise self._wrong("format", f"has no {EVENTS}: it is no Chrome trace")

    def _elements(self) -> Iterator[dict[str, Any]]:
        while self._peek() != "]":
            event = self._value()
            if not isinstance(event, dict):
                raise self._wrong("format", f"{EVENTS} holds a {type(event).__name__}, expected objects")
            yield event
        self._at += 1

    def _peek(self) -> str:
        """The next character that is neither space nor a comma."""
        while True:
            match = _SPACE.match(self._text, self._at)
            assert match is not None
            self._at = match.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                raise self._truncated()
            self._fill()

    def _value(self) -> Any:
        self._peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._ended and self._reached_end(error):
                    raise self._truncated() from None
                if self._ended or len(self._text) - self._at > _LONGEST:
                    raise self._wrong("damaged", f"is no JSON there: {error.msg}") from None
            except (RecursionError, ValueError) as error:  # too deep; an integer of thousands of digits
                raise self._wrong("damaged", f"is no JSON that can be read there: {error}") from None
            else:
                if end < len(self._text) or self._ended:  # a number could go on in what was not read yet
                    self._at = end
                    return value
            self._fill()

    def _reached_end(self, error: json.JSONDecodeError) -> bool:
        """Whether the text is good as far as it goes; what is not closed may be an error some characters before."""
        return error.pos >= len(self._text.rstrip()) - 8 or error.msg.startswith("Unterminated string")

    def _fill(self) -> None:
        """Reads more, at least as much as is left, so that a long value is not parsed too often."""
        assert self._stream is not None
        wanted = max(_BYTES, len(self._text) - self._at)
        try:
            data = self._stream.read(wanted)
        except EOFError:
            raise self._truncated() from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise self._wrong("damaged", f"is damaged: {error}") from None
        self._ended = not data
        self._dropped += self._at
        self._text = self._text[self._at :] + self._decode.decode(data, final=self._ended)
        self._at = 0

    def _truncated(self) -> Eagle3Error:
        message = f"ends in the middle, after {self._dropped + len(self._text):,} characters"
        fix = "wait until the server has written it (its log says `Profiling done`), or copy it again"
        return problem_error(str(self.path), "trace.truncated", message, fix)

    def _wrong(self, kind: str, message: str) -> Eagle3Error:
        place = f"at character {self._dropped + self._at:,}: " if kind == "damaged" else ""
        return problem_error(str(self.path), f"trace.{kind}", place + message, FIX)
