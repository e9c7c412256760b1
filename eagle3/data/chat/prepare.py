"""Conversations -> the samples that are trained on, with a report of what became of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from eagle3.data.chat.render import SplitTurns
from eagle3.data.chat.rendering import Rendering
from eagle3.data.chat.report import PrepareReport, TokenSample
from eagle3.data.chat.tokenizer import template_text
from eagle3.data.chat.workers import render_all
from eagle3.data.conversations import Conversation
from eagle3.errors import Problem, problem_error, raise_problems


def prepare_samples(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Conversation],
    max_length: int,
    skip_bad: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
    split_turns: SplitTurns = "auto",
    workers: int | None = None,
    cache: Path | None = None,
) -> tuple[list[TokenSample], PrepareReport]:
    """Renders and cuts conversations; those left without a supervised token are dropped and counted.

    Args:
        max_length: longest sample, in tokens; the right end is cut off.
        skip_bad: drop and count conversations that cannot be rendered, instead of raising.
        split_turns: see `Renderer.samples`.
        workers: processes that render, see `render_all`.
        cache: folder in which to keep what was rendered, under a digest of all that it depends on.

    Raises:
        ProblemsError: every conversation that cannot be rendered (unless `skip_bad`); kind
            `chat.nothing_supervised` if no sample is left.
    """
    samples: list[TokenSample] = []
    problems: list[Problem] = []
    names: set[str] = set()
    report, bad = PrepareReport(total=len(conversations)), 0
    kwargs = template_kwargs or {}
    template_text(tokenizer)  # one problem, and not one for each conversation
    for conversation, rendering in zip(
        conversations, _renderings(tokenizer, conversations, kwargs, split_turns, workers, cache), strict=True
    ):
        found = rendering.problems or _repeated(rendering, names)
        if found:
            problems += found
            bad += 1
            report.drops.add(found[0].kind, conversation.source)
            continue
        names.update(name for name, _ in rendering.samples)
        kept = 0
        for name, rendered in rendering.samples:
            ids, mask = rendered.input_ids[:max_length], rendered.loss_mask[:max_length]
            if any(mask):
                samples.append(TokenSample(name, ids, mask, conversation.source))
                report.add(samples[-1], len(rendered.input_ids))
                kept += 1
            elif len(rendering.samples) > 1:
                report.drops.add("no supervised token in the sample of an answer", conversation.source)
        if kept:
            report.kept += 1
            report.kept_of[conversation.source] += 1
            report.split += len(rendering.samples) > 1
        elif len(rendering.samples) <= 1:
            report.drops.add("no supervised token", conversation.source)
    if not skip_bad:
        raise_problems(problems, f"{bad} of {len(conversations)} conversations cannot be rendered")
    if not samples:
        message = f"no sample has a supervised token within {max_length} tokens\n{report}"
        fix = "raise data.max_length; prompts without answers need `eagle3 regenerate` first"
        raise problem_error("conversations", "chat.nothing_supervised", message, fix)
    return samples, report


def _renderings(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Conversation],
    template_kwargs: Mapping[str, Any],
    split_turns: SplitTurns,
    workers: int | None,
    cache: Path | None,
) -> Sequence[Rendering]:
    if cache is None:
        return list(render_all(tokenizer, conversations, template_kwargs, split_turns, workers))
    from eagle3.data.chat.cache import load_renderings, make_cache, rendering_digest, save_renderings

    make_cache(cache)
    path = cache / f"{rendering_digest(tokenizer, conversations, template_kwargs, split_turns)}.parquet"
    found = load_renderings(path, conversations)
    if found is None:
        found = list(render_all(tokenizer, conversations, template_kwargs, split_turns, workers))
        save_renderings(path, found)
    return found


def _repeated(rendering: Rendering, names: set[str]) -> list[Problem]:
    """A split conversation's sample may be named as another one is."""
    fix = "give the conversations other ids, or pass data.skip_bad=true"
    return [
        Problem(f"conversation {rendering.id!r}", "chat.duplicate_id", f"its sample {name!r} is there already", fix)
        for name, _ in rendering.samples
        if name in names
    ]
