"""What the profile asks of a running SGLang: its arguments, token ids, answers, and its profiler.

Read in SGLang 0.5.16 and 0.5.23: `sglang/srt/entrypoints/http_server.py`, `managers/io_struct.py` (`ProfileReq`),
`managers/scheduler_components/profiler_manager.py`, `managers/tokenizer_manager.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import httpx

from eagle3.errors import Eagle3Error, problem_error
from eagle3.serve.fetch import fetch, json_of

NOT_RUNNING = "not in progress"
_SAID = 200
_FACTS_SECONDS = 30.0
"""For what a server answers at once, whatever it is doing."""
_MOST_DRAFTS = 10_000


@dataclass(frozen=True)
class ServerFacts:
    """What the server says of itself.

    Attributes:
        ranks: processes that write a trace each.
        replicas: of them that answer on their own (data parallel without its attention).
    """

    version: str | None
    model: str | None
    device: str | None
    steps: int
    topk: int
    draft_tokens: int
    ranks: int
    replicas: int
    overlap: bool | None
    cuda_graphs: bool | None


@dataclass(frozen=True)
class Answered:
    """One streamed answer.

    Attributes:
        first, last: when the first and the last of its tokens came, seconds of a monotonic clock.
        tokens: that it has.
        verifies: that it took; its first token comes from the prefill.
    """

    first: float
    last: float
    tokens: int
    verifies: int


class ProfiledServer:
    """A running SGLang; may be used by many threads at once. A context manager.

    Raises:
        ProblemsError: kinds `server.*`, as do the methods: it is not there, refuses, or answers otherwise.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        timeout: float = 300.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._timeout = timeout
        self.url = (url if "://" in url else f"http://{url}").rstrip("/")
        try:
            self._http = httpx.Client(
                base_url=self.url,
                headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
                timeout=timeout,
                limits=httpx.Limits(max_connections=None),
                transport=transport,
            )
        except (httpx.InvalidURL, UnicodeEncodeError) as error:
            message = f"address or API key cannot be sent: {error}"
            raise problem_error(self.url, "server.down", message, "check --server and --api-key") from None

    def __enter__(self) -> ProfiledServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def facts(self) -> ServerFacts:
        """
        Raises:
            ProblemsError: besides, `profile.no_drafter`: it does not speculate with EAGLE.
        """
        status, info = self._json("GET", "/server_info", seconds=_FACTS_SECONDS)
        if status != 200 or not isinstance(info, dict) or "tp_size" not in info:
            message = f"is not an SGLang server: /server_info answers {status}"
            raise problem_error(self.url, "server.not_sglang", message, "give the address of SGLang's HTTP server")
        algorithm = info.get("speculative_algorithm")
        steps, tokens = info.get("speculative_num_steps"), info.get("speculative_num_draft_tokens")
        if not str(algorithm).upper().startswith("EAGLE") or not _is_count(steps) or not _is_count(tokens):
            said = f"speculative_algorithm is {algorithm!r}, steps {steps!r}, draft tokens {tokens!r}"
            message = f"does not speculate with EAGLE-3: {said}"
            fix = "start it with --speculative-algorithm EAGLE3 and a drafter"
            raise problem_error(self.url, "profile.no_drafter", message, fix)
        replicas = 1 if info.get("enable_dp_attention") else _count(info, "dp_size")
        graphs, overlap_off = info.get("disable_cuda_graph"), info.get("disable_overlap_schedule")
        return ServerFacts(
            version=_text(info, "version"),
            model=_text(info, "model_path"),
            device=_text(info, "device"),
            steps=steps,
            topk=_count(info, "speculative_eagle_topk"),
            draft_tokens=tokens,
            ranks=_count(info, "tp_size") * _count(info, "pp_size") * replicas,
            replicas=replicas,
            overlap=None if overlap_off is None else not overlap_off,
            cuda_graphs=None if graphs is None else not graphs,
        )

    def token_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int] | None:
        """The prompt's tokens as the server's chat template gives them; None where it cannot say.

        SGLang 0.5.16 fails at it for some tokenizers and closes the connection, which is therefore not used again.
        """
        body = {"messages": list(messages)}
        status, value = self._json("POST", "/v1/tokenize", body, {"Connection": "close"})
        ids = value.get("tokens") if status == 200 and isinstance(value, dict) else None
        return ids if isinstance(ids, list) and ids and all(type(item) is int for item in ids) else None

    def answer(
        self,
        prompt: list[int] | str,
        max_new_tokens: int,
        first: threading.Event | None = None,
        stop: threading.Event | None = None,
    ) -> Answered | None:
        """Streams one greedy answer; None if it was stopped, which ends it in the server too.

        Args:
            prompt: token ids, or text.
            first: is set when the first token comes.
            stop: ends it.

        Raises:
            ProblemsError: besides, `profile.no_verifies`: it does not say how many verifies an answer took.
        """
        asked = {"input_ids": prompt} if isinstance(prompt, list) else {"text": prompt}
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens}
        body = {**asked, "sampling_params": sampling, "stream": True}
        began = ended = None
        meta: dict[str, Any] = {}
        try:
            with self._http.stream("POST", "/generate", json=body) as reply:
                if reply.status_code != 200:
                    reply.read()
                    raise self._refused("/generate", reply.status_code, json_of(reply.text))
                for line in reply.iter_lines():
                    if stop is not None and stop.is_set():
                        return None
                    part = json_of(line.removeprefix("data: ")) if line.startswith("data: {") else None
                    if not isinstance(part, dict):
                        continue
                    if "error" in part:
                        raise self._refused("/generate", 200, part)
                    ended = time.monotonic()
                    if began is None:
                        began = ended
                        if first is not None:
                            first.set()
                    found = part.get("meta_info")
                    meta = found if isinstance(found, dict) else meta
        except httpx.HTTPError as error:
            raise self._silent(error) from None
        tokens, verifies = meta.get("completion_tokens"), meta.get("spec_verify_ct")
        if began is None or ended is None or type(tokens) is not int or tokens < 1:
            raise problem_error(self.url, "server.no_answer", "ended an answer without a token", "see the server's log")
        if type(verifies) is not int or verifies < 0:
            if tokens > 1:
                message = "does not say how many verifies an answer took (meta_info.spec_verify_ct)"
                raise problem_error(self.url, "profile.no_verifies", message, "see whether it speculates at all")
            verifies = 0
        return Answered(began, ended, tokens, verifies)

    def start_profile(self, request: Mapping[str, Any]) -> None:
        status, said = self._json("POST", "/start_profile", request)
        if status != 200:
            raise self._refused("/start_profile", status, said)

    def stop_profile(self) -> bool:
        """Ends a profile and has it written; False where none was running."""
        status, said = self._json("POST", "/stop_profile")
        if status == 200:
            return True
        if NOT_RUNNING in str(said) or status == 500:  # 0.5.16 and 0.5.23 say why in their log only
            return False
        raise self._refused("/stop_profile", status, said)

    def _json(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        seconds: float | None = None,
    ) -> tuple[int, Any]:
        limit = self._timeout if seconds is None else min(seconds, self._timeout)
        try:
            reply = fetch(self._http, method, path, limit, json=body, headers=headers, timeout=limit)
        except httpx.HTTPError as error:
            raise self._silent(error) from None
        if reply.status_code in (401, 403):
            raise problem_error(self.url, "server.refused", "wants an API key", "give it with --api-key")
        return reply.status_code, json_of(reply.text)

    def _silent(self, error: httpx.HTTPError) -> Eagle3Error:
        down = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.UnsupportedProtocol)
        kind, message = ("server.down", "cannot be reached") if down else ("server.no_answer", "gave no answer")
        fix = "see the server's log, and check the address"
        return problem_error(self.url, kind, f"{message}: {error or type(error).__name__}", fix)

    def _refused(self, path: str, status: int, said: Any) -> Eagle3Error:
        message = f"refused {path} ({status}): {' '.join(str(said).split())[:_SAID]}"
        return problem_error(
            self.url, "server.refused", message, "see the server's log; another profile may be running"
        )


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 < value <= _MOST_DRAFTS


def _count(info: Mapping[str, Any], key: str) -> int:
    value = info.get(key)
    return value if isinstance(value, int) and value > 0 else 1


def _text(info: Mapping[str, Any], key: str) -> str | None:
    value = info.get(key)
    return value if isinstance(value, str) else None
