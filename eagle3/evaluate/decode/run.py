"""`eagle3 decode`: sets of prompts answered by speculative decoding, with resume, and what was accepted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from transformers import PreTrainedTokenizerBase

from eagle3.config import DecodeConfig
from eagle3.data.chat import load_tokenizer, template_digest, tokenizer_digest
from eagle3.data.chat.render import Renderer
from eagle3.errors import Problem, ProblemsError, raise_problems
from eagle3.evaluate.decode.compare import Deviation
from eagle3.evaluate.decode.given import GivenDrafter, find_drafter
from eagle3.evaluate.decode.prompts import PromptSet, read_sets, reasons
from eagle3.evaluate.decode.report import DecodeReport
from eagle3.evaluate.decode.result import Answer, make_set
from eagle3.evaluate.decode.worker import Asked, Worker, lacks_own, read_line
from eagle3.evaluate.walks import ratio
from eagle3.files import refuse_url
from eagle3.progress import progress
from eagle3.target.answer_file import AnswerFile, Line
from eagle3.target.dialogue import Dialogue, Prompt
from eagle3.target.generate import folder_eos_ids
from eagle3.target.identity import target_identity
from eagle3.target.resolve import TargetFiles, find_target, pick_device

_T = TypeVar("_T")


class _Answers(Protocol):
    """Where answers are kept."""

    def find(self, name: str, digest: str) -> Line | None: ...

    def append(self, lines: Sequence[Line]) -> None: ...

    def finish(self, lines: Sequence[Line]) -> None: ...


class _Nowhere:
    """Without an output nothing is kept."""

    def find(self, name: str, digest: str) -> Line | None:
        return None

    def append(self, lines: Sequence[Line]) -> None: ...

    def finish(self, lines: Sequence[Line]) -> None: ...


@dataclass
class _Session:
    """A run at work; the target is loaded when the first answer is missing."""

    cfg: DecodeConfig
    answers: _Answers
    renderer: Renderer
    make_worker: Callable[[], Worker]
    context_length: int
    longest: int
    lines: list[Line] = field(default_factory=list)
    figures: dict[str, list[Answer]] = field(default_factory=dict)
    deviations: list[Deviation] = field(default_factory=list)
    compared: int = 0
    decoded: int = 0
    worker: Worker | None = None

    def run(self, sets: Sequence[PromptSet]) -> None:
        for prompts in sets:
            self.figures[prompts.name] = []
        with progress("decode", sum(prompts.answers for prompts in sets), "answers") as advance:
            for prompts in sets:
                for dialogue, first in prompts.dialogues:
                    self._converse(prompts, dialogue, first, advance)
        self.answers.finish(self.lines)

    def _converse(self, prompts: PromptSet, dialogue: Dialogue, first: Prompt, advance: Callable[..., None]) -> None:
        """Answers a conversation's turns in order, each behind the new answers before it."""
        prompt: Prompt | None = first
        while prompt is not None:
            limit = min(self.cfg.max_new_tokens, self.context_length - len(prompt.input_ids))
            asked = Asked(prompts.name, prompt.id.removeprefix(prompts.prefix), prompt, limit)
            line = self._line(asked)
            answer, deviation, compared = read_line(line, dialogue.conversation.id)
            self.lines.append(line)
            self.figures[prompts.name].append(answer)
            self.compared += compared
            self.deviations += [] if deviation is None else [deviation]
            advance(1, self._note())
            dialogue.answer(line["messages"][-1]["content"])
            prompt = self._next(prompts, dialogue)

    def _next(self, prompts: PromptSet, dialogue: Dialogue) -> Prompt | None:
        if not dialogue.left:
            return None
        try:
            prompt = dialogue.prompt(self.renderer)
        except ProblemsError as error:  # an answer that the template refuses as history
            prompts.skipped.update({item.kind: len(dialogue.left) for item in error.problems[:1]})
            return None
        if len(prompt.input_ids) <= self.longest:
            return prompt
        prompts.too_long += len(dialogue.left)
        return None

    def _line(self, asked: Asked) -> Line:
        line = self.answers.find(asked.prompt.id, asked.prompt.digest)
        if line is not None:
            read_line(line, asked.name)
            if not lacks_own(self.cfg, line):
                return line
        if self.worker is None:
            self.worker = self.make_worker()
            self.worker.warm_up(asked)
        self.decoded += line is None
        line = self.worker.answer(asked) if line is None else self.worker.compare(asked, line)
        self.answers.append([line])
        return line

    def _note(self) -> str:
        answers = [item for items in self.figures.values() for item in items]
        length = ratio(sum(item.tokens - 1 for item in answers), sum(len(item.accepted) for item in answers))
        return f"acceptance length {length:.2f}, {sum(item.tokens for item in answers):,} tokens"


def run_decode(cfg: DecodeConfig) -> DecodeReport:
    """Answers every turn of every set, one prompt at a time.

    An answer that is on disk is not made again; it belongs to its prompt, wherever that stands in the sets.

    Raises:
        ProblemsError: the drafter does not fit the target, the prompts, the target or the output cannot be used, or the
            output was begun with other settings: all that is wrong, before any weights are loaded.
    """
    if cfg.output is not None:
        refuse_url(cfg.output, "the answers", "write to a local file")
    files = find_target(cfg.target, weights=False)
    tokenizer = load_tokenizer(str(files.folder), trust_remote_code=cfg.target.trust_remote_code)
    longest = min(cfg.data.max_length, files.facts.context_length - 1)
    device = pick_device(cfg.target.device)
    problems: list[Problem] = []
    stop_ids = _attempt(problems, lambda: folder_eos_ids(files))
    identity = {"tokenizer": tokenizer_digest(tokenizer), "chat_template": template_digest(tokenizer)}
    given = _attempt(problems, lambda: find_drafter(cfg, files, identity))
    sets = _attempt(problems, lambda: read_sets(cfg, tokenizer, longest))
    raise_problems(problems)
    assert stop_ids is not None and given is not None and sets is not None
    found, drafter, stops = find_target(cfg.target), given, stop_ids
    with _kept(cfg, found, drafter, tokenizer, sets) as answers:
        session = _Session(
            cfg,
            answers,
            Renderer(tokenizer, cfg.data.chat_template_kwargs),
            lambda: Worker(cfg, found, drafter, tokenizer, stops),
            files.facts.context_length,
            longest,
        )
        session.run(sets)
    return _report(session, found, str(device), sets)


def _attempt(problems: list[Problem], call: Callable[[], _T]) -> _T | None:
    """The value, or None after adding what was raised."""
    try:
        return call()
    except ProblemsError as error:
        problems += error.problems
        return None


@contextmanager
def _kept(
    cfg: DecodeConfig,
    files: TargetFiles,
    drafter: GivenDrafter,
    tokenizer: PreTrainedTokenizerBase,
    sets: Sequence[PromptSet],
) -> Iterator[_Answers]:
    if cfg.output is None:
        yield _Nowhere()
        return
    names = {name for prompts in sets for dialogue, _ in prompts.dialogues for name in dialogue.names}
    with AnswerFile(Path(cfg.output), _settings(cfg, files, drafter, tokenizer), names) as output:
        yield output


def _settings(
    cfg: DecodeConfig, files: TargetFiles, drafter: GivenDrafter, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """What an answer and its rounds depend on, besides the prompt."""
    return {
        "command": "decode",
        "target": target_identity(files, tokenizer, cfg.target),
        "drafter": {"weights": drafter.digest, "output_indices": list(drafter.output_indices)},
        "max_length": cfg.data.max_length,
        "chat_template_kwargs": cfg.data.chat_template_kwargs,
        "max_new_tokens": cfg.max_new_tokens,
        **_drafting(cfg),
        "sampling": _sampling(cfg),
    }


def _drafting(cfg: DecodeConfig) -> dict[str, Any]:
    return {"steps": cfg.steps, "topk": cfg.topk, "draft_tokens": cfg.verified, "drafts": cfg.kind}


def _sampling(cfg: DecodeConfig) -> dict[str, Any] | None:
    if not cfg.temperature:
        return None
    return {"temperature": cfg.temperature, "top_p": cfg.top_p, "top_k": cfg.top_k, "seed": cfg.seed}


def _report(session: _Session, files: TargetFiles, device: str, sets: Sequence[PromptSet]) -> DecodeReport:
    cfg, drafted = session.cfg, session.cfg.verified - 1
    left_out = {}
    for prompts in sets:
        words = [*reasons(prompts.skipped)]
        if prompts.too_long:
            words.append(f"{prompts.too_long:,} turns whose prompt has more than {session.longest:,} tokens")
        if words:
            left_out[prompts.name] = words
    everything = [item for items in session.figures.values() for item in items]
    return DecodeReport(
        checkpoint=cfg.checkpoint,
        target=files.facts.name,
        dtype=cfg.target.dtype,
        device=device,
        drafting=_drafting(cfg),
        sampling=_sampling(cfg),
        sets={name: make_set(items, cfg.steps, drafted, cfg.seed) for name, items in session.figures.items()},
        total=make_set(everything, cfg.steps, drafted, cfg.seed),
        compared=session.compared,
        deviations=session.deviations,
        left_out=left_out,
        output=cfg.output,
        decoded=session.decoded,
    )
