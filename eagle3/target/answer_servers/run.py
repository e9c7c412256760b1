"""Answers all that waits by asking servers: many requests in flight, each answer on disk soon after it came."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from array import array
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from eagle3.config import AnswerServerSection
from eagle3.progress import progress
from eagle3.target.answer_file import Line
from eagle3.target.answer_servers.api import Asked, Sampling
from eagle3.target.answer_servers.identity import Wanted, names_of
from eagle3.target.answer_servers.pool import GivenUpError, Pool
from eagle3.target.dialogue import Prompt
from eagle3.target.generate import Generated, folder_eos_ids, prompt_seed
from eagle3.target.regenerate_session import Session, answer_line
from eagle3.target.resolve import TargetFiles

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PROBE = [{"role": "user", "content": "Hi"}]


def answer_from_servers(session: Session, files: TargetFiles, server: AnswerServerSection) -> list[str]:
    """Asks for every answer that waits; `session` has them then, and what failed.

    SIGINT and SIGTERM end it: what came is kept, what is under way is given up.

    Returns:
        A line for each server.

    Raises:
        ProblemsError: a server must not be asked, or none is left; what came until then is on disk.
    """
    cfg = session.cfg
    sampling = Sampling(
        cfg.temperature,
        cfg.top_p,
        cfg.top_k,
        folder_eos_ids(files),
        files.facts.vocab_size,
        cfg.data.chat_template_kwargs,
    )
    chat_ids = session.renderer.prompt(_PROBE, None, "probe")
    wanted = Wanted(files, session.tokenizer, sampling, names_of(cfg.target, files), chat_ids)
    return asyncio.run(_run(session, server, wanted))


async def _run(session: Session, cfg: AnswerServerSection, wanted: Wanted) -> list[str]:
    stop = asyncio.Event()
    with_signals = threading.current_thread() is threading.main_thread()
    loop = asyncio.get_running_loop()

    def stopping(number: int) -> None:
        print(f"\n{signal.Signals(number).name}: stopping; answers that came are kept", file=sys.stderr)
        stop.set()
        for each in _STOP_SIGNALS:
            loop.remove_signal_handler(each)

    for number in _STOP_SIGNALS if with_signals else ():
        loop.add_signal_handler(number, stopping, number)
    try:
        async with Pool(cfg, wanted) as pool:
            work = asyncio.ensure_future(_work(session, pool))
            stopped = asyncio.ensure_future(stop.wait())
            await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            session.interrupted = not work.done()
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            if not work.cancelled():
                work.result()
            return pool.report()
    finally:
        for number in _STOP_SIGNALS if with_signals else ():
            loop.remove_signal_handler(number)


async def _work(session: Session, pool: Pool) -> None:
    for found in await pool.start():
        print(found, file=sys.stderr)
    writer = _Writer(session)
    started = time.monotonic()
    with progress("regenerate", session.missing, "answers") as advance:
        waiting = iter(array("Q", session.waiting))
        count = min(len(session.waiting), pool.cfg.concurrency * len(pool.servers))
        asking = [_ask_for(session, pool, waiting, writer, advance, started) for _ in range(count)]
        await writer.until(_all(asking))


async def _all(workers: list[Coroutine[Any, Any, None]]) -> None:
    """Waits for all of them; ends the others when one fails."""
    tasks = [asyncio.ensure_future(worker) for worker in workers]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _ask_for(
    session: Session, pool: Pool, waiting: Iterator[int], writer: _Writer, advance: Callable[..., None], started: float
) -> None:
    """One conversation after the other, each turn after the one before it."""
    for index in waiting:
        left = session.left(index)
        while prompt := session.prompt(index):
            try:
                line = await _answer(session, pool, prompt)
            except GivenUpError as error:
                session.failed(index, str(error))
            else:
                writer.add(line)
                session.took(index, line)
            before, left = left, session.left(index) if index in session.waiting else 0
            advance(before - left, _note(session, started))


async def _answer(session: Session, pool: Pool, prompt: Prompt) -> Line:
    seed = prompt_seed(session.cfg.seed, prompt.id)
    conversation = prompt.conversation
    asked = Asked(
        prompt.input_ids, conversation.messages, conversation.tools, session.limit(len(prompt.input_ids)), seed
    )
    reply = await pool.ask(asked)
    if reply.ids is not None:
        return session.line(prompt, Generated(reply.ids, reply.finish))
    return answer_line(prompt, reply.text, reply.finish, answer_tokens=reply.tokens)


def _note(session: Session, started: float) -> str:
    spent = session.spent
    rate = spent.answer_tokens / max(time.monotonic() - started, 1e-9)
    cost = session.cost(spent)
    parts = [
        f"{spent.prompt_tokens:,} + {spent.answer_tokens:,} tokens",
        f"{rate:,.0f} tokens/s",
        *([] if cost is None else [f"cost {cost:,.2f}"]),
        *([f"{len(session.failures):,} failed"] if session.failures else []),
    ]
    return ", ".join(parts)


class _Writer:
    """Puts answers on disk in the order in which they came, all that came while the last ones were synced at once."""

    def __init__(self, session: Session) -> None:
        self._output = session.output
        self._lines: list[Line] = []
        self._came = asyncio.Event()

    def add(self, line: Line) -> None:
        self._lines.append(line)
        self._came.set()

    async def until(self, work: Coroutine[Any, Any, None]) -> None:
        """Writes while the work goes on, and what is left when it ends, however it does."""
        working = asyncio.ensure_future(work)
        writing = asyncio.ensure_future(self._write())
        try:
            await asyncio.wait({working, writing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            if not writing.done():
                self._ended = True
                self._came.set()
            await writing
        if not working.cancelled():
            working.result()

    _ended = False

    async def _write(self) -> None:
        while True:
            await self._came.wait()
            self._came.clear()
            lines, self._lines = self._lines, []
            if lines:
                await asyncio.to_thread(self._output.append, lines)
            elif self._ended:
                return
            if self._ended and not self._lines:
                return
