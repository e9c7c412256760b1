"""`eagle3 regenerate`: answers to prompts from the target itself, which is what a drafter will be asked to draft.

Finished answers are on disk at once (`answer_file.py`); a run that was killed goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eagle3.config import RegenerateConfig
from eagle3.data.chat import load_tokenizer, template_digest
from eagle3.data.chat.render import Renderer
from eagle3.data.conversations import Conversation, load_conversations
from eagle3.errors import Problem, ProblemsError, problem_error, raise_problems
from eagle3.files import refuse_url
from eagle3.progress import progress
from eagle3.target.answer_file import AnswerFile
from eagle3.target.engines.transformers import load_model
from eagle3.target.generate import Generated, eos_ids, generate, prompt_seed
from eagle3.target.identity import conversations_digest, target_identity
from eagle3.target.resolve import TargetFiles, find_target

_FIX = "correct the record, or pass data.skip_bad=true to leave such records out"


@dataclass(frozen=True)
class Prompt:
    """A conversation up to the turn that is to be answered.

    Attributes:
        conversation: its messages end before the answer.
        input_ids: with the generation prompt.
    """

    conversation: Conversation
    input_ids: list[int]

    @property
    def id(self) -> str:
        return self.conversation.id


@dataclass(frozen=True)
class RegenerateReport:
    """What is in the output.

    Attributes:
        output: the file.
        answers: its lines, one an answer.
        generated: how many of them this run made.
        tokens: of all answers.
        stopped: answers that ended by themselves; the others were cut at the limit.
        too_long: prompts left out because they have more than `data.max_length` tokens.
        skipped: records left out as bad (`data.skip_bad`), by reason.
    """

    output: str
    answers: int
    generated: int
    tokens: int
    stopped: int
    too_long: int
    skipped: Mapping[str, int]

    def render(self) -> str:
        lines = [
            f"{self.output}: {self.answers:,} answers, {self.tokens:,} tokens; {self.generated:,} made by this run",
            f"{self.stopped:,} ended by themselves, {self.answers - self.stopped:,} were cut at the limit",
        ]
        if self.too_long or self.skipped:
            count, reasons = sum(self.skipped.values()), sorted(self.skipped.items())
            why = f" ({', '.join(f'{number:,} {reason}' for reason, number in reasons)})" if reasons else ""
            lines.append(f"left out: {self.too_long:,} prompts that are too long, {count:,} bad records{why}")
        return "\n".join(lines)


def run_regenerate(cfg: RegenerateConfig) -> RegenerateReport:
    """Answers every prompt of `cfg.data` and writes `cfg.output`.

    Each line holds `id`, `source`, `messages` (the answer last), `tools` if any, `finish` (`stop` or `length`) and
    `answer_ids`. Killed and started again, it answers what is missing.

    Raises:
        ProblemsError: the target, the prompts or the output cannot be used, or an earlier run had other settings
            (each is listed).
    """
    refuse_url(cfg.output, "the answers", "write to a local file")
    files = find_target(cfg.target)
    tokenizer = load_tokenizer(str(files.folder), trust_remote_code=cfg.target.trust_remote_code)
    conversations, dropped = load_conversations(cfg.data)
    prompts, problems = make_prompts(tokenizer, conversations, cfg.data.chat_template_kwargs)
    if not cfg.data.skip_bad:
        raise_problems(problems, f"{len(conversations) - len(prompts)} prompts cannot be rendered")
    for reason in {item.where: item.kind for item in reversed(problems)}.values():  # the first of each prompt's
        dropped.add(reason, None)
    longest = min(cfg.data.max_length, files.facts.context_length - 1)
    fitting = [prompt for prompt in prompts if len(prompt.input_ids) <= longest]
    if not fitting:
        message = f"every prompt has more than {longest} tokens"
        raise problem_error(cfg.data.path, "regenerate.too_long", message, "raise data.max_length")
    settings = _settings(cfg, files, tokenizer, conversations)
    with AnswerFile(Path(cfg.output), settings) as output:
        missing = len(fitting) - len(output.lines)
        if missing:
            model = load_model(files, cfg.target)
            _answer_all(cfg, model, tokenizer, fitting, files.facts.context_length, output)
        lines = output.finish([prompt.id for prompt in fitting])
    return RegenerateReport(
        output=cfg.output,
        answers=len(lines),
        generated=missing,
        tokens=sum(len(line["answer_ids"]) for line in lines),
        stopped=sum(line["finish"] == "stop" for line in lines),
        too_long=len(prompts) - len(fitting),
        skipped=dropped.by_reason(),
    )


def make_prompts(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Conversation],
    template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[list[Prompt], list[Problem]]:
    """The prompt of each conversation's last turn (an answer that is already there is dropped), and what is wrong
    with those that have none.
    """
    template_digest(tokenizer)  # no template is one problem, and not one for each conversation
    renderer = Renderer(tokenizer, template_kwargs)
    prompts: list[Prompt] = []
    problems: list[Problem] = []
    for conversation in conversations:
        messages = conversation.messages if conversation.prompt_only else conversation.messages[:-1]
        if not messages:
            problems.append(Problem(conversation.id, "chat.assistant_first", "has an answer but no prompt", _FIX))
            continue
        asked = Conversation(conversation.id, messages, conversation.tools, source=conversation.source)
        try:
            prompts.append(Prompt(asked, renderer.prompt(messages, asked.tools, "prompt")))
        except ProblemsError as error:
            problems += (Problem(conversation.id, item.kind, item.message, item.fix) for item in error.problems)
    return prompts, problems


def iter_answers(
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    batch_size: int,
    context_length: int,
    temperature: float = 0.0,
    seed: int = 0,
    done: frozenset[str] = frozenset(),
) -> Iterator[list[tuple[Prompt, Generated]]]:
    """Answers in batches of prompts of similar length.

    Which prompts share a batch does not depend on `done`, so a resumed run repeats an uninterrupted one; a batch is
    run if any of its prompts is not done, and only those that are not are returned.

    Args:
        prompts: each shorter than `context_length`.
        max_new_tokens: longest answer, in tokens; shorter where the context ends.
        batch_size: prompts a batch.
        context_length: of the target, in tokens.
        temperature, seed: see `generate`.
        done: ids of prompts that have their answer already.
    """
    stop_ids = eos_ids(model)
    order = sorted(range(len(prompts)), key=lambda index: (len(prompts[index].input_ids), index))
    for begin in range(0, len(order), batch_size):
        batch = [prompts[index] for index in order[begin : begin + batch_size]]
        if all(prompt.id in done for prompt in batch):
            continue
        rows = [prompt.input_ids for prompt in batch]
        limits = [min(max_new_tokens, context_length - len(row)) for row in rows]
        seeds = [prompt_seed(seed, prompt.id) for prompt in batch]
        answers = generate(model, rows, limits, stop_ids, temperature, seeds)
        yield [pair for pair in zip(batch, answers, strict=True) if pair[0].id not in done]


def answer_line(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, answer: Generated) -> dict[str, Any]:
    """One line of the output, as `eagle3.data.conversations` reads it."""
    conversation = prompt.conversation
    text = tokenizer.decode(answer.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    line = {
        "id": prompt.id,
        "source": conversation.source,
        "messages": [*conversation.messages, {"role": "assistant", "content": text}],
        "finish": answer.finish,
        "answer_ids": answer.ids,
    }
    return line if conversation.tools is None else {**line, "tools": conversation.tools}


def _answer_all(
    cfg: RegenerateConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    context_length: int,
    output: AnswerFile,
) -> None:
    done = frozenset(output.lines)
    batches = iter_answers(
        model,
        prompts,
        max_new_tokens=cfg.max_new_tokens,
        batch_size=cfg.batch_size,
        context_length=context_length,
        temperature=cfg.temperature,
        seed=cfg.seed,
        done=done,
    )
    tokens = 0
    with progress("regenerate", len(prompts) - len(done), "answers") as advance:
        for answers in batches:
            output.append([answer_line(tokenizer, prompt, answer) for prompt, answer in answers])
            tokens += sum(len(answer.ids) for _, answer in answers)
            advance(len(answers), f"{tokens:,} tokens")


def _settings(
    cfg: RegenerateConfig,
    files: TargetFiles,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Conversation],
) -> dict[str, Any]:
    return {
        "target": target_identity(files, tokenizer, cfg.target),
        "conversations": conversations_digest(conversations),
        "max_length": cfg.data.max_length,
        "chat_template_kwargs": cfg.data.chat_template_kwargs,
        "max_new_tokens": cfg.max_new_tokens,
        "temperature": cfg.temperature,
        "seed": cfg.seed if cfg.temperature else None,
    }
