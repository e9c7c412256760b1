"""One conversation -> token ids and loss mask; or one for each of its answers, where the template rewrites history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from eagle3.data.chat.left_out import answer_left_out, left_out
from eagle3.data.chat.template import SKIP, Applied, ChatTemplate
from eagle3.data.chat.tokenizer import Tokenizer
from eagle3.data.conversations import Conversation
from eagle3.errors import Problem, ProblemsError, problem_error, raise_problems

SplitTurns = Literal["auto", "always", "never"]
_REWRITTEN = "chat.history_rewritten"


@dataclass(frozen=True)
class Rendered:
    """Token ids of a conversation and, for each, whether it is supervised."""

    input_ids: list[int]
    loss_mask: list[bool]


def render_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: list[Any] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    where: str = "prompt",
) -> list[int]:
    """Ids of the messages and the generation prompt: what a server would prefill; see `Renderer.prompt`."""
    return Renderer(tokenizer, template_kwargs).prompt(messages, tools, where)


def render(
    tokenizer: Tokenizer,
    conversation: Conversation,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Rendered:
    """Ids and loss mask of a conversation; see `Renderer.whole`."""
    return Renderer(tokenizer, template_kwargs).whole(conversation)


class Renderer:
    """Renders conversations with one tokenizer, its chat template, and arguments for that.

    What a method raises as `ProblemsError`, besides what it says itself: kinds `chat.no_template`,
    `chat.template_error`, `chat.two_bos`, `chat.control_token` (a text spells one), `chat.left_out` (the template
    leaves a turn, a call or reasoning out).
    """

    def __init__(self, tokenizer: Tokenizer, template_kwargs: Mapping[str, Any] | None = None) -> None:
        self.chat = ChatTemplate(tokenizer, template_kwargs or {})
        self._ready: dict[int, Applied] = {}

    def ahead(self, conversations: Sequence[Conversation]) -> None:
        """Renders and tokenizes these at once, which is faster. What is wrong with one is said when its turn comes."""
        self._ready = {id(item): self._applied(item) for item in conversations}
        texts: dict[bool, list[str]] = {False: [], True: []}
        for item in conversations:
            given = item.messages if item.answer_ids is None else item.messages[:-1]
            with suppress(ProblemsError):
                if found := self._ready[id(item)].to_tokenize(given, item.answer_ids is not None):
                    texts[found[1]].append(found[0])
        self.chat.encoder.ahead(texts)

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None, where: str) -> list[int]:
        """Ids of the messages and the generation prompt: what a server would prefill.

        Raises:
            ProblemsError: kind `chat.empty_prompt`.
        """
        template = Applied(self.chat, tools, where)
        ids = template.ids(messages, add_generation_prompt=True)
        if not ids:
            raise problem_error(where, "chat.empty_prompt", "the chat template renders no token", SKIP)
        raise_problems(self._prompt_problems(template, messages))
        return ids

    def samples(self, conversation: Conversation, split_turns: SplitTurns = "auto") -> list[tuple[str, Rendered]]:
        """What the conversation is trained as, with a name for each: as a whole, or a sample for each of its answers.

        Args:
            split_turns: `auto` splits it where the template rewrites history.

        Raises:
            ProblemsError: as `whole`, or as `answers` if it is split.
        """
        if conversation.answer_ids is not None or (split_turns == "auto" and not _several_answers(conversation)):
            return [(conversation.id, self.whole(conversation))]
        if split_turns != "always":
            try:
                return [(conversation.id, self.whole(conversation))]
            except ProblemsError as error:
                if split_turns == "never" or error.problems[0].kind != _REWRITTEN:
                    raise
        return [(f"{conversation.id}#{turn}", rendered) for turn, rendered in self.answers(conversation)]

    def whole(self, conversation: Conversation) -> Rendered:
        """Ids and loss mask of a conversation.

        With `answer_ids`, the prompt's ids and those, verbatim; only they are supervised. Otherwise every assistant
        turn is, within the template's `{% generation %}` blocks where it has them.

        Raises:
            ProblemsError: kinds `chat.history_rewritten` (a prompt is not how the whole conversation begins),
                `chat.boundary_merged` (it is as text, but not as tokens), `chat.assistant_first`, `chat.answer_ids`
                (they do not spell the answer in this tokenizer).
        """
        template, messages = self._template(conversation), conversation.messages
        if conversation.answer_ids is not None:
            raise_problems(self._prompt_problems(template, messages[:-1]))
            return _verbatim(template, messages, conversation.answer_ids)
        raise_problems(self.chat.marks.problems(messages, conversation.tools, template.where))
        turns = _answer_turns(messages)
        ids, allowed = template.ids_and_blocks(messages)
        mask = [False] * len(ids)
        for turn in turns:
            _supervise(mask, allowed, template, messages, turn, _span(template, messages, turn, ids), ids)
        problems = left_out(template.served(messages), template.text(messages), template.where)
        raise_problems([*problems, *(item for turn in turns for item in _lost(template, messages, turn))])
        return Rendered(ids, mask)

    def answers(self, conversation: Conversation) -> list[tuple[int, Rendered]]:
        """(turn, ids and loss mask) of each answer, with what a server would be sent before it; only it is supervised.

        Raises:
            ProblemsError: as `whole`, for every answer that is not rendered as the continuation of its own prompt.
        """
        template, found, problems = self._template(conversation), [], list[Problem]()
        raise_problems(self.chat.marks.problems(conversation.messages, conversation.tools, template.where))
        for turn in _answer_turns(conversation.messages):
            messages = conversation.messages[: turn + 1]
            try:
                ids, allowed = template.ids_and_blocks(messages)
                span = _span(template, messages, turn, ids)
            except ProblemsError as error:
                problems += error.problems
                continue
            mask = [False] * len(ids)
            _supervise(mask, allowed, template, messages, turn, span, ids)
            problems += left_out(template.served(messages), template.text(messages), template.where) + _lost(
                template, messages, turn
            )
            found.append((turn, Rendered(ids, mask)))
        raise_problems(problems)
        return found

    def _template(self, conversation: Conversation) -> Applied:
        return self._ready.pop(id(conversation), None) or self._applied(conversation)

    def _applied(self, conversation: Conversation) -> Applied:
        return Applied(self.chat, conversation.tools, f"conversation {conversation.id!r}")

    def _prompt_problems(self, template: Applied, messages: Sequence[Mapping[str, Any]]) -> list[Problem]:
        problems = self.chat.marks.problems(messages, template.tools, template.where)
        text = template.text(messages, add_generation_prompt=True) if messages else ""
        return problems + left_out(template.served(messages), text, template.where)


def _answer_turns(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    return [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]


def _several_answers(conversation: Conversation) -> bool:
    return len(_answer_turns(conversation.messages)) > 1


def _supervise(
    mask: list[bool],
    allowed: list[bool],
    template: Applied,
    messages: Sequence[Mapping[str, Any]],
    turn: int,
    span: tuple[int, int],
    ids: list[int],
) -> None:
    """Marks the tokens of the answer in `messages[turn]`, within the template's blocks."""
    start, end = span
    mask[start:end] = allowed[start:end]
    if start == end or mask[end - 1] or ids[end - 1] not in template.chat.special:
        return
    if end - start > 1:  # a block may close before the end-of-turn token
        mask[end - 1] = mask[end - 2]
    else:  # an empty block has no token that says so: one with a text has
        filled = [*messages[:turn], {**messages[turn], "content": "."}, *messages[turn + 1 :]]
        mask[start] = template.ids_and_blocks(filled)[1][start]


def _span(template: Applied, messages: Sequence[Mapping[str, Any]], turn: int, ids: list[int]) -> tuple[int, int]:
    """[start, end) of the answer in `messages[turn]`: after its prompt, up to and with its end-of-turn token."""
    where = f"{template.where} messages[{turn}]"
    if turn == 0:
        raise problem_error(where, "chat.assistant_first", "an answer without a prompt", SKIP)
    prompt = template.ids(messages[:turn], add_generation_prompt=True)
    if ids[: len(prompt)] != prompt:
        if template.text(messages).startswith(template.text(messages[:turn], add_generation_prompt=True)):
            message = "the answer's first characters merge with the prompt's last token"
            raise problem_error(where, "chat.boundary_merged", message, f"give answer_ids, or {SKIP}")
        raise _rewritten(where, "the prompt of this answer")
    until = ids if turn == len(messages) - 1 else template.ids(messages[: turn + 1])
    end = _answer_end(template.chat, until, len(prompt))
    if ids[:end] != until[:end]:
        raise _rewritten(where, "this answer")
    return len(prompt), end


def _answer_end(chat: ChatTemplate, ids: list[int], start: int) -> int:
    """Just after the end-of-turn token: the last special token that only white space follows, else the very end."""
    end = len(ids)
    while end > start and ids[end - 1] not in chat.special and chat.is_blank(ids[end - 1]):
        end -= 1
    return end if end > start and ids[end - 1] in chat.special else len(ids)


def _lost(template: Applied, messages: Sequence[Mapping[str, Any]], turn: int) -> list[Problem]:
    """Calls and reasoning of an answer that its own rendered text lacks."""
    message = messages[turn]
    if message.keys() <= {"role", "content"}:
        return []
    prompt, text = template.text(messages[:turn], add_generation_prompt=True), template.text(messages[: turn + 1])
    return answer_left_out(message, text[len(prompt) :], f"{template.where} messages[{turn}]")


def _rewritten(where: str, what: str) -> ProblemsError:
    message = f"the chat template renders {what} differently once the conversation goes on"
    fix = f"give answer_ids, allow a sample for each answer (data.split_turns=auto), or {SKIP}"
    return problem_error(where, _REWRITTEN, message, fix)


def _verbatim(template: Applied, messages: Sequence[Mapping[str, Any]], answer: list[int]) -> Rendered:
    tokenizer, message = template.chat.tokenizer, messages[-1]
    fix = "use the tokenizer of the model that gave these answers, or remove answer_ids"
    if not 0 <= min(answer) <= max(answer) < len(tokenizer):
        text = f"answer_ids reach {min(answer)} to {max(answer)}, the tokenizer has 0 to {len(tokenizer) - 1}"
        raise problem_error(template.where, "chat.answer_ids", text, fix)
    content = message.get("content")
    spelled = str(tokenizer.decode(answer, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    # reasoning and tool calls are spelled besides the content, in the template's own marks
    if message.keys() == {"role", "content"} and isinstance(content, str) and spelled.strip() != content.strip():
        text = f"answer_ids spell {spelled[:60]!r}, the answer is {content[:60]!r}"
        raise problem_error(template.where, "chat.answer_ids", text, fix)
    prompt = template.ids(messages[:-1], add_generation_prompt=True)
    return Rendered(prompt + answer, [False] * len(prompt) + [True] * len(answer))
