"""Conversations -> the samples that are trained on, with a report of what became of each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

from eagle3.data.chat.render import SplitTurns
from eagle3.data.chat.rendering import Rendering
from eagle3.data.chat.report import PrepareReport, TokenSample
from eagle3.data.chat.tokenizer import Tokenizer, template_text
from eagle3.data.chat.workers import Renderers
from eagle3.data.conversations import Conversation
from eagle3.errors import Problem, ProblemsError, problem_error, raise_problems

_KEPT_TOGETHER = 4096
"""Conversations that share a file of the cache; a killed run finds the whole ones again."""


def prepare_samples(
    tokenizer: Tokenizer,
    conversations: Iterable[Conversation],
    max_length: int,
    skip_bad: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
    split_turns: SplitTurns = "auto",
    workers: int | None = None,
    cache: Path | None = None,
) -> tuple[list[TokenSample], PrepareReport]:
    """The samples as a list; see `prepare_stream`."""
    samples: list[TokenSample] = []
    options = (max_length, skip_bad, template_kwargs, split_turns, workers, cache)
    return samples, prepare_stream(tokenizer, conversations, samples.append, *options)


def prepare_stream(
    tokenizer: Tokenizer,
    conversations: Iterable[Conversation],
    keep: Callable[[TokenSample], None],
    max_length: int,
    skip_bad: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
    split_turns: SplitTurns = "auto",
    workers: int | None = None,
    cache: Path | None = None,
) -> PrepareReport:
    """Renders and cuts conversations, a few thousand in memory at a time; those left without a supervised token are
    dropped and counted.

    Of each conversation a digest of its samples' names stays in memory, and its problems if it has any.

    Args:
        conversations: gone through once.
        keep: takes each sample.
        max_length: longest sample, in tokens; the right end is cut off.
        skip_bad: drop and count conversations that cannot be rendered, instead of raising.
        split_turns: see `Renderer.samples`.
        workers: processes that render, see `Renderers`.
        cache: folder in which to keep what was rendered, under a digest of all that it depends on.

    Raises:
        ProblemsError: what going through the conversations raises; every conversation that cannot be rendered (unless
            `skip_bad`); kind `chat.nothing_supervised` if no sample is left.
    """
    problems: list[Problem] = []
    names: set[bytes] = set()
    report, bad = PrepareReport(), 0
    kwargs = template_kwargs or {}
    _check_template(tokenizer, conversations)
    for conversation, rendering in _renderings(tokenizer, conversations, kwargs, split_turns, workers, cache):
        report.total += 1
        digests = [_digest(name) for name, _ in rendering.samples]
        found = rendering.problems or _repeated(rendering, digests, names)
        if found:
            problems += () if skip_bad else found
            bad += 1
            report.drops.add(found[0].kind, conversation.source)
            continue
        names.update(digests)
        kept = 0
        for name, rendered in rendering.samples:
            ids, mask = rendered.input_ids[:max_length], rendered.loss_mask[:max_length]
            if any(mask):
                sample = TokenSample(name, ids, mask, conversation.source)
                keep(sample)
                report.add(sample, len(rendered.input_ids))
                kept += 1
            elif len(rendering.samples) > 1:
                report.drops.add("no supervised token in the sample of an answer", conversation.source)
        if kept:
            report.kept += 1
            report.kept_of[conversation.source] += 1
            report.split += len(rendering.samples) > 1
        elif len(rendering.samples) <= 1:
            report.drops.add("no supervised token", conversation.source)
    raise_problems(problems, f"{bad} of {report.total} conversations cannot be rendered")
    if not report.samples:
        message = f"no sample has a supervised token within {max_length} tokens\n{report}"
        fix = "raise data.max_length; prompts without answers need `eagle3 regenerate` first"
        raise problem_error("conversations", "chat.nothing_supervised", message, fix)
    return report


def _check_template(tokenizer: Tokenizer, conversations: Iterable[Conversation]) -> None:
    """Without a template there is one problem, and not one for each conversation; those of the records go first."""
    try:
        template_text(tokenizer)
    except ProblemsError:
        deque(conversations, maxlen=0)
        raise


def _renderings(
    tokenizer: Tokenizer,
    conversations: Iterable[Conversation],
    template_kwargs: Mapping[str, Any],
    split_turns: SplitTurns,
    workers: int | None,
    cache: Path | None,
) -> Iterator[tuple[Conversation, Rendering]]:
    with Renderers(tokenizer, template_kwargs, split_turns, workers) as renderers:
        if cache is None:
            yield from renderers.render(conversations)
            return
        from eagle3.data.chat.cache import RenderingCache, load_renderings, make_cache, save_renderings

        make_cache(cache)
        kept, given = RenderingCache(cache, tokenizer, template_kwargs, split_turns), iter(conversations)
        while chunk := list(islice(given, _KEPT_TOGETHER)):
            path = kept.path(chunk)
            found = load_renderings(path, chunk)
            if found is None:
                found = [rendering for _, rendering in renderers.render(chunk)]
                save_renderings(path, found)
            yield from zip(chunk, found, strict=True)


def _digest(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=16).digest()


def _repeated(rendering: Rendering, digests: Sequence[bytes], names: set[bytes]) -> list[Problem]:
    """A split conversation's sample may be named as another one is."""
    fix = "give the conversations other ids, or pass data.skip_bad=true"
    return [
        Problem(f"conversation {rendering.id!r}", "chat.duplicate_id", f"its sample {name!r} is there already", fix)
        for (name, _), digest in zip(rendering.samples, digests, strict=True)
        if digest in names
    ]
