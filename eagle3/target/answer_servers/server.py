"""One server: requests to it, what goes wrong with them, and how it has fared."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
from pydantic_core import from_json

from eagle3.config import AnswerServerSection
from eagle3.errors import Problem
from eagle3.target.answer_servers.api import Api, Asked, FaultyReplyError, OtherPromptError, Reply, Sampling

_OVERLOADED = (429, 502, 503, 504)
_LONGEST_PAUSE = 60.0
_LONGEST_ASKED_PAUSE = 600.0
_SAID = 200


class UnavailableError(Exception):
    """The server cannot take requests now; any other may.

    Attributes:
        seconds: after which it asks to be tried again; None where it does not say.
    """

    def __init__(self, message: str, seconds: float | None = None) -> None:
        super().__init__(message)
        self.seconds = seconds


class FaultyError(Exception):
    """The request got no good answer; the same one may get one."""


class RefusedError(Exception):
    """The server will not answer this request, however often it is asked."""


class LockedOutError(Exception):
    """The server wants another API key."""


@dataclass
class Server:
    """A server and its state.

    Attributes:
        url: without a path.
        http: of all servers.
        api, model: how it is asked and for what.
        known: these were found out, and since then it was always there.
        wrong: why it must not be asked.
        in_flight: requests to it.
        answers, faults: how many it gave, and how often it failed.
        silent: times in a row that it was not there, or overloaded.
        rests_until: monotonic time before which it is left alone.
        last_fault: what it said or did last.
    """

    url: str
    cfg: AnswerServerSection
    http: httpx.AsyncClient
    api: Api | None = None
    model: str | None = None
    known: bool = False
    wrong: list[Problem] = field(default_factory=list)
    in_flight: int = 0
    answers: int = 0
    faults: int = 0
    silent: int = 0
    rests_until: float = 0.0
    last_fault: str = ""
    _silent_since: float = -math.inf

    @property
    def lost(self) -> bool:
        """It is wrong, or was silent more often than it is tried again."""
        return bool(self.wrong) or self.silent > self.cfg.retries

    def room(self, now: float) -> bool:
        """Whether it may be sent a request: one at a time after it was silent."""
        most = 1 if self.silent or not self.known else self.cfg.concurrency
        return not self.wrong and now >= self.rests_until and self.in_flight < most

    async def ask(self, asked: Asked, sampling: Sampling) -> Reply:
        """An answer.

        Raises:
            UnavailableError, FaultyError, RefusedError, LockedOutError: there is none.
        """
        api = self.api
        assert api is not None
        status, value = await self.fetch("POST", api.path, api.body(asked, sampling, self.model))
        if status != 200:
            raise RefusedError(f"{self.url} refuses it ({status}): {said(value)}")
        try:
            return api.read(value, asked, sampling)
        except OtherPromptError as error:
            raise RefusedError(f"{self.url} {error}") from None
        except FaultyReplyError as error:
            raise FaultyError(f"{self.url}: the answer {error}") from None

    async def fetch(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """Status and JSON value of one exchange; a status below 500 only.

        Raises:
            UnavailableError, FaultyError, LockedOutError: there is none.
        """
        try:
            async with asyncio.timeout(self.cfg.timeout_seconds):
                reply = await self.http.request(method, self.url + path, json=body)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise UnavailableError(f"cannot be reached: {error or type(error).__name__}") from None
        except (TimeoutError, httpx.TimeoutException):
            raise FaultyError(f"{self.url} gave no answer in {self.cfg.timeout_seconds:g} s") from None
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise FaultyError(f"{self.url} broke off: {error or type(error).__name__}") from None
        return self._checked(reply)

    def _checked(self, reply: httpx.Response) -> tuple[int, Any]:
        status = reply.status_code
        if status in (401, 403):
            raise LockedOutError(f"wants an API key ({status})")
        try:
            value = from_json(reply.content)
        except ValueError:
            value = None
        if status in _OVERLOADED:
            raise UnavailableError(
                f"is overloaded ({status}): {said(value)}", _seconds(reply.headers.get("retry-after"))
            )
        if status >= 500:
            raise FaultyError(f"{self.url} failed ({status}): {said(value)}")
        if status == 200 and value is None:
            raise FaultyError(f"{self.url}: the answer is no JSON")
        return status, value

    def rest(self, started: float, error: UnavailableError) -> None:
        """Leaves it alone for a while; requests in flight together count once."""
        now = time.monotonic()
        self.faults += 1
        self.last_fault = str(error)
        self.known = False  # whoever comes back may be another
        if started >= self._silent_since:
            self.silent += 1
            self._silent_since = now
        self.rests_until = max(self.rests_until, now + pause(self.cfg, self.silent, error.seconds))

    def answered(self) -> None:
        self.answers += 1
        self.silent = 0


def pause(cfg: AnswerServerSection, failures: int, asked_for: float | None = None) -> float:
    """Seconds to wait after so many failures, which are at least 1."""
    own = min(cfg.backoff_seconds * 2.0 ** min(failures - 1, 30), _LONGEST_PAUSE)
    return own if asked_for is None else max(own, min(asked_for, _LONGEST_ASKED_PAUSE))


def said(value: Any) -> str:
    """What a server says of an error, without line ends."""
    error = value.get("error", value) if isinstance(value, dict) else value
    for key in ("message", "detail"):
        if isinstance(error, dict) and key in error:
            error = error[key]
    return " ".join(str(error if error else "nothing").split())[:_SAID]


def _seconds(text: str | None) -> float | None:
    """Of a Retry-After header; a date, which no known server sends, is passed over."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if 0 <= value < math.inf else None
