"""A regeneration at work: which answers are there, which prompt comes next, what failed, what was spent."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from eagle3.config import RegenerateConfig
from eagle3.data.chat.render import Renderer
from eagle3.errors import ProblemsError
from eagle3.files import write_text_atomic
from eagle3.target.answer_file import AnswerFile, Line
from eagle3.target.dialogue import Dialogue, Prompt
from eagle3.target.generate import Generated


@dataclass
class Spent:
    """Tokens that this run sent and got.

    Attributes:
        answers: how many.
    """

    answers: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0


@dataclass(frozen=True)
class Failure:
    """A prompt without an answer."""

    id: str
    reason: str


@dataclass
class Session:
    """What a run has and what it lacks.

    Attributes:
        longest: most tokens of a prompt.
        dialogues: each with the prompt of its first turn, which is not too long.
        chosen: answers by id, those of earlier runs included.
        prompts: by turn (first, second ...) and dialogue, as far as they are known.
        waiting: of them, those without an answer.
        too_long, after_cut: turns that are not asked: their prompt is too long, or an earlier answer was cut off.
        interrupted: the run was asked to stop.
    """

    cfg: RegenerateConfig
    tokenizer: PreTrainedTokenizerBase
    output: AnswerFile
    dialogues: Sequence[tuple[Dialogue, Prompt]]
    longest: int
    context_length: int
    chosen: dict[str, Line] = field(default_factory=dict)
    prompts: dict[int, dict[int, Prompt]] = field(default_factory=lambda: defaultdict(dict))
    waiting: dict[int, Prompt] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    too_long: int = 0
    after_cut: int = 0
    spent: Spent = field(default_factory=Spent)
    interrupted: bool = False

    def __post_init__(self) -> None:
        self.renderer = Renderer(self.tokenizer, self.cfg.data.chat_template_kwargs)
        for index, (_, prompt) in enumerate(self.dialogues):
            self._next(index, prompt)

    @property
    def missing(self) -> int:
        """Answers to be made, later turns of the waiting conversations included."""
        return sum(len(self.dialogues[index][0].left) for index in self.waiting)

    def limit(self, prompt: Prompt) -> int:
        """Most tokens of its answer."""
        return min(self.cfg.max_new_tokens, self.context_length - len(prompt.input_ids))

    def line(self, prompt: Prompt, answer: Generated) -> Line:
        """A line of the output, of an answer whose tokens are known."""
        text = self.tokenizer.decode(answer.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return answer_line(prompt, str(text), answer.finish, answer_ids=answer.ids)

    def took(self, index: int, line: Line) -> None:
        """Takes a new answer of a dialogue; `waiting` has its next prompt then, if there is one."""
        self.spent.answers += 1
        self.spent.prompt_tokens += len(self.waiting[index].input_ids)
        self.spent.answer_tokens += answer_tokens(line)
        prompt = self._accept(index, line)
        if prompt is not None:
            self._next(index, prompt)

    def failed(self, index: int, reason: str) -> None:
        """Gives up the prompt that waits, and with it the later turns."""
        del self.waiting[index]
        name, *later = self.dialogues[index][0].left
        self.failures.append(Failure(name, reason))
        self.failures += [Failure(item, f"comes after {name}, which failed") for item in later]

    def cost(self, spent: Spent) -> float | None:
        """In the prices' currency; None without prices."""
        price = self.cfg.server.price_per_million_tokens if self.cfg.server else None
        if price is None:
            return None
        return (spent.prompt_tokens * price.input + spent.answer_tokens * price.output) / 1e6

    def lines(self) -> list[Line]:
        """The answers of the output, in the order of the conversations."""
        names = (name for dialogue, _ in self.dialogues for name in dialogue.names)
        lines = [self.chosen[name] for name in names if name in self.chosen]
        return [line for line in lines if self.cfg.cut_off == "mark" or line["finish"] == "stop"]

    def write_failures(self) -> Path:
        """Lists what failed beside the output; without failures there is no list."""
        path = self.output.path.with_name(f"{self.output.path.name}.failed.jsonl")
        if self.failures:
            rows = [json.dumps({"id": item.id, "reason": item.reason}, ensure_ascii=False) for item in self.failures]
            write_text_atomic(path, "\n".join(rows) + "\n")
        else:
            path.unlink(missing_ok=True)
        return path

    def _next(self, index: int, prompt: Prompt) -> None:
        """Goes on with the answers that are there, up to a prompt that has none."""
        dialogue = self.dialogues[index][0]
        after: Prompt | None = prompt
        while after is not None:
            self.prompts[len(dialogue.names) - len(dialogue.left)][index] = after
            line = self.output.find(after.id, after.digest)
            if line is None:
                self.waiting[index] = after
                return
            after = self._accept(index, line)

    def _accept(self, index: int, line: Line) -> Prompt | None:
        """Puts an answer in its place; returns the prompt of the next turn, if it is to be asked."""
        dialogue = self.dialogues[index][0]
        self.waiting.pop(index, None)
        self.chosen[line["id"]] = line
        if line["finish"] == "length":
            self.after_cut += len(dialogue.left) - 1
            return None
        dialogue.answer(line["messages"][-1]["content"])
        if not dialogue.left:
            return None
        try:
            prompt = dialogue.prompt(self.renderer)
        except ProblemsError as error:
            reason = "; ".join(f"{item.kind}: {item.message}" for item in error.problems)
            self.failures += [Failure(name, f"cannot be asked: {reason}") for name in dialogue.left]
            return None
        if len(prompt.input_ids) > self.longest:
            self.too_long += len(dialogue.left)
            return None
        return prompt


def answer_line(prompt: Prompt, text: str, finish: Literal["stop", "length"], **tokens: Any) -> Line:
    """One line of the output, as `eagle3.data.conversations` reads it.

    Args:
        tokens: `answer_ids`, or `answer_tokens`, their number, where a server does not give them.
    """
    conversation = prompt.conversation
    line = {
        "id": prompt.id,
        "source": conversation.source,
        "messages": [*conversation.messages, {"role": "assistant", "content": text}],
        "finish": finish,
        "prompt_digest": prompt.digest,
        **tokens,
    }
    return line if conversation.tools is None else {**line, "tools": conversation.tools}


def answer_tokens(line: Line) -> int:
    """How many tokens an answer has."""
    return len(line["answer_ids"]) if "answer_ids" in line else int(line.get("answer_tokens", 0))
