"""Sends every prompt once to one server: a fixed number of conversations in flight, each turn after the one before."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from eagle3.errors import ProblemsError
from eagle3.serve.bench.facts import Facts, counters, flush, in_flight, look
from eagle3.serve.bench.measured import Failure, Pass, Request, kept_meta
from eagle3.serve.bench.prompts import Load, Talk
from eagle3.serve.bench.stream import RequestFailedError, ask
from eagle3.target.answer_servers.api import Asked
from eagle3.target.answer_servers.server import FaultyError, LockedOutError, Server, UnavailableError
from eagle3.target.dialogue import Prompt
from eagle3.target.generate import prompt_seed

WARMUP_TOKENS = 32
_IDLE_SECONDS, _PAUSE = 3.0, 0.02
Advance = Callable[..., None]


class ServerLostError(Exception):
    """The server is gone, or is another one than before; the pass counts for nothing."""


@dataclass
class _Sending:
    """A pass at work.

    Attributes:
        full: seconds after which the first conversation ended with none left to begin; None before.
    """

    server: Server
    load: Load
    facts: Facts
    tag: str
    advance: Advance
    begun: float = field(default_factory=time.perf_counter)
    requests: list[Request] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    shortened: int = 0
    full: float | None = None

    def limit(self, prompt: Prompt) -> int:
        limit = self.load.limit(prompt)
        if self.facts.context_length is not None:
            limit = min(limit, self.facts.context_length - 1 - len(prompt.input_ids))
        return limit

    def extra(self, prompt: Prompt) -> dict[str, Any]:
        """A prefix cache of the request's own, where that is wanted."""
        off = self.load.cfg.prefix_cache == "off" and self.server.api is not None and self.server.api.name == "sglang"
        return {"extra_key": f"{self.tag}-{prompt.id}"} if off else {}


async def run_pass(
    server: Server, load: Load, facts: Facts, key: str, concurrency: int, number: int, advance: Advance
) -> Pass:
    """Warms the server up, empties its prefix cache, and measures one pass.

    Args:
        facts: of the server, as it was when its key was made.
        advance: told of each conversation that is done.

    Raises:
        ServerLostError: with what happened, for people.
    """
    try:
        await _warm_up(server, load, facts, concurrency)
        flushed = await flush(server) if load.cfg.prefix_cache != "keep" else None
        busy = await _others(server)
        before = await counters(server)
        sending = _Sending(server, load, facts, f"{key}-{concurrency}-{number}-{time.time_ns()}", advance)
        started = time.time()
        await _send_all(sending, concurrency)
        seconds = time.perf_counter() - sending.begun
        added = (await counters(server)).since(before)
        after = await look(server)
        busy_after = await _others(server)
    except UnavailableError as error:
        raise ServerLostError(f"{server.url} {error}") from None
    except (FaultyError, LockedOutError) as error:
        raise ServerLostError(str(error)) from None
    if added is None or (after.instance != facts.instance and facts.instance is not None):
        raise ServerLostError(f"{server.url} was started anew while it was measured")
    if after.settings != facts.settings:
        raise ServerLostError(f"{server.url} became another server: {after.settings}, was {facts.settings}")
    foreign = None if busy is None and busy_after is None else (busy or 0) + (busy_after or 0)
    if added.requests is not None:
        foreign = (foreign or 0) + max(added.requests - len(sending.requests) - len(sending.failures), 0)
    return Pass(
        key=key,
        concurrency=concurrency,
        number=number,
        started=started,
        seconds=seconds,
        full=seconds if sending.full is None else sending.full,
        instance=facts.instance,
        requests=tuple(sending.requests),
        failures=tuple(sending.failures),
        foreign=foreign,
        counted=added.rounds,
        flushed=flushed,
        shortened=sending.shortened,
    )


async def _others(server: Server) -> int | None:
    """Requests that are at the server while none of ours is; ours may take a moment to leave."""
    waited = 0.0
    while (found := await in_flight(server)) and waited < _IDLE_SECONDS:
        await asyncio.sleep(_PAUSE)
        waited += _PAUSE
    return found


async def _warm_up(server: Server, load: Load, facts: Facts, concurrency: int) -> None:
    """As many at a time as in the pass, so that each batch size has been met; what it brings is not looked at, but a
    server that answers nothing is lost."""
    wanted = max(2 * concurrency, 4) if load.cfg.warmup is None else load.cfg.warmup
    prompts = [load.talks[place % len(load.talks)].first for place in range(wanted)]
    gate = asyncio.Semaphore(concurrency)
    failed: list[RequestFailedError] = []

    async def one(prompt: Prompt) -> None:
        limit = max(min(WARMUP_TOKENS, load.limit(prompt)), 1)
        asked = Asked(prompt.input_ids, prompt.conversation.messages, prompt.conversation.tools, limit, 0)
        async with gate:
            try:
                await ask(server, asked, load.sampling, {})
            except RequestFailedError as error:
                failed.append(error)

    await asyncio.gather(*map(one, prompts))
    if failed and (len(failed) == wanted or any(error.gone for error in failed)):
        raise ServerLostError(f"{server.url}, warming up: {failed[-1]}")


async def _send_all(sending: _Sending, concurrency: int) -> None:
    waiting = iter(sending.load.talks)

    async def worker() -> None:
        for talk in waiting:
            await _converse(sending, talk)
        if sending.full is None:
            sending.full = time.perf_counter() - sending.begun

    tasks = [asyncio.ensure_future(worker()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _converse(sending: _Sending, talk: Talk) -> None:
    """Every turn of a conversation; a turn that fails takes the later ones with it."""
    dialogue, prompt = talk.dialogue(), talk.first
    turns = len(dialogue.left)
    for turn in range(turns):
        reason = ""
        try:
            if turn:
                prompt = dialogue.prompt(sending.load.renderers[talk.set_name])
            request = await _ask(sending, talk, prompt, turn)
        except RequestFailedError as error:
            if error.gone:
                raise ServerLostError(f"{sending.server.url} {error}") from None
            reason = str(error)
        except ProblemsError as error:
            reason = f"cannot be asked: {'; '.join(f'{item.kind}: {item.message}' for item in error.problems)}"
        if reason:
            later = [
                Failure(talk.key, each, f"comes after turn {turn}, which failed") for each in range(turn + 1, turns)
            ]
            sending.failures += [Failure(talk.key, turn, reason), *later]
            break
        sending.requests.append(request)
        dialogue.answer(request.text)
    sending.advance(1)


async def _ask(sending: _Sending, talk: Talk, prompt: Prompt, turn: int) -> Request:
    load, conversation = sending.load, prompt.conversation
    limit = sending.limit(prompt)
    if limit < 1:
        raise RequestFailedError(f"the prompt of {len(prompt.input_ids)} tokens fills the server's context")
    sending.shortened += limit < load.cfg.max_new_tokens
    seed = prompt_seed(load.cfg.seed, prompt.id)
    asked = Asked(prompt.input_ids, conversation.messages, conversation.tools, limit, seed)
    sampling = replace(load.sampling, template_kwargs=talk.kwargs)
    found = await ask(sending.server, asked, sampling, sending.extra(prompt), load.cfg.ignore_eos)
    reply = found.reply
    assert reply is not None
    text: str | list[str] = reply.text
    if reply.ids is not None:
        text = load.tokenizer.decode(reply.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return Request(
        talk=talk.key,
        set_name=talk.set_name,
        turn=turn,
        prompt=prompt.digest,
        prompt_tokens=len(prompt.input_ids),
        sent=found.sent - sending.begun,
        at=tuple(round(moment, 6) for moment in found.at),
        tokens=tuple(found.tokens),
        finish=reply.finish,
        ids=None if reply.ids is None else tuple(reply.ids),
        text=str(text),
        meta=kept_meta(found.meta),
    )
