"""Finds out how a server is asked, and whether it serves the target."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from eagle3.config import TargetConfig
from eagle3.errors import Problem
from eagle3.target.answer_servers.api import APIS, ApiName, Asked, Sampling
from eagle3.target.answer_servers.server import FaultyError, RefusedError, Server, said
from eagle3.target.resolve import TargetFiles

_PROBE = "Zwei plus 2 = vier; def f(x): return x\n  naïve 東京 🙂"
_MESSAGES = ({"role": "user", "content": "Hi"},)
_ANOTHER = "give the address of a server of the target that target.path names, or that target's path"
_TOKENS = 4
_CLOSING_SECONDS = 0.2
"""A server that failed closes its connection: until that is known here, another request might be sent into it."""


@dataclass(frozen=True)
class Wanted:
    """What a server should serve.

    Attributes:
        names: under which a server may know it.
        chat_ids: what the target's template makes of the probe's messages.
    """

    files: TargetFiles
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    names: frozenset[str]
    chat_ids: list[int]


def names_of(target: TargetConfig, files: TargetFiles) -> frozenset[str]:
    """Last parts of the target's path, folder and name."""
    return frozenset(_last(item) for item in (target.path, str(files.folder), target.contract_name))


async def identify(server: Server, wanted: Wanted) -> str:
    """Sets `server.api`, `server.model` and `server.known`, or `server.wrong` if it does not serve the target.

    Returns:
        What was found, for people.

    Raises:
        UnavailableError, FaultyError, LockedOutError: as `Server.fetch`.
    """
    forced = server.cfg.api
    info = None
    if forced in ("auto", "sglang"):
        status, info = await server.fetch("GET", "/model_info")
        if status != 200 or not isinstance(info, dict) or "model_path" not in info:
            info = None
            if forced == "sglang":
                return _refuse(server, "server.not_sglang", f"is no SGLang: /model_info answers {status}", _ANOTHER)
    if info is not None:
        found = await _identify_sglang(server, wanted, info)
    else:
        found = await _identify_openai(server, wanted)
    server.known = not server.wrong
    return found


async def _identify_sglang(server: Server, wanted: Wanted, info: Mapping[str, Any]) -> str:
    served, expected = info.get("model_type"), wanted.files.config.get("model_type")
    path = str(info["model_path"])
    if served is not None and served != expected:
        message = f"serves {path}, a {served}; target.path is a {expected}"
        return _refuse(server, "server.other_target", message, _ANOTHER)
    names = [path, str(info.get("served_model_name") or path)]
    if not _known(server, wanted, names):
        return _refuse_name(server, names[0])
    same = await _same_tokens(server, wanted, None)
    if same is False:
        return _refuse_tokenizer(server)
    # SGLang checks the ids of a bias, not those of a prompt: one beyond its vocabulary would end the server.
    last = wanted.sampling.vocab_size - 1
    params = {"max_new_tokens": 1, "temperature": 0.0, "logit_bias": {str(last): 0.0}}
    status, value = await server.fetch("POST", "/generate", {"input_ids": wanted.chat_ids, "sampling_params": params})
    if status != 200:
        if "logit_bias" not in said(value):
            return _refuse(server, "server.refused", f"refuses a request ({status}): {said(value)}", "see its log")
        message = f"serves another vocabulary: this target's has {last + 1} tokens; it said: {said(value)}"
        return _refuse(server, "server.vocabulary", message, _ANOTHER)
    server.api, server.model = APIS["sglang"], names[1]
    unknown = "" if same is not None else "; it does not say what tokens it makes of a text"
    return f"{server.url}: SGLang, {path}; asked with token ids, answers with token ids{unknown}"


async def _identify_openai(server: Server, wanted: Wanted) -> str:
    status, value = await server.fetch("GET", "/v1/models")
    models = value.get("data") if status == 200 and isinstance(value, dict) else None
    if not isinstance(models, list) or not all(isinstance(item, dict) and "id" in item for item in models):
        message = f"has neither SGLang's /model_info nor /v1/models, which answers {status}"
        return _refuse(
            server, "server.not_openai", message, "give the address of SGLang, vLLM or the like, without /v1"
        )
    listed = {str(item["id"]): str(item.get("root") or item["id"]) for item in models}
    name = server.cfg.model or (next(iter(listed)) if len(listed) == 1 else None)
    if name is None or name not in listed:
        message = f"serves {', '.join(sorted(listed)) or 'nothing'}; server.model is {server.cfg.model or 'not given'}"
        return _refuse(server, "server.model", message, "name one of them with server.model")
    if not _known(server, wanted, [name, listed[name]]):
        return _refuse_name(server, name)
    server.model = name
    if await _same_tokens(server, wanted, name) is False:
        return _refuse_tokenizer(server)
    apis: tuple[ApiName, ...] = ("completions", "chat") if server.cfg.api == "auto" else (server.cfg.api,)
    asked = Asked(wanted.chat_ids, _MESSAGES, None, _TOKENS, 0)
    refusals = []
    for api in apis:
        server.api = APIS[api]
        try:
            reply = await server.ask(asked, wanted.sampling)
        except RefusedError as error:
            refusals.append(str(error))
            continue
        sent = "messages, from which it makes as many tokens as the target's template" if api == "chat" else "token ids"
        gives = "text only: answers are tokenized again" if reply.ids is None else "token ids"
        return f"{server.url}: {name} at {APIS[api].path}; asked with {sent}, answers with {gives}"
    return _refuse(server, "server.refused", "; ".join(refusals), "see its log")


async def _same_tokens(server: Server, wanted: Wanted, model: str | None) -> bool | None:
    """Whether it makes the same tokens of a text; None where it does not say.

    SGLang 0.5.16 answers 500 to `/tokenize` for a tokenizer without a longest length, which Transformers makes 1e30:
    too large for its JSON (`sglang/srt/entrypoints/openai/serving_tokenize.py`; 0.5.23 has mended it).
    """
    body = {"prompt": _PROBE, "add_special_tokens": False, **({} if model is None else {"model": model})}
    try:
        status, value = await server.fetch("POST", "/tokenize", body)
    except FaultyError:
        await asyncio.sleep(_CLOSING_SECONDS)
        return None
    if status != 200 or not isinstance(value, dict) or not isinstance(value.get("tokens"), list):
        return None
    expected = wanted.tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
    return bool(value["tokens"] == expected)


def _known(server: Server, wanted: Wanted, names: list[str]) -> bool:
    return server.cfg.model in names or any(_last(name) in wanted.names for name in names)


def _last(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1].casefold()


def _refuse(server: Server, kind: str, message: str, fix: str) -> str:
    server.wrong = [Problem(server.url, kind, message, fix)]
    return f"{server.url}: {message}"


def _refuse_name(server: Server, name: str) -> str:
    fix = f"{_ANOTHER}; if it is the same model under another name, say so with server.model={name}"
    return _refuse(server, "server.other_target", f"serves {name}, which is not called as the target is", fix)


def _refuse_tokenizer(server: Server) -> str:
    message = "makes other tokens of a text than the target's tokenizer"
    return _refuse(server, "server.other_tokenizer", message, _ANOTHER)
