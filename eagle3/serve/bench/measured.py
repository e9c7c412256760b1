"""What one pass over the prompts measured, and its file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eagle3.errors import problem_error
from eagle3.files import read_json_object, write_json_atomic
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
    """The part of `meta_info` that anything is read of."""
    return {name: value for name, value in meta.items() if name in _KEPT or name.startswith("spec_")}


def write_pass(path: Path, item: Pass) -> None:
    """Writes it whole or not at all."""
    write_json_atomic(path, {"format": FORMAT, "format_version": VERSION, **asdict(item)})


def read_pass(path: Path, key: str) -> Pass | None:
    """A pass of an earlier run; None where there is none.

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
    except (KeyError, TypeError, ValueError) as error:
        message = f"is damaged: {type(error).__name__}: {error}"
        raise problem_error(str(path), "bench.output", message, "remove this file; it is measured again") from None
    if found.key != key:
        message = "was measured with other prompts, settings, or a server of other settings"
        raise problem_error(str(path), "bench.output", message, fix)
    return found


def _pass(value: dict[str, Any]) -> Pass:
    requests = tuple(
        Request(**{**item, "at": tuple(item["at"]), "tokens": tuple(item["tokens"]), "ids": _tuple(item["ids"])})
        for item in value.pop("requests")
    )
    failures = tuple(Failure(**item) for item in value.pop("failures"))
    counted = value.pop("counted")
    rounds = None
    if counted is not None:
        lists = {name: _tuple(counted[name]) for name in ("histogram", "reached")}
        rounds = Rounds(**{**counted, **lists})
    return Pass(requests=requests, failures=failures, counted=rounds, **value)


def _tuple(value: list[int] | None) -> tuple[int, ...] | None:
    return None if value is None else tuple(value)


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
