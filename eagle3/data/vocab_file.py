"""A draft vocab as a file: JSON that a person can read, and that a run takes with `vocab_file`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from eagle3.draft.vocab import DraftVocab
from eagle3.errors import Problem, problem_error, raise_problems
from eagle3.files import explained_os_errors, read_json_object, write_json_atomic

_FORMAT = 1
_KEYS = {"format", "vocab_size", "tokenizer_digest", "digest", "counted", "forced", "ids"}


@dataclass(frozen=True)
class VocabFile:
    """A chosen draft vocab and where it comes from.

    Attributes:
        tokenizer_digest: of the target's tokenizer, whose ids these are.
        forced: ids that are in it whatever their count.
        counted: what was counted, as JSON values; `share` of it is in the vocab, None once that was changed.
    """

    vocab: DraftVocab
    tokenizer_digest: str
    forced: list[int]
    counted: dict[str, Any]

    def changed(self, add: Iterable[int] = (), remove: Iterable[int] = ()) -> VocabFile:
        """With more and fewer ids; those that are added are forced from now on.

        Raises:
            ProblemsError: kind `vocab.ids`: ids that cannot be added or removed, each named.
        """
        added, removed, ids = set(add), set(remove), set(self.vocab.ids.tolist())
        problems = [
            Problem("vocab", "vocab.ids", message, "correct the list of ids")
            for wrong, message in (
                (
                    _outside(added, self.vocab.vocab_size),
                    f"ids outside 0 to {self.vocab.vocab_size - 1} were to be added",
                ),
                (added & ids, "ids that are in it already were to be added"),
                (removed - ids, "ids that are not in it were to be removed"),
                (ids if not (ids | added) - removed else set(), "all of its ids were to be removed"),
            )
            if wrong
            for message in [f"{message}: {', '.join(map(str, sorted(wrong)[:20]))}"]
        ]
        raise_problems(problems)
        chosen = sorted((ids | added) - removed)
        forced = sorted((set(self.forced) | added) - removed)
        vocab = DraftVocab(torch.tensor(chosen, dtype=torch.int64), self.vocab.vocab_size)
        return replace(self, vocab=vocab, forced=forced, counted={**self.counted, "share": None})

    def write(self, path: Path) -> None:
        """Replaces the file."""
        values = {
            "format": _FORMAT,
            "vocab_size": self.vocab.vocab_size,
            "tokenizer_digest": self.tokenizer_digest,
            "digest": self.vocab.digest,
            "counted": self.counted,
            "forced": self.forced,
            "ids": self.vocab.ids.tolist(),
        }
        with explained_os_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json_atomic(path, values)

    def render(self) -> str:
        share = self.counted.get("share")
        held = "" if share is None else f", {share:.2%} of the supervised tokens that it was counted from"
        return (
            f"{len(self.vocab):,} of {self.vocab.vocab_size:,} tokens, {len(self.forced):,} of them forced{held}\n"
            f"digest {self.vocab.digest}\ntokenizer {self.tokenizer_digest}"
        )


def read_vocab(path: Path) -> VocabFile:
    """Reads a vocab file back.

    Raises:
        ProblemsError: kinds `file.*`; `vocab.file` (keys or values that cannot be), `vocab.digest` (the ids are not
            those that were written).
    """
    values = read_json_object(path, "draft vocab")
    fix = "make it anew with `eagle3 vocab make`; change it with `eagle3 vocab edit`"
    if problem := _fault(values):
        raise problem_error(str(path), "vocab.file", problem, fix)
    vocab = DraftVocab(torch.tensor(values["ids"], dtype=torch.int64), values["vocab_size"])
    if vocab.digest != values["digest"]:
        message = f"its ids have the digest {vocab.digest}, it says {values['digest']}"
        raise problem_error(str(path), "vocab.digest", message, fix)
    return VocabFile(vocab, values["tokenizer_digest"], values["forced"], values["counted"])


def _fault(values: dict[str, Any]) -> str | None:
    if values.keys() != _KEYS:
        return f"has the keys {', '.join(sorted(values))}, expected {', '.join(sorted(_KEYS))}"
    if values["format"] != _FORMAT:
        return f"has format {values['format']!r}, expected {_FORMAT}"
    size, ids, forced = values["vocab_size"], values["ids"], values["forced"]
    if type(size) is not int or not 0 < size < 2**31:
        return f"has vocab_size {size!r}, expected a whole number above 0"
    for name, found in (("ids", ids), ("forced", forced)):
        if not isinstance(found, list) or any(type(item) is not int for item in found) or _outside(set(found), size):
            return f"{name} is no list of ids from 0 to {size - 1}"
        if found != sorted(set(found)):
            return f"{name} does not ascend, or holds an id twice"
    if not ids or not set(forced) <= set(ids):
        return "has no ids, or forced ones that are not among them"
    if not isinstance(values["tokenizer_digest"], str) or not isinstance(values["counted"], dict):
        return "has a tokenizer_digest that is no text, or a `counted` that is no object"
    if type(share := values["counted"].get("share")) not in (float, int, type(None)):
        return f"has a share of {share!r}, expected a number or null"
    return None


def _outside(ids: set[int], vocab_size: int) -> set[int]:
    return {item for item in ids if not 0 <= item < vocab_size}
