"""One request, streamed: when each piece of the answer came, and what the server says of the whole."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from pydantic_core import from_json

from eagle3.target.answer_servers.api import Asked, FaultyReplyError, OtherPromptError, Reply, Sampling
from eagle3.target.answer_servers.server import Server, said


class RequestFailedError(Exception):
    """A request got no whole answer.

    Attributes:
        gone: nobody is listening at that address.
    """

    def __init__(self, message: str, gone: bool = False) -> None:
        super().__init__(message)
        self.gone = gone


@dataclass
class Streamed:
    """An answer as it came.

    Attributes:
        sent: seconds on `time.perf_counter` at which it was sent.
        at: seconds from then to each piece that brought tokens.
        tokens: that each piece brought.
        meta: what SGLang says of the whole request; empty from other servers.
    """

    sent: float
    at: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    meta: Mapping[str, Any] = field(default_factory=dict)
    reply: Reply | None = None


async def ask(
    server: Server, asked: Asked, sampling: Sampling, extra: Mapping[str, Any], ignore_eos: bool = False
) -> Streamed:
    """Sends one request and reads its stream to the end; it is never sent again.

    Args:
        extra: further keys of the request.
        ignore_eos: the answer runs to its limit.

    Raises:
        RequestFailedError: with what happened, for people.
    """
    api = server.api
    assert api is not None
    body = {**api.body(asked, sampling, server.model), **extra, "stream": True}
    if api.name == "sglang":
        body["sampling_params"] |= {"ignore_eos": True, "stop_token_ids": []} if ignore_eos else {}
    else:
        body |= {"ignore_eos": True} if ignore_eos else {}
        if api.name == "chat":  # SGLang refuses ids of a streamed chat (0.5.23); its text and its counts are enough
            del body["return_token_ids"]
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    read = _Native() if api.name == "sglang" else _OpenAi()
    found = Streamed(time.perf_counter())
    try:
        async with asyncio.timeout(server.cfg.timeout_seconds):
            async for event in _events(server, api.path, body):
                now = time.perf_counter() - found.sent
                if count := read.take(event):
                    found.at.append(now)
                    found.tokens.append(count)
        whole = read.whole()
        found.reply = api.read(whole, asked, sampling)
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise RequestFailedError(f"cannot be reached: {error or type(error).__name__}", gone=True) from None
    except (TimeoutError, httpx.TimeoutException):
        raise RequestFailedError(f"no answer in {server.cfg.timeout_seconds:g} s") from None
    except (httpx.TransportError, httpx.DecodingError) as error:
        raise RequestFailedError(f"the stream broke off: {error or type(error).__name__}") from None
    except (FaultyReplyError, OtherPromptError) as error:
        raise RequestFailedError(f"the answer {error}") from None
    found.meta = whole.get("meta_info") or {}
    if sum(found.tokens) != found.reply.tokens:
        counts = f"{sum(found.tokens)} tokens came, the answer has {found.reply.tokens}"
        raise RequestFailedError(f"the stream lost tokens: {counts}")
    return found


async def _events(server: Server, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The stream's JSON objects up to its end mark."""
    async with server.http.stream("POST", server.url + path, json=body) as reply:
        if reply.status_code != 200:
            await reply.aread()
            try:
                value = from_json(reply.content)
            except ValueError:
                value = None
            raise RequestFailedError(f"refused ({reply.status_code}): {said(value)}")
        async for line in reply.aiter_lines():
            if not line.startswith("data:"):
                continue
            text = line.removeprefix("data:").strip()
            if text == "[DONE]":
                return
            try:
                event = from_json(text)
            except ValueError:
                raise FaultyReplyError(f"has a piece that is no JSON: {text[:60]!r}") from None
            if not isinstance(event, dict):
                raise FaultyReplyError(f"has a piece that is a {type(event).__name__}")
            if "error" in event:
                raise RequestFailedError(f"failed while it was answered: {said(event)}")
            yield event
    raise FaultyReplyError("ended before its end mark")


class _Native:
    """SGLang's `/generate`: each piece has all tokens so far, or with `--incremental-streaming-output` the new ones."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._count = 0
        self._last: dict[str, Any] = {}

    def take(self, event: dict[str, Any]) -> int:
        meta = event.get("meta_info")
        ids, count = event.get("output_ids"), meta.get("completion_tokens") if isinstance(meta, dict) else None
        if not isinstance(ids, list) or type(count) is not int:
            raise FaultyReplyError("has a piece without output_ids or meta_info.completion_tokens")
        new = count - self._count
        if new < 0 or len(ids) not in (count, new):
            raise FaultyReplyError(f"has a piece of {len(ids)} ids, {self._count} tokens before it and {count} after")
        self._ids = list(ids) if len(ids) == count else [*self._ids, *ids]
        self._count, self._last = count, event
        return new

    def whole(self) -> dict[str, Any]:
        return {**self._last, "output_ids": self._ids}


class _OpenAi:
    """The OpenAI routes: pieces of text, counted by the usage that comes with each."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._ids: list[int] = []
        self._usage: dict[str, Any] = {}
        self._finish: Any = None
        self._chat = False
        self._prompt_ids: Any = None

    def take(self, event: dict[str, Any]) -> int:
        before = self._usage.get("completion_tokens", 0)
        choices = event.get("choices") or []
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise FaultyReplyError(f"has a piece whose choices are {str(choices)[:60]}")
        brought = 0
        for choice in choices[:1]:
            delta = choice.get("delta")
            self._chat = self._chat or isinstance(delta, dict)
            text = (delta.get("content") if isinstance(delta, dict) else choice.get("text")) or ""
            if not isinstance(text, str):
                raise FaultyReplyError(f"has a piece whose text is {str(text)[:60]}")
            self._text.append(text)
            ids = choice.get("token_ids")
            if isinstance(ids, list):
                self._ids += ids
            self._finish = choice.get("finish_reason") or self._finish
            self._prompt_ids = choice.get("prompt_token_ids", self._prompt_ids)
            brought = int(bool(text))
        usage = event.get("usage")
        if isinstance(usage, dict) and type(usage.get("completion_tokens")) is int:
            self._usage = usage
            if (new := int(usage["completion_tokens"]) - int(before)) < 0:
                raise FaultyReplyError(f"has a piece that counts {before + new} tokens, {before} came before it")
            return new
        if brought and not self._usage:
            raise FaultyReplyError("has pieces without usage: the server does not know continuous_usage_stats")
        return 0

    def whole(self) -> dict[str, Any]:
        text = "".join(self._text)
        choice: dict[str, Any] = {"finish_reason": self._finish}
        choice |= {"message": {"content": text}} if self._chat else {"text": text}
        if len(self._ids) == self._usage.get("completion_tokens"):
            choice["token_ids"] = self._ids
        if self._prompt_ids is not None:
            choice["prompt_token_ids"] = self._prompt_ids
        return {"choices": [choice], "usage": self._usage}
