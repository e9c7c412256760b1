"""Answers to prompts, token by token, from a Transformers model: batched, yet the same as one prompt at a time.

Legend: B prompts, V target vocab.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from eagle3.errors import problem_error
from eagle3.files import read_json_object
from eagle3.target.resolve import TargetFiles


@dataclass(frozen=True)
class Generated:
    """One answer.

    Attributes:
        ids: its tokens; the last one is the end-of-text token if it stopped by itself.
        finish: `stop` (end-of-text) or `length` (cut at the limit).
    """

    ids: list[int]
    finish: Literal["stop", "length"]


def eos_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """The end-of-text tokens of the checkpoint's generation_config.json (else config.json), ascending.

    Raises:
        ProblemsError: kind `target.no_eos`; no answer would ever end.
    """
    assert model.generation_config is not None
    return _checked_eos(model.generation_config.eos_token_id, model.config.vocab_size)


def folder_eos_ids(files: TargetFiles) -> tuple[int, ...]:
    """`eos_ids` of a checkpoint's folder, whose weights need not be there.

    Raises:
        ProblemsError: kind `target.no_eos`.
    """
    path = files.folder / "generation_config.json"
    given = read_json_object(path, "generation config").get("eos_token_id") if path.exists() else None
    for config in (files.text_config, files.config):
        given = config.get("eos_token_id") if given is None else given
    return _checked_eos(given, files.facts.vocab_size)


def _checked_eos(value: Any, vocab_size: int) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not ids or not all(type(item) is int and 0 <= item < vocab_size for item in ids):
        message = f"names the eos_token_id {value!r}, which is no token, so no answer would ever end"
        raise problem_error("generation_config.json", "target.no_eos", message, "correct it in the target's folder")
    return tuple(sorted(set(ids)))


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    stop_ids: Sequence[int],
    temperature: float,
    seeds: Sequence[int],
    top_p: float = 1.0,
    top_k: int | None = None,
) -> list[Generated]:
    """Answers to B prompts: greedy at temperature 0, else sampled.

    The checkpoint's own sampling defaults (top_p, repetition penalty and so on) are not applied.

    Args:
        prompts: token ids of each prompt.
        limits: most tokens of each answer.
        stop_ids: end-of-text tokens. The padding token may be one of them: prompts are masked by length, and an
            answer is cut at the first stop token that was generated.
        temperature: 0 or above.
        seeds: of each prompt, so that its sample does not depend on the prompts beside it.
        top_p, top_k: sample from the likeliest tokens only; by default from all.

    Raises:
        ProblemsError: kind `target.not_finite`; the target computes NaN.
    """
    width = max(len(prompt) for prompt in prompts)
    pad = stop_ids[0]
    rows = [[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    masks = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    processors = LogitsProcessorList([_Finite(), *(_sampling(temperature, seeds, top_p, top_k) if temperature else [])])
    with _plain_generation(model, stop_ids, pad):
        output = cast(Any, model).generate(
            torch.tensor(rows, device=model.device),
            attention_mask=torch.tensor(masks, device=model.device),
            logits_processor=processors,
            max_new_tokens=max(limits),
            do_sample=False,
        )
    answers = output[:, width:].tolist()
    return [_cut(answer[:limit], stop_ids) for answer, limit in zip(answers, limits, strict=True)]


def prompt_seed(seed: int, prompt_id: str) -> int:
    """A seed for one prompt, from the run's seed and the prompt's id."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{prompt_id}".encode()).digest()[:7])


def _cut(answer: list[int], stop_ids: Sequence[int]) -> Generated:
    for place, token in enumerate(answer):
        if token in stop_ids:
            return Generated(answer[: place + 1], "stop")
    return Generated(answer, "length")


def narrowing(temperature: float, top_p: float, top_k: int | None) -> list[LogitsProcessor]:
    """Temperature, then top-k, then top-p, as servers do."""
    narrowed: list[LogitsProcessor] = [TemperatureLogitsWarper(float(temperature))]
    if top_k is not None:
        narrowed.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        narrowed.append(TopPLogitsWarper(top_p))
    return narrowed


def _sampling(temperature: float, seeds: Sequence[int], top_p: float, top_k: int | None) -> list[LogitsProcessor]:
    return [*narrowing(temperature, top_p, top_k), _Drawing(seeds)]


class _Finite(LogitsProcessor):
    """Refuses NaN, of which argmax would make an answer without a word."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if scores.isnan().any():
            fix = "check that the checkpoint is whole; float16 may be too narrow for it (target.dtype)"
            raise problem_error("target", "target.not_finite", "its logits hold NaN", fix)
        return scores


class _Drawing(LogitsProcessor):
    """Adds Gumbel noise, whose argmax is a sample of softmax(logits) (Gumbel 1954)."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        # In float64: its exponential reaches far enough into the tail for a vocabulary of 160k tokens.
        draws = [torch.empty(scores.shape[-1], dtype=torch.float64) for _ in self.generators]
        for draw, generator in zip(draws, self.generators, strict=True):
            draw.exponential_(generator=generator)
        noise = torch.stack(draws).log().to(scores.device, torch.float32)
        return cast(torch.FloatTensor, scores.float() - noise)


@contextmanager
def _plain_generation(model: PreTrainedModel, stop_ids: Sequence[int], pad: int) -> Iterator[None]:
    before = model.generation_config
    model.generation_config = GenerationConfig(eos_token_id=list(stop_ids), pad_token_id=pad)
    try:
        yield
    finally:
        model.generation_config = before
