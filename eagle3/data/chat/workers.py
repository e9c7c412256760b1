"""Renders many conversations, in this process or in several."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain
from multiprocessing import get_context
from typing import Any

from transformers import PreTrainedTokenizerBase

from eagle3.data.chat.render import Renderer, SplitTurns
from eagle3.data.chat.rendering import Rendering
from eagle3.data.conversations import Conversation
from eagle3.errors import ProblemsError, problem_error

_MANY = 20_000
"""Conversations from which starting processes (a few seconds) pays."""
_MOST = 8
_CHUNK = 64

_renderer: tuple[Renderer, SplitTurns]
"""A worker's own."""


def render_all(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Conversation],
    template_kwargs: Mapping[str, Any],
    split_turns: SplitTurns,
    workers: int | None,
) -> Iterator[Rendering]:
    """What became of each conversation, in order.

    Args:
        workers: processes; None for one where they are few, else one a core, 8 at most.
    """
    if workers is None:
        workers = min(os.cpu_count() or 1, _MOST) if len(conversations) >= _MANY else 1
    chunks = [conversations[begin : begin + _CHUNK] for begin in range(0, len(conversations), _CHUNK)]
    if workers == 1:
        renderer = Renderer(tokenizer, template_kwargs)
        yield from chain.from_iterable(_render(renderer, chunk, split_turns) for chunk in chunks)
        return
    given = (tokenizer, dict(template_kwargs), split_turns)
    try:
        with ProcessPoolExecutor(workers, get_context("spawn"), _start, given) as pool:
            yield from chain.from_iterable(pool.map(_render_chunk, chunks))
    except BrokenProcessPool as error:
        fix = 'give them more memory, put the script\'s work behind `if __name__ == "__main__"`, or pass data.workers=1'
        raise problem_error(
            "data.workers", "chat.worker_died", f"a process that renders ended: {error}", fix
        ) from error


def _start(tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any], split_turns: SplitTurns) -> None:
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
