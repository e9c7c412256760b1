"""The three ways in which servers are asked for an answer: request bodies, and what is read of the replies. No I/O.

Read in SGLang 0.5.23: `managers/io_struct.py` and `managers/tokenizer_manager.py` (`/generate`: `output_ids` hold the
end token; `sampling_params.sampling_seed` is heeded with `--enable-deterministic-inference` only), and
`entrypoints/openai/protocol.py` (`return_token_ids` in both OpenAI routes; a choice of completions has `token_ids`
then, one of chat `response_token_ids`). vLLM has `return_token_ids` since 0.10.2 (its pull request 22587), with
`token_ids` in each choice of both; a server that does not know it gives text only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

ApiName = Literal["sglang", "completions", "chat"]


@dataclass(frozen=True)
class Sampling:
    """What is the same in every request.

    Attributes:
        stop_ids: end-of-text tokens.
        vocab_size: of the target; ids from there on are no tokens.
    """

    temperature: float
    top_p: float
    top_k: int | None
    stop_ids: tuple[int, ...]
    vocab_size: int
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Asked:
    """One answer that is wanted.

    Attributes:
        limit: most tokens of it.
        seed: of its sampling.
    """

    input_ids: Sequence[int]
    messages: Sequence[Mapping[str, Any]]
    tools: list[Any] | None
    limit: int
    seed: int


@dataclass(frozen=True)
class Reply:
    """An answer.

    Attributes:
        ids: its tokens, the end token included; None from a server that gives none.
        text: as the server spells it.
        tokens: how many it has.
    """

    ids: list[int] | None
    text: str
    finish: Literal["stop", "length"]
    tokens: int


class FaultyReplyError(ValueError):
    """A reply that cannot be an answer; the server may give a better one."""


class OtherPromptError(ValueError):
    """The server made other tokens of the messages than the target's template does here."""


@dataclass(frozen=True)
class Api:
    """Where and how a server is asked.

    Attributes:
        path: below the server's address.
        body: of the request, given the model's name.
        read: the answer in the JSON value of a reply.
    """

    name: ApiName
    path: str
    body: Callable[[Asked, Sampling, str | None], dict[str, Any]]
    read: Callable[[Any, Asked, Sampling], Reply]


def _sglang_body(asked: Asked, sampling: Sampling, model: str | None) -> dict[str, Any]:
    params = {
        "max_new_tokens": asked.limit,
        "stop_token_ids": list(sampling.stop_ids),
        "repetition_penalty": 1.0,
        "skip_special_tokens": True,
        **_sampling(sampling, asked, "sampling_seed"),
    }
    return {"input_ids": list(asked.input_ids), "sampling_params": params}


def _openai_body(asked: Asked, sampling: Sampling, model: str | None) -> dict[str, Any]:
    return {
        "model": model,
        "max_tokens": asked.limit,
        "stop_token_ids": list(sampling.stop_ids),
        "repetition_penalty": 1.0,
        "return_token_ids": True,
        **_sampling(sampling, asked, "seed"),
    }


def _completions_body(asked: Asked, sampling: Sampling, model: str | None) -> dict[str, Any]:
    return {**_openai_body(asked, sampling, model), "prompt": list(asked.input_ids)}


def _chat_body(asked: Asked, sampling: Sampling, model: str | None) -> dict[str, Any]:
    body = {**_openai_body(asked, sampling, model), "messages": list(asked.messages)}
    if asked.tools is not None:
        body["tools"] = asked.tools
    if sampling.template_kwargs:
        body["chat_template_kwargs"] = dict(sampling.template_kwargs)
    return body


def _sampling(sampling: Sampling, asked: Asked, seed_key: str) -> dict[str, Any]:
    """All of it is said: else a server would take the checkpoint's own defaults."""
    if not sampling.temperature:
        return {"temperature": 0.0}
    top_k = -1 if sampling.top_k is None else sampling.top_k
    return {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": top_k, seed_key: asked.seed}


def _read_sglang(value: Any, asked: Asked, sampling: Sampling) -> Reply:
    meta = _part(value, "meta_info", dict)
    finish = _part(meta, "finish_reason", dict)
    count = meta.get("prompt_tokens")
    if type(count) is int and count != len(asked.input_ids):
        raise FaultyReplyError(f"counts {count} prompt tokens, {len(asked.input_ids)} were sent")
    text = value.get("text", "")
    return _reply(_part(value, "output_ids", list), str(text), finish.get("type"), None, asked, sampling)


def _read_completions(value: Any, asked: Asked, sampling: Sampling) -> Reply:
    choice = _choice(value)
    text = _part(choice, "text", str)
    usage = _usage(value)
    sent = usage.get("prompt_tokens")
    if type(sent) is int and sent != len(asked.input_ids):
        raise FaultyReplyError(f"counts {sent} prompt tokens, {len(asked.input_ids)} were sent")
    return _reply(choice.get("token_ids"), text, choice.get("finish_reason"), usage, asked, sampling)


def _read_chat(value: Any, asked: Asked, sampling: Sampling) -> Reply:
    choice, usage = _choice(value), _usage(value)
    rendered = value.get("prompt_token_ids", choice.get("prompt_token_ids"))
    if rendered is not None and rendered != list(asked.input_ids):
        raise OtherPromptError("renders the messages to other tokens than the target's template does here")
    count = usage.get("prompt_tokens")
    if rendered is None and count != len(asked.input_ids):
        message = f"makes {count} prompt tokens of the messages, the target's template makes {len(asked.input_ids)}"
        raise OtherPromptError(message)
    message = _part(choice, "message", dict)
    ids, finish = choice.get("token_ids", choice.get("response_token_ids")), choice.get("finish_reason")
    taken_out = [key for key in ("tool_calls", "reasoning_content", "reasoning") if message.get(key)]
    if ids is None and taken_out:
        raise FaultyReplyError(f"has {taken_out[0]} that its parser took out of the text, and no token ids")
    if finish == "tool_calls" and ids is not None:
        finish = "stop"
    return _reply(ids, message.get("content") or "", finish, usage, asked, sampling)


def _reply(
    ids: Any, text: str, finish: Any, usage: Mapping[str, Any] | None, asked: Asked, sampling: Sampling
) -> Reply:
    if finish not in ("stop", "length"):
        raise FaultyReplyError(f"ended for the reason {str(finish)[:60]!r}, expected stop or length")
    if ids is None:
        count = (usage or {}).get("completion_tokens")
        if type(count) is not int or count < 1 or not text:
            raise FaultyReplyError("is empty")
        return Reply(None, text, finish, count)
    if not isinstance(ids, list) or not ids:
        raise FaultyReplyError("is empty" if ids == [] else f"has token ids that are a {type(ids).__name__}")
    if wrong := [item for item in ids if type(item) is not int or not 0 <= item < sampling.vocab_size]:
        raise FaultyReplyError(f"has the token id {str(wrong[0])[:40]}, the target has 0 to {sampling.vocab_size - 1}")
    if len(ids) > asked.limit:
        raise FaultyReplyError(f"has {len(ids)} tokens, {asked.limit} were allowed")
    if finish == "stop" and ids[-1] not in sampling.stop_ids:
        raise FaultyReplyError(f"stopped at token {ids[-1]}, which is no end token of the target")
    return Reply(ids, text, finish, len(ids))


def _choice(value: Any) -> dict[str, Any]:
    choices = _part(value, "choices", list)
    if len(choices) != 1 or not isinstance(choices[0], dict):
        raise FaultyReplyError(f"has {len(choices)} choices, expected 1")
    return choices[0]


def _usage(value: Any) -> dict[str, Any]:
    usage = value.get("usage")
    return usage if isinstance(usage, dict) else {}


def _part(value: Any, key: str, kind: type) -> Any:
    if not isinstance(value, dict):
        raise FaultyReplyError(f"is a {type(value).__name__}, expected an object")
    part = value.get(key)
    if not isinstance(part, kind):
        raise FaultyReplyError(f"has {key} {str(part)[:60]!r}, expected {kind.__name__}")
    return part


APIS: dict[ApiName, Api] = {
    "sglang": Api("sglang", "/generate", _sglang_body, _read_sglang),
    "completions": Api("completions", "/v1/completions", _completions_body, _read_completions),
    "chat": Api("chat", "/v1/chat/completions", _chat_body, _read_chat),
}
