"""A regeneration at work: which answers are there, which prompt comes next, what failed, what was spent."""

from __future__ import annotations

import json
from array import array
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
from eagle3.target.answer_file import AnswerFile, Line, answer_tokens
from eagle3.target.dialogue import Prompt
from eagle3.target.dialogue_file import DialogueFile
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
        dialogues: those that are asked, and others.
        longest: most tokens of a prompt.
        chosen: of each answer (`DialogueFile.answers`) 1 + its place in the output, those of earlier runs included; 0
            if it is not there.
        prompts: numbers of prompts by turn (first, second ...) and dialogue, as far as they are known.
        waiting: of them, those without an answer.
        too_long, after_cut: turns that are not asked: their prompt is too long, or an earlier answer was cut off.
        interrupted: the run was asked to stop.
    """

    cfg: RegenerateConfig
    tokenizer: PreTrainedTokenizerBase
    output: AnswerFile
    dialogues: DialogueFile
    longest: int
    context_length: int
    chosen: array[int] = field(default_factory=lambda: array("Q"))
    prompts: dict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    waiting: dict[int, int] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    too_long: int = 0
    after_cut: int = 0
    spent: Spent = field(default_factory=Spent)
    interrupted: bool = False

    def __post_init__(self) -> None:
        self.renderer = Renderer(self.tokenizer, self.cfg.data.chat_template_kwargs)
        self.chosen = array("Q", bytes(8 * self.dialogues.answer_count))
        for index in self.dialogues.asked():
            self._next(index, self.dialogues.first_prompt(index))

    @property
    def missing(self) -> int:
        """Answers to be made, later turns of the waiting conversations included."""
        return sum(map(self.left, self.waiting))

    def left(self, index: int) -> int:
        """Answers that a dialogue lacks."""
        return sum(not self.chosen[number] for number in self.dialogues.answers(index))

    def prompt(self, index: int) -> Prompt | None:
        """The prompt of a dialogue that waits for its answer."""
        return self.dialogues.prompt(self.waiting[index]) if index in self.waiting else None

    def limit(self, prompt_tokens: int) -> int:
        """Most tokens of the answer to a prompt of so many."""
        return min(self.cfg.max_new_tokens, self.context_length - prompt_tokens)

    def line(self, prompt: Prompt, answer: Generated) -> Line:
        """A line of the output, of an answer whose tokens are known."""
        text = self.tokenizer.decode(answer.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return answer_line(prompt, str(text), answer.finish, answer_ids=answer.ids)

    def took(self, index: int, line: Line) -> None:
        """Takes a new answer of a dialogue; `waiting` has its next prompt then, if there is one."""
        self.spent.answers += 1
        self.spent.prompt_tokens += self.dialogues.prompt_tokens(self.waiting[index])
        self.spent.answer_tokens += answer_tokens(line)
        prompt = self._accept(index, line)
        if prompt is not None:
            self._next(index, self.dialogues.put_prompt(prompt))

    def failed(self, index: int, reason: str) -> None:
        """Gives up the prompt that waits, and with it the later turns."""
        del self.waiting[index]
        name, *later = self.dialogues[index].left
        self.failures.append(Failure(name, reason))
        self.failures += [Failure(item, f"comes after {name}, which failed") for item in later]

    def cost(self, spent: Spent) -> float | None:
        """In the prices' currency; None without prices."""
        price = self.cfg.server.price_per_million_tokens if self.cfg.server else None
        if price is None:
            return None
        return (spent.prompt_tokens * price.input + spent.answer_tokens * price.output) / 1e6

    def places(self) -> Sequence[int]:
        """Where the answers of the output are, in the order of the conversations."""
        marks, stopped = self.cfg.cut_off == "mark", self.output.stopped
        return array("Q", (place - 1 for place in self.chosen if place and (marks or stopped(place - 1))))

    def write_failures(self) -> Path:
        """Lists what failed beside the output; without failures there is no list."""
        path = self.output.path.with_name(f"{self.output.path.name}.failed.jsonl")
        if self.failures:
            rows = [json.dumps({"id": item.id, "reason": item.reason}, ensure_ascii=False) for item in self.failures]
            write_text_atomic(path, "\n".join(rows) + "\n")
        else:
            path.unlink(missing_ok=True)
        return path

    def _next(self, index: int, number: int) -> None:
        """Goes on with the answers that are there, up to a prompt that has none."""
        while True:
            self.prompts[len(self.dialogues.answers(index)) - self.left(index)][index] = number
            prompt = self.dialogues.prompt(number)
            line = self.output.find(prompt.id, prompt.digest)
            if line is None:
                self.waiting[index] = number
                return
            following = self._accept(index, line)
            if following is None:
                return
            number = self.dialogues.put_prompt(following)

    def _accept(self, index: int, line: Line) -> Prompt | None:
        """Puts an answer in its place; returns the prompt of the next turn, if it is to be asked."""
        self.waiting.pop(index, None)
        numbers = self.dialogues.answers(index)
        self.chosen[numbers[-self.left(index)]] = 1 + self.output.expect(line)
        if not (left := self.left(index)):
            return None
        dialogue = self.dialogues[index]
        if line["finish"] == "length":
            self.after_cut += left
            return None
        dialogue.answer(line["messages"][-1]["content"])
        self.dialogues[index] = dialogue
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
