"""Several servers of one target: each request goes to the one with the fewest, and to another when one fails."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import httpx

from eagle3.config import AnswerServerSection
from eagle3.errors import Problem, ProblemsError, problem_error, raise_problems
from eagle3.target.answer_servers.api import Asked, Reply
from eagle3.target.answer_servers.identity import Wanted, identify
from eagle3.target.answer_servers.server import (
    FaultyError,
    LockedOutError,
    RefusedError,
    Server,
    UnavailableError,
    pause,
)

_START = "start the server, wait until it is ready, and check the address"
_LOST_IN_A_ROW = 8
_CONNECT_SECONDS = 10.0
_LOOK_AGAIN = 1.0


class GivenUpError(Exception):
    """A request that nobody answers."""


class Pool:
    """The servers. An async context manager.

    Args:
        cfg: which, and how they are treated.
        wanted: what each must serve.

    Raises:
        ProblemsError: kinds `server.url`, `server.api_key`: an address or key that cannot be used.
    """

    def __init__(self, cfg: AnswerServerSection, wanted: Wanted) -> None:
        urls = server_urls(cfg.urls)
        key = os.environ.get(cfg.api_key_env)
        if key is not None and not (key.isascii() and key.isprintable()):
            message = "holds other than printable ASCII letters, which cannot be sent"
            raise problem_error(cfg.api_key_env, "server.api_key", message, f"correct {cfg.api_key_env}")
        self.cfg = cfg
        self._wanted = wanted
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=cfg.concurrency * len(urls))
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(cfg.timeout_seconds, connect=min(cfg.timeout_seconds, _CONNECT_SECONDS)),
            limits=limits,
        )
        self.servers = [Server(url, cfg, self._http) for url in urls]
        self._changed = asyncio.Condition()
        self._given_up_in_a_row = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def start(self) -> list[str]:
        """Asks every server what it is; those that are not there are tried again later.

        Returns:
            What was found of each.

        Raises:
            ProblemsError: one serves something else or wants another API key, or none is there.
        """
        found = await asyncio.gather(*(self._first_look(server) for server in self.servers))
        raise_problems([problem for server in self.servers for problem in server.wrong])
        if not any(server.known for server in self.servers):
            raise ProblemsError(Problem(item.url, "server.down", item.last_fault, _START) for item in self.servers)
        return found

    async def ask(self, asked: Asked) -> Reply:
        """An answer, from whichever server gives one.

        Raises:
            GivenUpError: this request is refused, or failed once more than `retries`.
            ProblemsError: no server is left, or none answers anything any more.
        """
        failures = 0
        while True:
            server = await self._take()
            started = time.monotonic()
            try:
                if not server.known:
                    note = await identify(server, self._wanted)
                    print(f"note: {'again at work' if server.known else 'left out'}: {note}", file=sys.stderr)
                if not server.known:
                    continue
                reply = await server.ask(asked, self._wanted.sampling)
            except LockedOutError as error:
                raise problem_error(server.url, "server.api_key", str(error), self._key_fix()) from None
            except UnavailableError as error:
                if not server.silent:
                    print(f"note: {server.url} {error}; its requests go to the others", file=sys.stderr)
                server.rest(started, error)
                continue
            except FaultyError as error:
                server.faults += 1
                server.last_fault = str(error)
                failures += 1
                if failures > self.cfg.retries:
                    raise self._give_up(f"{error} ({failures} attempts)") from None
            except RefusedError as error:
                raise GivenUpError(str(error)) from None
            else:
                server.answered()
                self._given_up_in_a_row = 0
                return reply
            finally:
                await self._leave(server)
            await asyncio.sleep(pause(self.cfg, failures))

    def report(self) -> list[str]:
        """A line for each server."""
        lines = []
        for server in self.servers:
            faults = f", {server.faults:,} failures, the last: {server.last_fault}" if server.faults else ""
            wrong = "; left out" if server.wrong else ""
            lines.append(f"{server.url}: {server.answers:,} answers{faults}{wrong}")
        return lines

    async def _first_look(self, server: Server) -> str:
        try:
            return await identify(server, self._wanted)
        except LockedOutError as error:
            server.wrong = [Problem(server.url, "server.api_key", str(error), self._key_fix())]
        except UnavailableError as error:
            server.rest(time.monotonic(), error)
        except FaultyError as error:
            server.rest(time.monotonic(), UnavailableError(str(error).removeprefix(f"{server.url} ")))
        return f"{server.url}: {server.last_fault}; it is tried again later"

    async def _take(self) -> Server:
        """The server with the fewest requests that has room; waits for one."""
        async with self._changed:
            while True:
                if all(server.lost for server in self.servers):
                    raise ProblemsError(self._lost(), "no server is left; what was answered is kept: run again")
                now = time.monotonic()
                if free := [server for server in self.servers if server.room(now)]:
                    server = min(free, key=lambda item: (item.in_flight / max(1, item.cfg.concurrency), item.answers))
                    server.in_flight += 1
                    return server
                resting = [item.rests_until - now for item in self.servers if not item.wrong and item.rests_until > now]
                try:
                    async with asyncio.timeout(min([_LOOK_AGAIN, *resting])):
                        await self._changed.wait()
                except TimeoutError:
                    continue

    async def _leave(self, server: Server) -> None:
        server.in_flight -= 1
        async with self._changed:
            self._changed.notify(2)  # where there is room for many again, each brings the next ones

    def _give_up(self, reason: str) -> Exception:
        self._given_up_in_a_row += 1
        if self._given_up_in_a_row < _LOST_IN_A_ROW:
            return GivenUpError(reason)
        message = f"the last {_LOST_IN_A_ROW} requests got no answer; the last: {reason}"
        where = ", ".join(server.url for server in self.servers)
        return problem_error(where, "server.failing", message, "see the server's log; what was answered is kept")

    def _lost(self) -> list[Problem]:
        found = []
        for server in self.servers:
            times = f" ({server.silent} times in a row)"
            found += server.wrong or [Problem(server.url, "server.down", f"{server.last_fault}{times}", _START)]
        return found

    def _key_fix(self) -> str:
        return f"set the environment variable {self.cfg.api_key_env} (its name is server.api_key_env)"


def server_urls(urls: Sequence[str]) -> list[str]:
    """Addresses without a path.

    Raises:
        ProblemsError: kind `server.url`, for every one that cannot be used.
    """
    found: list[str] = []
    problems = []
    for given in urls:
        url = (given if "://" in given else f"http://{given}").rstrip("/").removesuffix("/v1")
        message, shown = "", given
        try:
            parts = urlsplit(url)
            if "@" in parts.netloc:
                message, shown = "holds a user or password", f"...@{parts.netloc.rpartition('@')[2]}"
            elif parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
                message = "is no address of a server"
            elif url in found:
                message = "is listed twice"
        except ValueError as error:
            message = f"is no address of a server: {error}"
        if message:
            fix = "write it as http://host:port; give keys by an environment variable (server.api_key_env)"
            problems.append(Problem(shown, "server.url", message, fix))
        found.append(url)
    raise_problems(problems)
    return found
