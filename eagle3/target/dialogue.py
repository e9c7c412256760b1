"""A conversation whose answers are made anew, in order: the prompt of each is what a server would be sent for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from eagle3.data.chat import template_digest
from eagle3.data.chat.render import Renderer
from eagle3.data.conversations import Conversation
from eagle3.errors import Problem, ProblemsError
from eagle3.files import digest_json

Turns = Literal["all", "last"]
_FIX = "correct the record, or pass data.skip_bad=true to leave such records out"
_END_OF_REASONING = "</think>"


@dataclass(frozen=True)
class Prompt:
    """A conversation up to the turn that is to be answered.

    Attributes:
        conversation: its messages end before the answer; its id is the answer's.
        input_ids: with the generation prompt.
    """

    conversation: Conversation
    input_ids: list[int]

    @property
    def id(self) -> str:
        return self.conversation.id

    @property
    def digest(self) -> str:
        """`sha256:<hex>` of the ids: what an answer belongs to, wherever its record stands."""
        return digest_json(self.input_ids)


class Dialogue:
    """A conversation, and the next of its turns that is to be answered.

    Args:
        conversation: as it was read.
        turns: `all` answers but those that a tool's result follows, which are kept; or the `last` one.

    Attributes:
        messages: the conversation with the new answers in place.
    """

    def __init__(self, conversation: Conversation, turns: Turns) -> None:
        conversation = _with_places(conversation)
        self.conversation = conversation
        self.messages: list[dict[str, Any]] = list(conversation.messages)
        self._turns = _turns(conversation, turns)
        self._place = 0

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Dialogue:
        """What `to_json` gave."""
        dialogue = object.__new__(cls)
        dialogue.conversation = Conversation(**found["conversation"])
        dialogue.messages = found["messages"]
        dialogue._turns, dialogue._place = found["turns"], found["place"]
        return dialogue

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        conversation = vars(self.conversation)
        return {"conversation": conversation, "messages": self.messages, "turns": self._turns, "place": self._place}

    @property
    def names(self) -> list[str]:
        """Ids of its answers: the conversation's where there is only one, else `ID#TURN`."""
        if len(self._turns) == 1:
            return [self.conversation.id]
        return [f"{self.conversation.id}#{turn}" for turn in self._turns]

    @property
    def left(self) -> list[str]:
        """Ids of the answers that it still lacks, in order."""
        return self.names[self._place :]

    def prompt(self, renderer: Renderer, ahead: int = 0) -> Prompt:
        """The prompt of the next turn.

        Args:
            ahead: of so many turns later, behind the answers that are there now.

        Raises:
            ProblemsError: kinds `chat.*`; it cannot be rendered.
        """
        place = self._place + ahead
        name, before = self.names[place], self.messages[: self._turns[place]]
        asked = Conversation(name, before, self.conversation.tools, source=self.conversation.source)
        return Prompt(asked, renderer.prompt(before, asked.tools, "prompt"))

    def answer(self, text: str) -> None:
        """Puts an answer in the place of the old one, as a client would send it back."""
        turn = self._turns[self._place]
        self.messages[turn : turn + 1] = [{"role": "assistant", "content": text_for_history(text)}]
        self._place += 1


def text_for_history(text: str) -> str:
    """An answer without its reasoning, which servers hand back apart and clients do not send again."""
    _, mark, after = text.rpartition(_END_OF_REASONING)
    return after.lstrip() if mark else text


def make_dialogues(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Iterable[Conversation],
    template_kwargs: Mapping[str, Any] | None = None,
    turns: Turns = "last",
) -> tuple[list[tuple[Dialogue, Prompt]], list[Problem]]:
    """Each conversation with the prompt of its first turn, and what is wrong with those that have none."""
    made: list[tuple[Dialogue, Prompt]] = []
    problems: list[Problem] = []
    for found in each_dialogue(tokenizer, conversations, template_kwargs, turns):
        if isinstance(found, list):
            problems += found
        else:
            made.append(found)
    return made, problems + _repeated(made)


def each_dialogue(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Iterable[Conversation],
    template_kwargs: Mapping[str, Any] | None = None,
    turns: Turns = "last",
) -> Iterator[tuple[Dialogue, Prompt] | list[Problem]]:
    """As `make_dialogues`, one after the other; names that are there twice are not looked for."""
    template_digest(tokenizer)  # no template is one problem, and not one for each conversation
    renderer = Renderer(tokenizer, template_kwargs)
    for conversation in conversations:
        dialogue = Dialogue(conversation, turns)
        if not dialogue.left:
            yield [Problem(conversation.id, "chat.assistant_first", "has an answer but no prompt", _FIX)]
            continue
        if turns == "last" and len(dialogue.messages) > len(conversation.messages):
            message = (
                "is a list of turns, of which only the last one would be answered, behind answers that are not there"
            )
            yield [Problem(conversation.id, "regenerate.turns", message, "pass turns=all")]
            continue
        try:
            yield dialogue, dialogue.prompt(renderer)
        except ProblemsError as error:
            yield [Problem(conversation.id, item.kind, item.message, item.fix) for item in error.problems]


def _repeated(made: Sequence[tuple[Dialogue, Prompt]]) -> list[Problem]:
    owners: dict[str, str] = {}
    problems = []
    for dialogue, _ in made:
        for name in dialogue.names:
            owner = owners.setdefault(name, dialogue.conversation.id)
            if owner != dialogue.conversation.id:
                message = f"an answer of conversation {owner!r} would have its id, {name!r}, too"
                problems.append(Problem(dialogue.conversation.id, "chat.duplicate_id", message, "rename one of them"))
    return problems


def _with_places(conversation: Conversation) -> Conversation:
    """A list of turns with a place for an answer behind each but the last."""
    if not conversation.asks_each:
        return conversation
    messages: list[dict[str, Any]] = []
    for message in conversation.messages:
        messages += [{"role": "assistant", "content": ""}] * bool(messages) + [message]
    return replace(conversation, messages=messages, asks_each=False)


def _turns(conversation: Conversation, turns: Turns) -> list[int]:
    messages = conversation.messages
    last = len(messages) if conversation.prompt_only else len(messages) - 1
    earlier = [
        turn
        for turn in range(1, last)
        if messages[turn]["role"] == "assistant" and messages[turn + 1]["role"] != "tool"
    ]
    return [turn for turn in [*(earlier if turns == "all" else ()), last] if turn > 0]
