"""A target that is already served: its states come from a running SGLang, one request a sample, many in flight.

Legend: T tokens of a sample, A aux layers, H target hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from eagle3.errors import problem_error
from eagle3.target.capture import Capture
from eagle3.target.engines.sglang_client import Answer, SglangClient, rows_missing


class SglangEngine:
    """Captures what the server captures; whether those are the right layers is checked elsewhere.

    Args:
        client: of the server that gives the aux states, and with `sglang_hook.py` the last hidden states too.
        hidden_size: H.
        num_aux: A.
        dtype: that states are returned in.
        start: how to start a server that gives all that is needed, for errors.
        last_states: of a server that gives the last hidden states, if the first does not.
        concurrency: requests in flight.
    """

    def __init__(
        self,
        client: SglangClient,
        hidden_size: int,
        num_aux: int,
        dtype: torch.dtype,
        start: str,
        last_states: SglangClient | None = None,
        concurrency: int = 1,
    ) -> None:
        self.client = client
        self._hidden_size = hidden_size
        self._num_aux = num_aux
        self._dtype = dtype
        self._start = start
        self._last_states = last_states
        self._concurrency = concurrency

    def capture(self, batch: Sequence[Sequence[int]]) -> list[Capture]:
        """See `CaptureEngine`.

        Raises:
            ProblemsError: kinds `server.*`.
        """
        return list(self.stream(batch))

    def stream(self, batch: Sequence[Sequence[int]]) -> Iterator[Capture]:
        """The captures of a batch in its order, each as soon as it and those before it are there."""
        pool = ThreadPoolExecutor(self._concurrency, "sglang")
        try:
            for answer in [pool.submit(self._capture, tokens) for tokens in batch]:
                yield answer.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def split(self, answer: Answer, tokens: Sequence[int], vocab_size: int | None = None) -> Capture:
        """The aux states and the last hidden states, in the server's values, of an answer for these tokens.

        `vocab_size` is for a second server, see `SglangClient.hidden_states`.

        Raises:
            ProblemsError: kinds `server.prefix_cache`, `server.width`, `server.last_states`.
        """
        url, hidden, aux_width = self.client.url, self._hidden_size, self._num_aux * self._hidden_size
        self._check_rows(self.client, answer, tokens)
        width = answer.states.shape[1]
        if width == aux_width + hidden:
            return Capture(answer.states[:, :aux_width], answer.states[:, aux_width:])
        if width != aux_width:
            message = f"returned {width} values a token, expected {self._num_aux} layers of {hidden}, or one more"
            raise problem_error(url, "server.width", message, self._start)
        if self._last_states is None:
            message = "returned the aux states, but not the last hidden states beside them"
            fix = (
                f"{self._start}; if it has that hook already, add --cuda-graph-backend-prefill disabled; or name a "
                "second server with server.last_states_url"
            )
            raise problem_error(url, "server.last_states", message, fix)
        last = self._last_states.hidden_states(tokens, vocab_size)
        self._check_rows(self._last_states, last, tokens)
        if last.states.shape[1] != hidden:
            message = f"returned {last.states.shape[1]} values a token, expected the last hidden states, {hidden}"
            fix = "start it with --enable-return-hidden-states, without a speculative algorithm"
            raise problem_error(self._last_states.url, "server.last_states", message, fix)
        return Capture(answer.states, last.states)

    def _capture(self, tokens: Sequence[int]) -> Capture:
        capture = self.split(self.client.hidden_states(tokens), tokens)
        return Capture(capture.aux_hidden_states.to(self._dtype), capture.last_hidden_states.to(self._dtype))

    @staticmethod
    def _check_rows(client: SglangClient, answer: Answer, tokens: Sequence[int]) -> None:
        if len(answer.states) != len(tokens):
            raise rows_missing(client.url, answer, len(tokens))
