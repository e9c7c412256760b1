"""Greedy requests at a steady concurrency, counted and timed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eagle3.errors import Eagle3Error
from eagle3.serve.profile.server import Answered, ProfiledServer

Prompt = list[int] | str
_POLL = 0.2
_LEAVING_SECONDS = 5.0


@dataclass(frozen=True)
class Measured:
    """What answers that were not traced say of a cycle.

    Attributes:
        requests, tokens, verifies: of all answers; an answer's first token comes from its prefill and is not counted.
        cycle_ms: time from the first to the last token, over all answers, by verifies. With several at once it holds
            the prefills of others.
    """

    requests: int
    tokens: int
    verifies: int
    cycle_ms: float

    @property
    def acceptance_length(self) -> float:
        return self.tokens / self.verifies


def pooled(answers: Sequence[Answered]) -> Measured | None:
    """None where no answer took a verify."""
    verifies = sum(answer.verifies for answer in answers)
    seconds = sum(answer.last - answer.first for answer in answers)
    tokens = sum(answer.tokens - 1 for answer in answers if answer.verifies)
    if not verifies or seconds <= 0:
        return None
    return Measured(len(answers), tokens, verifies, 1000 * seconds / verifies)


class Load:
    """Keeps `concurrency` answers going until it is left, which breaks them off. A context manager.

    Attributes:
        answers: those that ended.
        error: the first that a request met; no more are sent then.
    """

    def __init__(
        self,
        server: ProfiledServer,
        prompts: Sequence[Prompt],
        concurrency: int,
        max_new_tokens: int,
        requests: int | None = None,
    ) -> None:
        self.answers: list[Answered] = []
        self.error: Eagle3Error | None = None
        self._server = server
        self._prompts = prompts
        self._max_new_tokens = max_new_tokens
        self._left = requests
        self._next = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._going = [threading.Event() for _ in range(concurrency)]
        self._threads = [threading.Thread(target=self._ask, args=(going,), daemon=True) for going in self._going]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self.join(most=_LEAVING_SECONDS)  # a server that hangs holds nobody: the threads end with the process

    def join(self, advance: Callable[[int], object] | None = None, most: float | None = None) -> None:
        """Waits until every answer that was asked for has come, or one failed.

        Args:
            advance: told of each answer that has come.
            most: seconds to wait.
        """
        told, deadline = 0, None if most is None else time.monotonic() + most
        for thread in self._threads:
            while thread.is_alive():
                if deadline is not None and time.monotonic() > deadline:
                    return
                thread.join(_POLL)
                told = self._tell(advance, told)
        self._tell(advance, told)

    def _tell(self, advance: Callable[[int], object] | None, told: int) -> int:
        found = len(self.answers)
        if advance is not None and found > told:
            advance(found - told)
        return found

    def all_going(self, timeout: float) -> bool:
        """Waits until each of the concurrent answers has had a token."""
        return all(going.wait(timeout) for going in self._going)

    def check(self) -> None:
        """
        Raises:
            ProblemsError: a request failed.
        """
        if self.error is not None:
            raise self.error

    def _ask(self, going: threading.Event) -> None:
        while (prompt := self._take()) is not None:
            try:
                answered = self._server.answer(prompt, self._max_new_tokens, going, self._stop)
            except Eagle3Error as error:
                with self._lock:
                    self.error = self.error or error
                self._stop.set()
            else:
                if answered is not None:
                    with self._lock:
                        self.answers.append(answered)
        going.set()

    def _take(self) -> Prompt | None:
        with self._lock:
            if self._stop.is_set() or self._left == 0:
                return None
            if self._left is not None:
                self._left -= 1
            prompt = self._prompts[self._next % len(self._prompts)]
            self._next += 1
            return prompt
