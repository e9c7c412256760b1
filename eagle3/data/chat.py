"""Conversations -> token ids and loss mask, as the server would see and the target would emit them.

The rule for every supervised answer: the ids before it are exactly the ids of its prompt with the generation
prompt, and the supervised ids run from there to the end-of-turn token, that token included.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from eagle3.data.conversations import Conversation
from eagle3.errors import Problem, ProblemsError, problem_error, raise_problems
from eagle3.files import digest_json

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\b")
_SKIP = "leave the conversation out, or pass data.skip_bad=true"


@dataclass(frozen=True)
class Rendered:
    """Token ids of a conversation and, for each, whether it is supervised."""

    input_ids: list[int]
    loss_mask: list[bool]


@dataclass(frozen=True)
class TokenSample:
    """A rendered conversation, cut to the longest length, and where its prompt comes from, if that is known."""

    id: str
    input_ids: list[int]
    loss_mask: list[bool]
    source: str | None = None


@dataclass
class PrepareReport:
    """What became of the conversations. `dropped` counts by reason; tokens are those of the kept samples."""

    total: int = 0
    kept: int = 0
    cut: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        lines = [
            f"{self.kept:,} of {self.total:,} conversations kept: {self.tokens:,} tokens, "
            f"{self.supervised_tokens:,} supervised; {self.cut:,} cut at the longest length"
        ]
        lines += [f"{count:,} of {self.total:,} dropped: {reason}" for reason, count in sorted(self.dropped.items())]
        return "\n".join(lines)


def load_tokenizer(path: str, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The target's tokenizer.

    Raises:
        ProblemsError: it is not there, or needs its own code and `trust_remote_code` is off.
    """
    try:
        return AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    except Exception as error:  # a damaged file makes it raise almost anything, `Exception` itself included
        fix = "check the path; a tokenizer with its own code needs target.trust_remote_code=true (read the code first)"
        message = f"cannot load the tokenizer: {type(error).__name__}: {error}"
        raise problem_error(path, "tokenizer.unreadable", message, fix) from error


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """`sha256:<hex>` of what each id stands for: the vocabulary and the added tokens.

    Merges and normalisation are left out: they choose among ids, they do not change their meaning.
    """
    added = {str(index): [token.content, token.special] for index, token in tokenizer.added_tokens_decoder.items()}
    return digest_json({"vocab": tokenizer.get_vocab(), "added": added})


def template_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """`sha256:<hex>` of the chat template's text."""
    return digest_json(_template_text(tokenizer))


def special_token_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of the tokens added to the vocabulary (end of turn, think and tool marks ...): the draft vocab keeps them."""
    return sorted({*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids})


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: list[Any] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    where: str = "prompt",
) -> list[int]:
    """Ids of the messages and the generation prompt: what a server would prefill.

    Raises:
        ProblemsError: kinds `chat.no_template`, `chat.template_error`, `chat.empty_prompt`.
    """
    ids = _Template(tokenizer, tools, template_kwargs or {}, where).ids(messages, add_generation_prompt=True)
    if not ids:
        raise problem_error(where, "chat.empty_prompt", "the chat template renders no token", _SKIP)
    return ids


def render(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Rendered:
    """Ids and loss mask of a conversation.

    With `answer_ids`, the prompt's ids and those, verbatim; only they are supervised. Otherwise every assistant
    turn is, within the template's `{% generation %}` blocks where it has them.

    Raises:
        ProblemsError: kinds `chat.no_template`, `chat.template_error`, `chat.history_rewritten` (a prompt is not
            how the whole conversation begins), `chat.boundary_merged` (it is as text, but not as tokens),
            `chat.assistant_first`, `chat.answer_ids` (they do not spell the answer in this tokenizer).
    """
    where = f"conversation {conversation.id!r}"
    template = _Template(tokenizer, conversation.tools, template_kwargs or {}, where)
    if conversation.answer_ids is not None:
        return _verbatim(template, conversation.messages, conversation.answer_ids)
    messages = conversation.messages
    ids, allowed = template.ids_and_blocks(messages)
    special = set(special_token_ids(tokenizer))
    mask = [False] * len(ids)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start, end = _span(template, messages, turn, ids, special)
        mask[start:end] = allowed[start:end]
        if end - start > 1 and ids[end - 1] in special:  # a block may close before the end-of-turn token
            mask[end - 1] |= mask[end - 2]
    return Rendered(ids, mask)


def prepare_samples(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Conversation],
    max_length: int,
    skip_bad: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[list[TokenSample], PrepareReport]:
    """Renders and cuts conversations; those left without a supervised token are dropped and counted.

    Args:
        max_length: longest sample, in tokens; the right end is cut off.
        skip_bad: drop and count conversations that cannot be rendered, instead of raising.

    Raises:
        ProblemsError: every conversation that cannot be rendered (unless `skip_bad`); kind
            `chat.nothing_supervised` if no sample is left.
    """
    samples: list[TokenSample] = []
    problems: list[Problem] = []
    report = PrepareReport(total=len(conversations))
    for conversation in conversations:
        try:
            rendered = render(tokenizer, conversation, template_kwargs)
        except ProblemsError as error:
            problems += error.problems
            report.dropped[error.problems[0].kind] += 1
            continue
        ids, mask = rendered.input_ids[:max_length], rendered.loss_mask[:max_length]
        if not any(mask):
            report.dropped["no supervised token"] += 1
            continue
        samples.append(TokenSample(conversation.id, ids, mask, conversation.source))
        report.kept += 1
        report.cut += len(ids) < len(rendered.input_ids)
        report.tokens += len(ids)
        report.supervised_tokens += sum(mask)
    if not skip_bad:
        raise_problems(problems, f"{len(problems)} of {len(conversations)} conversations cannot be rendered")
    if not samples:
        message = f"no sample has a supervised token within {max_length} tokens\n{report}"
        fix = "raise data.max_length; prompts without answers need `eagle3 regenerate` first"
        raise problem_error("conversations", "chat.nothing_supervised", message, fix)
    return samples, report


@dataclass(frozen=True)
class _Template:
    """The tokenizer's chat template with all that is the same for every prefix of a conversation."""

    tokenizer: PreTrainedTokenizerBase
    tools: list[Any] | None
    kwargs: Mapping[str, Any]
    where: str

    def ids(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        return list(self._apply(messages, return_dict=True, **options)["input_ids"])

    def text(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        return str(self._apply(messages, tokenize=False, **options))

    def ids_and_blocks(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[bool]]:
        """Ids, and which of them are in a `{% generation %}` block (all, where the template has none)."""
        if not (self.tokenizer.is_fast and _GENERATION_TAG.search(_template_text(self.tokenizer))):
            ids = self.ids(messages)
            return ids, [True] * len(ids)
        encoded = self._apply(messages, return_dict=True, return_assistant_tokens_mask=True)
        return list(encoded["input_ids"]), [bool(item) for item in encoded["assistant_masks"]]

    def _apply(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        _template_text(self.tokenizer)
        try:
            return self.tokenizer.apply_chat_template(
                [dict(message) for message in messages], tools=self.tools, **options, **self.kwargs
            )
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            message = f"the chat template fails: {error}"
            raise problem_error(self.where, "chat.template_error", message, _SKIP) from error


def _template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    try:
        return tokenizer.get_chat_template()
    except ValueError as error:
        fix = "use an instruct model, or put its chat_template.jinja beside the tokenizer"
        raise problem_error(tokenizer.name_or_path, "chat.no_template", f"no chat template: {error}", fix) from error


def _span(
    template: _Template, messages: list[dict[str, Any]], turn: int, ids: list[int], special: set[int]
) -> tuple[int, int]:
    """[start, end) of the answer in `messages[turn]`: after its prompt, up to and with its end-of-turn token."""
    where = f"{template.where} messages[{turn}]"
    if turn == 0:
        raise problem_error(where, "chat.assistant_first", "an answer without a prompt", _SKIP)
    prompt = template.ids(messages[:turn], add_generation_prompt=True)
    if ids[: len(prompt)] != prompt:
        if template.text(messages).startswith(template.text(messages[:turn], add_generation_prompt=True)):
            message = "the answer's first characters merge with the prompt's last token"
            raise problem_error(where, "chat.boundary_merged", message, f"give answer_ids, or {_SKIP}")
        raise _rewritten(where, "the prompt of this answer")
    until = ids if turn == len(messages) - 1 else template.ids(messages[: turn + 1])
    end = _answer_end(template.tokenizer, until, len(prompt), special)
    if ids[:end] != until[:end]:
        raise _rewritten(where, "this answer")
    return len(prompt), end


def _answer_end(tokenizer: PreTrainedTokenizerBase, ids: list[int], start: int, special: set[int]) -> int:
    """Just after the end-of-turn token: the last special token that only white space follows, else the very end."""
    end = len(ids)
    while end > start and ids[end - 1] not in special and not str(tokenizer.decode([ids[end - 1]])).strip():
        end -= 1
    return end if end > start and ids[end - 1] in special else len(ids)


def _rewritten(where: str, what: str) -> ProblemsError:
    message = f"the chat template renders {what} differently once the conversation goes on"
    fix = f"split it into one conversation for each answer, or {_SKIP}"
    return problem_error(where, "chat.history_rewritten", message, fix)


def _verbatim(template: _Template, messages: list[dict[str, Any]], answer: list[int]) -> Rendered:
    tokenizer, message = template.tokenizer, messages[-1]
    fix = "use the tokenizer of the model that gave these answers, or remove answer_ids"
    if not all(0 <= token < len(tokenizer) for token in answer):
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
