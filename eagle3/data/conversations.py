"""Conversations from JSONL or Parquet files, each record checked and every bad one named."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.config import ConversationsConfig
from eagle3.errors import Problem, problem_error, raise_problems
from eagle3.files import digest_json

ROLES = ("system", "developer", "user", "assistant", "tool")
_FIX = "correct the record, or pass data.skip_bad=true to leave such records out"


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
    """

    id: str
    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    answer_ids: list[int] | None = None
    source: str | None = None

    @property
    def prompt_only(self) -> bool:
        """It ends before an answer."""
        return self.messages[-1]["role"] != "assistant"


def load_conversations(cfg: ConversationsConfig) -> tuple[list[Conversation], Counter[str]]:
    """The file's conversations, and how many records were left out for each kind of problem.

    Nothing is left out unless `cfg.skip_bad`.

    Raises:
        ProblemsError: the file cannot be read; it holds no conversation; without `skip_bad`, every bad record.
    """
    conversations: list[Conversation] = []
    problems: list[Problem] = []
    dropped: Counter[str] = Counter()
    places: dict[str, str] = {}
    for where, record in _records(cfg):
        found = record if isinstance(record, Problem) else _conversation(record, where)
        if isinstance(found, Conversation) and found.id in places:
            message = f"id {found.id!r} is that of {places[found.id]} too"
            found = Problem(where, "conversations.duplicate_id", message, _FIX)
        if isinstance(found, Problem):
            problems.append(found)
            dropped[found.kind] += 1
        else:
            places[found.id] = where
            conversations.append(found)
    if not cfg.skip_bad:
        raise_problems(problems, f"{len(problems)} bad records in {cfg.path}")
    if not conversations:
        raise problem_error(cfg.path, "conversations.empty", f"holds no conversation {dict(dropped) or ''}", "check it")
    return conversations, dropped


def _records(cfg: ConversationsConfig) -> Iterator[tuple[str, Any]]:
    """(place, parsed record or what is wrong with it) of each line or row."""
    path = Path(cfg.path)
    kinds = {".jsonl": "text", ".parquet": "parquet"}
    if path.suffix not in kinds:
        message = f"has the ending {path.suffix!r}, expected one of {', '.join(kinds)}"
        raise problem_error(cfg.path, "conversations.file_type", message, "convert the file")
    if not path.is_file():
        raise problem_error(cfg.path, "file.missing", "no such file (conversations)", "check data.path")
    if not path.stat().st_size:
        raise problem_error(cfg.path, "conversations.empty", "is an empty file", "check data.path")
    numbered = (
        (number, row) for number, row in enumerate(_rows(path, kinds[path.suffix]), start=1) if row.get("text") != ""
    )
    for count, (number, row) in enumerate(numbered):
        if count == cfg.limit:
            return
        if path.suffix == ".parquet":
            yield f"{path}:row {number}", row
        else:
            yield _parsed(row["text"], f"{path}:{number}")


def _rows(path: Path, kind: str) -> Iterator[dict[str, Any]]:
    """The file's rows as they come; no cache is kept."""
    import datasets  # half a second

    try:
        with tempfile.TemporaryDirectory() as cache:  # for its lock file
            # JSONL is read as text: the JSON loader infers one schema for all, and one bad line hides the others.
            yield from datasets.load_dataset(kind, data_files=str(path), split="train", streaming=True, cache_dir=cache)
    except (datasets.exceptions.DatasetGenerationError, OSError, ValueError) as error:
        message = f"cannot be read: {error.__cause__ or error}"
        raise problem_error(str(path), "conversations.unreadable", message, "restore the file") from error
    except RuntimeError as error:  # datasets keeps a counter in shared memory
        if "shared memory" not in str(error):
            raise
        reason = str(error).splitlines()[0]
        raise problem_error("/dev/shm", "disk.full", f"cannot write: {reason}", "free space there") from error


def _parsed(line: str, where: str) -> tuple[str, Any]:
    try:
        return where, json.loads(line)
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, a list 100,000 deep
        return where, Problem(where, "conversations.not_json", f"is not valid JSON: {error}", _FIX)


def _conversation(record: Any, where: str) -> Conversation | Problem:
    def bad(kind: str, message: str) -> Problem:
        return Problem(where, f"conversations.{kind}", message, _FIX)

    if not isinstance(record, dict):
        return bad("record", f"is a {type(record).__name__}, expected an object")
    record = {key: value for key, value in record.items() if value is not None}
    messages = record.get("messages")
    if messages is None and isinstance(record.get("prompt"), str):
        messages = [{"role": "user", "content": record["prompt"]}]
    if not isinstance(messages, list) or not messages:
        return bad(
            "messages", f"messages are {type(messages).__name__}, expected a list of messages, or a text `prompt`"
        )
    for number, message in enumerate(messages):
        if fault := _message_fault(message):
            return bad(fault[0], f"messages[{number}] {fault[1]}")
    # a column of a table holds null where another row has a key
    messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
    tools, answer_ids, source = record.get("tools"), record.get("answer_ids"), record.get("source")
    if tools is not None and not isinstance(tools, list):
        return bad("tools", f"tools are {type(tools).__name__}, expected a list")
    if answer_ids is not None:
        if not isinstance(answer_ids, list) or not answer_ids or any(type(item) is not int for item in answer_ids):
            return bad("answer_ids", "answer_ids are not a list of token ids")
        if messages[-1]["role"] != "assistant":
            return bad("answer_ids", "has answer_ids, but its last message is not the assistant's")
    try:
        digest = digest_json({"messages": messages, "tools": tools})
        identity = record.get("id", digest)
        f"{identity}{source}".encode()
    except UnicodeEncodeError:
        return bad("content", "has text that is not Unicode: half of a surrogate pair")
    if not isinstance(identity, str | int) or identity == "":
        return bad("id", f"its id is {identity!r}, expected a text or a number")
    return Conversation(str(identity), messages, tools, answer_ids, None if source is None else str(source))


def _message_fault(message: Any) -> tuple[str, str] | None:
    if not isinstance(message, dict):
        return "messages", f"is a {type(message).__name__}, expected an object"
    if message.get("role") not in ROLES:
        return "role", f"has role {message.get('role')!r}, expected one of {', '.join(ROLES)}"
    content = message.get("content")
    calls = message["role"] == "assistant" and message.get("tool_calls")
    if not isinstance(content, str | list) and not (content is None and calls):
        return "content", f"has content of type {type(content).__name__}, expected text"
    return None
