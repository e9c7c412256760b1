"""Alpaca's records (`instruction`, `input`, `output`), plain prompts, and MT-bench's lists of questions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle3.data.formats import Faults, Messages, from_json_text


def read_alpaca(record: Mapping[str, Any], faults: Faults) -> Messages:
    """The earlier turns of `history`, then instruction and input as one user turn, then the output if there is one.

    Args:
        faults: what is wrong is added here.
    """
    for key in ("instruction", "input", "output", "system"):
        if not isinstance(record.get(key, ""), str):
            faults.append(("content", f"has {key} of type {type(record[key]).__name__}, expected text"))
    messages = [{"role": "system", "content": record["system"]}] if record.get("system") else []
    for number, pair in enumerate(_history(record, faults)):
        if not (isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(item, str) for item in pair)):
            faults.append(("content", f"has history[{number}] that is not a pair of texts"))
            continue
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    asked = [record["instruction"], *([record["input"]] if record.get("input") else [])]
    messages.append({"role": "user", "content": "\n".join(map(str, asked))})
    if record.get("output") is not None:
        messages.append({"role": "assistant", "content": record["output"]})
    return messages


def read_prompt(value: Any, faults: Faults) -> Messages:
    """A prompt as a conversation of one user turn.

    Args:
        faults: what is wrong is added here.
    """
    if not isinstance(value, str):
        faults.append(("messages", f"has a prompt of type {type(value).__name__}, expected text"))
        return []
    return [{"role": "user", "content": value}]


def read_turns(value: Any, faults: Faults) -> Messages:
    """A conversation's user turns, one behind the other; the answers between them are yet to come.

    Args:
        value: a list of texts, or JSON text of one.
        faults: what is wrong is added here.
    """
    texts = from_json_text(value)
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        faults.append(("messages", "has turns that are not a list of texts"))
        return []
    return [{"role": "user", "content": text} for text in texts]


def _history(record: Mapping[str, Any], faults: Faults) -> list[Any]:
    history = from_json_text(record.get("history", []))
    if isinstance(history, list):
        return history
    faults.append(("content", f"has history of type {type(history).__name__}, expected a list of pairs"))
    return []
