"""Renders many conversations, in this process or in several."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from multiprocessing import get_context
from typing import Any

from eagle3.data.chat.render import Renderer, SplitTurns
from eagle3.data.chat.rendering import Rendering
from eagle3.data.chat.tokenizer import Tokenizer
from eagle3.data.conversations import Conversation
from eagle3.errors import ProblemsError, problem_error

_MANY = 20_000
"""Conversations from which starting processes (a few seconds) pays."""
_MOST = 8
_CHUNK = 64
_AHEAD = 4
"""Chunks that wait for each process."""

_renderer: tuple[Renderer, SplitTurns]
"""A worker's own."""


class Renderers:
    """Processes that render, started when they are first needed. A context manager."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template_kwargs: Mapping[str, Any],
        split_turns: SplitTurns,
        workers: int | None,
    ) -> None:
        """Args:
        workers: processes; None for one where conversations are few, else one a core, 8 at most.
        """
        self._given = (tokenizer, dict(template_kwargs), split_turns)
        self._workers, self._split_turns = workers, split_turns
        self._here = Renderer(tokenizer, template_kwargs)
        self._pool: ProcessPoolExecutor | None = None
        self._done = 0

    def render(self, conversations: Iterable[Conversation]) -> Iterator[tuple[Conversation, Rendering]]:
        """Each conversation and what became of it, in order; few are read ahead."""
        waiting: deque[tuple[list[Conversation], Future[list[Rendering]]]] = deque()
        given = iter(conversations)
        while chunk := list(islice(given, _CHUNK)):
            workers = self._workers or (min(os.cpu_count() or 1, _MOST) if self._done >= _MANY else 1)
            self._done += len(chunk)
            if workers == 1:
                yield from zip(chunk, _render(self._here, chunk, self._split_turns), strict=True)
                continue
            waiting.append((chunk, self._submit(chunk, workers)))
            if len(waiting) > _AHEAD * workers:
                yield from _finished(*waiting.popleft())
        while waiting:
            yield from _finished(*waiting.popleft())

    def __enter__(self) -> Renderers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _submit(self, chunk: list[Conversation], workers: int) -> Future[list[Rendering]]:
        with _alive():
            if self._pool is None:
                self._pool = ProcessPoolExecutor(workers, get_context("spawn"), _start, self._given)
            return self._pool.submit(_render_chunk, chunk)


def _finished(chunk: list[Conversation], future: Future[list[Rendering]]) -> Iterator[tuple[Conversation, Rendering]]:
    with _alive():
        renderings = future.result()
    yield from zip(chunk, renderings, strict=True)


@contextmanager
def _alive() -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool as error:
        fix = 'give them more memory, put the script\'s work behind `if __name__ == "__main__"`, or pass data.workers=1'
        raise problem_error(
            "data.workers", "chat.worker_died", f"a process that renders ended: {error}", fix
        ) from error


def _start(tokenizer: Tokenizer, template_kwargs: dict[str, Any], split_turns: SplitTurns) -> None:
    global _renderer
    _renderer = Renderer(tokenizer, template_kwargs), split_turns


def _render_chunk(conversations: Sequence[Conversation]) -> list[Rendering]:
    return _render(_renderer[0], conversations, _renderer[1])


def _render(renderer: Renderer, conversations: Sequence[Conversation], split_turns: SplitTurns) -> list[Rendering]:
    renderer.ahead(conversations)
    return [_rendering(renderer, conversation, split_turns) for conversation in conversations]


def _rendering(renderer: Renderer, conversation: Conversation, split_turns: SplitTurns) -> Rendering:
    try:
        return Rendering(conversation.id, tuple(renderer.samples(conversation, split_turns)), ())
    except ProblemsError as error:
        return Rendering(conversation.id, (), error.problems)
