"""Files of `turns`: the user's turns of a conversation without answers, as the question files of MT-bench have them."""

from __future__ import annotations

from typing import Any

from eagle3.config import ConversationsConfig
from eagle3.data.conversations import Conversation, load_conversations
from eagle3.data.drops import Drops
from eagle3.data.formats import from_json_text
from eagle3.data.records import FIX, read_records
from eagle3.errors import Problem, raise_problems

UNANSWERED = ""
"""Stands where an answer will be."""


def load_questions(cfg: ConversationsConfig) -> tuple[list[Conversation], Drops]:
    """The conversations of a file, or of a file of `turns`, whose earlier answers are `UNANSWERED`.

    Raises:
        ProblemsError: as `load_conversations`; every record that is not of the first one's kind.
    """
    first = next(iter(read_records(cfg)), None)
    if cfg.format != "auto" or first is None or not _has_turns(first[1]):
        return load_conversations(cfg)
    found: dict[str, Conversation] = {}
    problems: list[Problem] = []
    dropped = Drops()
    for where, record in read_records(cfg):
        made = record if isinstance(record, Problem) else _conversation(record, where)
        if isinstance(made, Conversation) and made.id in found:
            made = Problem(where, "conversations.duplicate_id", f"id {made.id!r} is given twice", FIX)
        if isinstance(made, Conversation):
            found[made.id] = made
        else:
            dropped.add(made.kind, None)
            problems.append(made)
    if not cfg.skip_bad or not found:
        raise_problems(problems, f"{len(problems)} bad records in {cfg.path}")
    return list(found.values()), dropped


def _has_turns(record: Any) -> bool:
    return isinstance(record, dict) and "turns" in record


def _conversation(record: Any, where: str) -> Conversation | Problem:
    turns = from_json_text(record.get("turns")) if isinstance(record, dict) else None
    if not isinstance(turns, list) or not turns or not all(isinstance(item, str) and item for item in turns):
        message = "has no list of turns, each a text; the file's first record has"
        return Problem(where, "conversations.turns", message, FIX)
    name = record.get("id", record.get("question_id", where))
    if not isinstance(name, str | int) or name == "":
        return Problem(where, "conversations.id", f"its id is {name!r}, expected a text or a number", FIX)
    messages: list[dict[str, Any]] = []
    for turn in turns:
        if messages:
            messages.append({"role": "assistant", "content": UNANSWERED})
        messages.append({"role": "user", "content": turn})
    source = record.get("source", record.get("category"))
    return Conversation(str(name), messages, source=source if isinstance(source, str) else None)
