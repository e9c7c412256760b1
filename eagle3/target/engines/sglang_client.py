"""Talks to a running SGLang over HTTP: what it says of itself, and the hidden states of given tokens.

Read in SGLang 0.5.8 to 0.5.23: `sglang/srt/entrypoints/http_server.py`, `sglang/srt/managers/tokenizer_manager.py`.

Legend: T tokens of a request, W values a token.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx
import numpy as np
import torch
from pydantic_core import from_json

from eagle3.errors import Eagle3Error, ProblemsError, problem_error
from eagle3.wiring.version import Version

START = "start the server, wait until it is ready, and check the address"
ENABLE = "start it with --enable-return-hidden-states"
FIRST_WITH_OWN_ROWS = "0.5.17"
_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
_OVERLOADED = (429, 502, 503, 504)


@dataclass(frozen=True)
class Answer:
    """What a server answered to one request.

    Attributes:
        states: [rows, W] in float32, which holds every value of a 16-bit type exactly.
        cached_tokens: how many of the tokens its prefix cache had, as it says.
        meta_info: the rest of SGLang's `meta_info`.
    """

    states: torch.Tensor
    cached_tokens: int | None
    meta_info: Mapping[str, Any]


class SglangClient:
    """One server; may be used by many threads at once. A context manager.

    Args:
        url: e.g. `http://localhost:30000`.
        api_key: sent as a bearer token.
        api_key_hint: how a user gives one.
        timeout: seconds to wait for an answer.
        attempts: times that a request is sent while the connection fails or the server is overloaded.
        connections: that are open at once.
        transport: instead of the network.

    Raises:
        ProblemsError: kinds `server.*`, as do the methods: it is not there, not SGLang, or refuses.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        api_key_hint: str = "give it with --api-key",
        timeout: float = 120.0,
        attempts: int = 1,
        connections: int = 1,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url = url if "://" in url else f"http://{url}"
        self.attempts = attempts
        self._api_key_hint = api_key_hint
        self._closed = threading.Event()
        self._parsing = threading.Lock()
        try:
            self._http = httpx.Client(
                base_url=self.url,
                headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
                timeout=timeout,
                limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
                transport=transport,
            )
        except httpx.InvalidURL as error:
            raise problem_error(self.url, "server.down", f"is no address: {error}", START) from None
        except UnicodeEncodeError:
            message = "cannot be sent this API key: it holds other than ASCII letters"
            raise problem_error(self.url, "server.refused", message, api_key_hint) from None
        if not self._http.base_url.host:
            raise problem_error(self.url, "server.down", "is no address: it names no host", START)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        self._http.close()

    def model_info(self) -> dict[str, Any]:
        """What it serves; every SGLang since 0.5.8 says so at `/model_info`, `model_path` at least."""
        answer = self._send("GET", "/model_info")
        info = _json(answer)
        if answer.status_code != 200 or "model_path" not in info:
            message = f"is not an SGLang server: /model_info answers {answer.status_code}"
            raise problem_error(self.url, "server.not_sglang", message, "give the address of SGLang's HTTP server")
        return info

    def server_info(self) -> dict[str, Any]:
        """Its arguments as it resolved them, `version` among them."""
        return _json(self._send("GET", "/server_info"))

    def hidden_states(self, token_ids: Sequence[int], vocab_size: int | None = None, **options: Any) -> Answer:
        """The states of these tokens; one token is generated, since SGLang gives no answer without.

        Args:
            token_ids: T of them.
            vocab_size: that the server must have at least. SGLang checks the ids of a bias, not those of a prompt: an
                id beyond its vocabulary would end the server.
            options: further keys of the request.

        Raises:
            ProblemsError: besides the above, `server.hidden_states_off`, `server.no_states`, `server.vocabulary`.
        """
        sampling: dict[str, Any] = {"max_new_tokens": 1, "temperature": 0}
        if vocab_size is not None:
            sampling["logit_bias"] = {str(vocab_size - 1): 0.0}
        request = {"input_ids": list(token_ids), "sampling_params": sampling, "return_hidden_states": True, **options}
        answer = self._send("POST", "/generate", request)
        with self._parsing:  # one at a time: as Python numbers, states take many times their bytes
            body = _json(answer)
            if answer.status_code != 200:
                raise self._refusal(answer, body, vocab_size)
            meta = body.get("meta_info")
            if not isinstance(meta, dict):
                raise problem_error(self.url, "server.no_states", "answers without meta_info", ENABLE)
            states = self._states(meta.pop("hidden_states", None))
        cached = meta.get("cached_tokens")
        return Answer(states, cached if isinstance(cached, int) else None, meta)

    def _states(self, returned: Any) -> torch.Tensor:
        """The prefill's rows, which come first; a request ends before there are others."""
        if not returned:
            raise problem_error(self.url, "server.no_states", "answers without hidden states", ENABLE)
        try:
            with np.errstate(over="ignore"):
                rows = np.asarray(returned[0], dtype=np.float32)  # much faster than torch.tensor
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            message = f"answers with hidden states of another form: {error}"
            raise problem_error(self.url, "server.no_states", message, "report the server's version") from None
        if not rows.size:
            raise problem_error(self.url, "server.no_states", "answers with no state of any token", ENABLE)
        return torch.from_numpy(rows.reshape(-1, rows.shape[-1]) if rows.ndim else rows.reshape(1, 1))

    def _send(self, method: str, path: str, request: Mapping[str, Any] | None = None) -> httpx.Response:
        """Sends until there is an answer; each time under a prefix cache of its own, since the states of tokens that
        the server finds in its cache are not returned."""
        for attempt in range(self.attempts):
            last = attempt + 1 == self.attempts
            body = None if request is None else {**request, "extra_key": f"eagle3-{uuid.uuid4()}"}
            try:
                answer = self._http.request(method, path, json=body)
            except httpx.TransportError as error:
                if last or isinstance(error, httpx.UnsupportedProtocol):
                    raise self._silent(error) from None
            else:
                if answer.status_code in (401, 403):
                    raise problem_error(self.url, "server.refused", "wants an API key", self._api_key_hint)
                if last or answer.status_code not in _OVERLOADED:
                    return answer
            if self._closed.wait(min(_PAUSE * 2**attempt, _LONGEST_PAUSE)):
                raise problem_error(self.url, "server.no_answer", "was no longer asked", START)
        raise AssertionError("attempts is at least 1")

    def _silent(self, error: httpx.TransportError) -> Eagle3Error:
        times = f" ({self.attempts} attempts)" if self.attempts > 1 else ""
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.UnsupportedProtocol):
            return problem_error(self.url, "server.down", f"cannot be reached{times}: {error}", START)
        message = f"gave no answer{times}: {error or type(error).__name__}"
        fix = "see the server's log: it may have ended, or be overloaded"
        return problem_error(self.url, "server.no_answer", message, fix)

    def _refusal(self, answer: httpx.Response, body: dict[str, Any], vocab_size: int | None) -> Eagle3Error:
        error = body.get("error", body)
        said = str(error.get("message", error) if isinstance(error, dict) else error) or answer.text[:200]
        if "hidden" in said and ("configured" in said or "mode" in said):
            return problem_error(self.url, "server.hidden_states_off", "does not return hidden states", ENABLE)
        if "logit_bias" in said:
            message = f"serves another vocabulary: this target's has {vocab_size} tokens; it said: {said}"
            fix = "serve the target of this dataset or config, with the same weights"
            return problem_error(self.url, "server.vocabulary", message, fix)
        message = f"refused the request ({answer.status_code}): {said}"
        return problem_error(self.url, "server.refused", message, "see the server's log")


def rows_missing(url: str, answer: Answer, tokens: int) -> Eagle3Error:
    """What to say of an answer that has not one row a token: SGLang returns no states of tokens that came from its
    prefix cache, nor of any but the last chunk of a prompt that it prefilled in chunks."""
    cached = "?" if answer.cached_tokens is None else answer.cached_tokens
    message = f"returned states of {len(answer.states)} of {tokens} tokens; {cached} came from its prefix cache"
    fix = "start it with --disable-radix-cache and --chunked-prefill-size -1"
    return problem_error(url, "server.prefix_cache", message, fix)


def mixes_up_rows(version: str | None) -> bool:
    """Whether this version's answers may hold another request's rows, in the right number: it counts them off by whole
    prompts that return states, whatever else was prefilled with them (`_append_prefill_hidden_states`)."""
    try:
        return version is not None and Version(version) < Version(FIRST_WITH_OWN_ROWS)
    except ProblemsError:  # a build that is no release
        return False


def _json(answer: httpx.Response) -> dict[str, Any]:
    try:
        value = from_json(answer.content)  # faster than the standard library on megabytes of numbers
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
