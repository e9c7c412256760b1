"""Conversations from files and data sets of several formats, each record checked and every bad one named."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from eagle3.config import ConversationsConfig
from eagle3.data.drops import Drops
from eagle3.data.formats import Faults, Messages, from_json_text, not_of_json, without_nulls
from eagle3.data.formats.alpaca import read_alpaca, read_prompt, read_turns
from eagle3.data.formats.detect import Claim, choose, family
from eagle3.data.formats.messages import read_messages
from eagle3.data.formats.sharegpt import read_sharegpt
from eagle3.data.record_count import expected_records
from eagle3.data.records import FIX, read_records
from eagle3.errors import Problem, problem_error, raise_problems
from eagle3.files import digest_json

_LAST_NUMBER = re.compile(r"\d+(?=\D*$)")


@dataclass(frozen=True)
class Conversation:
    """One conversation.

    Attributes:
        id: unique in the file; a digest of the content where the record has none.
        messages: as the chat template takes them; keys other than role and content (`tool_calls`, `name`,
            `reasoning_content` ...) are kept untouched.
        tools: descriptions of callable tools, for the template.
        answer_ids: the target's own token ids for the last message, where they are known.
        source: where the prompt comes from, as the record says.
        asks_each: each user turn is to be answered before the next one (a record of `turns`).
    """

    id: str
    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    answer_ids: list[int] | None = None
    source: str | None = None
    asks_each: bool = False

    @property
    def prompt_only(self) -> bool:
        """It ends before an answer."""
        return self.messages[-1]["role"] != "assistant"


def load_conversations(cfg: ConversationsConfig) -> tuple[list[Conversation], Drops]:
    """The conversations of `cfg.path`, and the records that were left out, by reason and source.

    Nothing is left out unless `cfg.skip_bad`.

    Raises:
        ProblemsError: as iterating over `ConversationStream`.
    """
    stream = ConversationStream(cfg)
    return list(stream), stream.dropped


class ConversationStream:
    """The conversations of `cfg.path`, one after the other, to be gone through once, and to the end.

    Of each that went by, a digest of its id and a number are kept, and nothing else.

    Attributes:
        dropped: the records that were left out so far, by reason and source.
        seen: records that went by so far, those left out among them.
    """

    def __init__(self, cfg: ConversationsConfig) -> None:
        self._cfg = cfg
        self.dropped = Drops()
        self.seen = 0

    def share(self) -> float | None:
        """About which share of the records went by; None where their number is not known."""
        expected = expected_records(self._cfg)
        return None if expected is None else self.seen / max(expected, self.seen, 1)

    def __iter__(self) -> Iterator[Conversation]:
        """Where a bad record is an error (without `skip_bad`), no conversation comes after the first one.

        Raises:
            ProblemsError: the file cannot be read; at the end: it holds no conversation, or records of several formats;
                without `skip_bad`, every bad record.
        """
        cfg, formats, places, found_any = self._cfg, _Formats(), _Places(), False
        problems: list[Problem] = []
        for where, record in read_records(cfg):
            self.seen += 1
            found = [record] if isinstance(record, Problem) else _conversation(record, where, cfg.format, formats)
            if isinstance(found, Conversation) and (earlier := places.add(found.id, where)):
                found = [Problem(where, "conversations.duplicate_id", f"id {found.id!r} is that of {earlier} too", FIX)]
            if not isinstance(found, Conversation):
                if not cfg.skip_bad:
                    problems += found
                self.dropped.add(found[0].kind, _source(record))
            elif not problems:
                found_any = True
                yield found
        raise_problems(formats.problems(cfg.path))
        bad = self.dropped.total()
        raise_problems(problems, f"{bad} bad record{'' if bad == 1 else 's'} in {cfg.path}")
        if not found_any:
            held = dict(self.dropped.by_reason()) or ""
            raise problem_error(cfg.path, "conversations.empty", f"holds no conversation {held}", "check it")


class _Places:
    """Where each id was met first; all places of a file differ in their last number alone."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}

    def add(self, name: str, where: str) -> str | None:
        """Notes an id's place; gives the earlier one if there is one."""
        digest = blake2b(name.encode(), digest_size=16).digest()
        match = _LAST_NUMBER.search(where)
        assert match is not None, where
        number = self._numbers.setdefault(digest, int(match[0]))
        return None if number == int(match[0]) else f"{where[: match.start()]}{number}{where[match.end() :]}"


class _Formats:
    """The formats of a file's records: where each was first met, and how often."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[str, Claim]] = {}
        self._counts: Counter[str] = Counter()

    def add(self, claim: Claim, where: str) -> None:
        name = family(claim.format)
        self._places.setdefault(name, (where, claim))
        self._counts[name] += 1

    def problems(self, path: str) -> list[Problem]:
        if len(self._places) < 2:
            return []
        met = [f"{self._counts[name]:,} fit {claim}, first {where}" for name, (where, claim) in self._places.items()]
        fix = "split the file by format; or pass data.format=..., and its other records are bad ones"
        return [Problem(path, "conversations.mixed", f"holds records of several formats: {'; '.join(met)}", fix)]


def _source(record: Any) -> str | None:
    """Where a bad record says that it comes from."""
    source = record.get("source") if isinstance(record, dict) else None
    return source if isinstance(source, str) else None


def _conversation(record: Any, where: str, wanted: str, formats: _Formats) -> Conversation | list[Problem]:
    if isinstance(record, str):
        record = {"prompt": record}
    if not isinstance(record, dict):
        text = f"is a {type(record).__name__}, expected an object, or a prompt as text"
        return [Problem(where, "conversations.record", text, FIX)]
    record = without_nulls(record)
    name = f" (id {record['id']!r})" if isinstance(record.get("id"), str | int) else ""
    claim = choose(record, None if wanted == "auto" else wanted)
    if not isinstance(claim, Claim):
        kind, text = claim
        fix = "say which with data.format=..." if kind == "ambiguous" else FIX
        return [Problem(where, f"conversations.{kind}", f"{text}{name}", fix)]
    formats.add(claim, where)
    if claim.format == "turns":  # as MT-bench's files name them
        given = {"id": record.get("question_id"), "source": record.get("category")}
        record = {**without_nulls(given), **record}
    faults: Faults = []
    messages = _messages(record, claim, faults)
    tools, answer_ids = from_json_text(record.get("tools")), from_json_text(record.get("answer_ids"))
    if tools is not None and not isinstance(tools, list):
        faults.append(("tools", f"tools are {type(tools).__name__}, expected a list"))
    elif foreign := not_of_json(tools):
        faults.append(("tools", f"tools have a value of type {foreign}, which JSON has not"))
    faults += _answer_faults(answer_ids, messages)
    try:
        identity = record.get("id", digest_json({"messages": messages, "tools": tools}))
        f"{identity}{record.get('source')}".encode()
    except UnicodeEncodeError:
        faults.append(("content", "has text that is not Unicode: half of a surrogate pair"))
        identity = "?"
    except TypeError:  # a value that JSON has not, which is among the faults
        identity = "?"
    if not isinstance(identity, str | int) or identity == "":
        faults.append(("id", f"its id is {identity!r}, expected a text or a number"))
    if faults:
        return [Problem(where, f"conversations.{kind}", f"{text}{name}", FIX) for kind, text in faults]
    source = record.get("source")
    known = None if source is None else str(source)
    return Conversation(str(identity), messages, tools, answer_ids, known, asks_each=claim.format == "turns")


def _messages(record: dict[str, Any], claim: Claim, faults: Faults) -> Messages:
    if claim.format == "sharegpt":
        return read_sharegpt(record, claim.column, faults)
    if claim.format == "alpaca":
        return read_alpaca(record, faults)
    if claim.format == "turns":
        return read_turns(record["turns"], faults)
    if claim.format == "prompts":
        return read_prompt(record["prompt"], faults)
    return read_messages(record[claim.column], faults)


def _answer_faults(answer_ids: Any, messages: Messages) -> Faults:
    if answer_ids is None:
        return []
    if not isinstance(answer_ids, list) or not answer_ids or any(type(item) is not int for item in answer_ids):
        return [("answer_ids", "answer_ids are not a list of token ids")]
    if messages and messages[-1].get("role") != "assistant":
        return [("answer_ids", "has answer_ids, but its last message is not the assistant's")]
    return []
