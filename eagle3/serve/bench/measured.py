"""What one pass over the prompts measured, and its file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from eagle3.errors import problem_error
from eagle3.files import first_fault, read_json_object, write_json_atomic
from eagle3.serve.bench.rounds import Rounds, SenselessError, rounds_of

FORMAT, VERSION = "eagle3-bench-pass", 1
_KEPT = ("completion_tokens", "cached_tokens", "num_retractions", "dp_rank")


@dataclass(frozen=True)
class Request:
    """One answered request.

    Attributes:
        talk: the conversation's key.
        turn: of it, from 0.
        prompt: digest of the prompt's ids.
        sent: seconds from the pass's start.
        at: seconds from then to each piece of the answer, `tokens` how many it brought.
        ids: of the answer; None where the server gives none.
        meta: what SGLang says of it, as far as anything is read of it.
    """

    talk: str
    set_name: str
    turn: int
    prompt: str
    prompt_tokens: int
    sent: float
    at: tuple[float, ...]
    tokens: tuple[int, ...]
    finish: str
    ids: tuple[int, ...] | None
    text: str
    meta: Mapping[str, Any]

    @property
    def count(self) -> int:
        """Tokens of the answer."""
        return sum(self.tokens)

    @property
    def seconds(self) -> float:
        return self.at[-1]

    def rounds(self, depth: int | None) -> Rounds | None:
        """See `rounds_of`.

        Raises:
            SenselessError: what the server says of it cannot be.
        """
        return rounds_of(self.meta, self.count, self.tokens, depth)


@dataclass(frozen=True)
class Failure:
    """A request without an answer, or a turn that was not asked."""

    talk: str
    turn: int
    reason: str


@dataclass(frozen=True)
class Pass:
    """All prompts once, at one concurrency, to one server.

    Attributes:
        key: which prompts, how asked, of which server: only passes of one key are put together.
        instance: of the server; another one after it was started anew.
        full: seconds from the start for which as many conversations as could be were in flight.
        foreign: requests of others that the server had meanwhile; None where it does not say.
        counted: acceptance of all traffic of the server's meanwhile, from its counters; None where it has none.
        flushed: the prefix cache was emptied before.
        shortened: answers whose limit was cut by the context.
    """

    key: str
    concurrency: int
    number: int
    started: float
    seconds: float
    full: float
    instance: str | None
    requests: tuple[Request, ...]
    failures: tuple[Failure, ...] = ()
    foreign: int | None = None
    counted: Rounds | None = None
    flushed: bool | None = None
    shortened: int = 0

    @property
    def clean(self) -> bool:
        """Nobody else used the server, as far as it says, and every request was answered."""
        return not self.foreign and not self.failures


def kept_meta(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `meta_info` that anything is read of; a number that JSON cannot hold is kept as text."""
    return {name: _writable(value) for name, value in meta.items() if name in _KEPT or name.startswith("spec_")}


def _writable(value: Any) -> Any:
    if isinstance(value, list):
        return [_writable(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def write_pass(path: Path, item: Pass) -> None:
    """Writes it whole or not at all."""
    write_json_atomic(path, {"format": FORMAT, "format_version": VERSION, **asdict(item)})


def read_pass(path: Path, key: str, place: tuple[int, int]) -> Pass | None:
    """A pass of an earlier run; None where there is none.

    Args:
        place: its concurrency and number.

    Raises:
        ProblemsError: kind `bench.output`: it is of other prompts, settings or another server; `file.not_json`.
    """
    if not path.exists():
        return None
    value = read_json_object(path, "a pass of a bench")
    fix = "give another output folder, or remove this one"
    if value.pop("format", None) != FORMAT or value.pop("format_version", None) != VERSION:
        raise problem_error(str(path), "bench.output", "is no pass of a bench", fix)
    try:
        found = _pass(value)
    except ValueError as error:
        message = f"is damaged: {first_fault(error)}"
        raise problem_error(str(path), "bench.output", message, "remove this file; it is measured again") from None
    if (found.concurrency, found.number) != place:
        message = (
            f"is pass {found.number + 1} at concurrency {found.concurrency}, expected {place[1] + 1} at {place[0]}"
        )
        raise problem_error(str(path), "bench.output", message, "remove this file; it is measured again")
    if found.key != key:
        message = "was measured with other prompts, settings, or a server of other settings"
        raise problem_error(str(path), "bench.output", message, fix)
    return found


def _pass(value: dict[str, Any]) -> Pass:
    """
    Raises:
        ValueError: it is none.
    """
    found = _PASS.validate_json(json.dumps(value), strict=True)
    if unknown := sorted(set(value) - set(asdict(found))):
        raise ValueError(f"{unknown[0]} is no part of a pass")
    if found.concurrency < 1:
        raise ValueError("concurrency is below 1")
    for place, item in enumerate(found.requests):
        if len(item.at) != len(item.tokens) or not item.at or min(item.tokens) < 1:
            raise ValueError(f"requests.{place} has {len(item.at)} times for {len(item.tokens)} pieces of its answer")
    return found


_PASS = TypeAdapter(Pass)


@dataclass
class Counted:
    """The rounds of requests, and what of them cannot be read.

    Attributes:
        of: by place in `requests`.
        silent: requests of which the server says nothing, though they have more than one token.
        senseless: what was wrong, by request.
    """

    of: dict[int, Rounds] = field(default_factory=dict)
    silent: int = 0
    senseless: list[str] = field(default_factory=list)


def count_rounds(requests: list[Request], depth: int | None) -> Counted:
    """Reads the rounds of every request."""
    found = Counted()
    for place, item in enumerate(requests):
        try:
            rounds = item.rounds(depth)
        except SenselessError as error:
            found.senseless.append(f"{item.talk}, turn {item.turn}: {error}")
            continue
        if rounds is not None:
            found.of[place] = rounds
        elif item.count > 1:
            found.silent += 1
    return found
