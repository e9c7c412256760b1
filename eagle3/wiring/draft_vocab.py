"""The draft vocab's tables as plain lists, and the digest that contracts carry.

Legend: D draft vocab, V target vocab. d2t is an int64 [D] *offset*: target id = draft id + d2t[draft id], draft ids
ascending in target-id order; t2d is a bool [V] mask.
"""

from __future__ import annotations

import array
import hashlib
import sys
from collections.abc import Iterable, Sequence

from eagle3.errors import Problem

_OFFSETS = "write offsets (target id - draft id), in ascending order of target ids"
_ONE_SOURCE = "write both tables from one draft vocab"


def draft_vocab_digest(target_ids: Iterable[int], vocab_size: int) -> str:
    """`sha256:<hex>` of V and the chosen target ids (as little-endian int64, ascending)."""
    ids = array.array("q", target_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return f"sha256:{hashlib.sha256(f'{vocab_size}:'.encode() + ids.tobytes()).hexdigest()}"


def target_ids_of(d2t: Iterable[int]) -> list[int]:
    """Target id of each draft id."""
    return [draft_id + offset for draft_id, offset in enumerate(d2t)]


def check_draft_vocab(d2t: Sequence[int], t2d: Sequence[int] | None, vocab_size: int, where: str) -> list[Problem]:
    """Everything that is wrong with the values of d2t [D] and t2d [V]; t2d may be missing, servers do not read it.

    Kinds: `draft_vocab.absolute_ids`, `draft_vocab.out_of_range`, `draft_vocab.duplicate`,
    `draft_vocab.not_ascending`, `draft_vocab.count`, `draft_vocab.disagree`. It does not prove that the head was
    trained with these tables: compare digests for that. Without t2d, ascending absolute ids that stay in range when
    the draft id is added to them cannot be told from offsets.
    """
    ids = target_ids_of(d2t)
    if not ids:
        return [Problem(where, "draft_vocab.count", "d2t is empty", _ONE_SOURCE)]
    marked = None if t2d is None else [token for token, chosen in enumerate(t2d) if chosen]
    if marked == ids and ids[-1] < vocab_size:
        return []
    if marked == list(d2t):
        message = "d2t holds absolute target ids, the server adds the draft id to them once more"
        return [Problem(where, "draft_vocab.absolute_ids", message, _OFFSETS)]
    problems = []
    if beyond := [token for token in ids if not 0 <= token < vocab_size]:
        message = f"d2t leads {len(beyond)} draft ids outside the vocabulary 0 to {vocab_size - 1}, e.g. to {beyond[0]}"
        problems.append(Problem(where, "draft_vocab.out_of_range", message, _OFFSETS))
    if repeated := len(ids) - len(set(ids)):
        message = f"d2t leads {repeated} draft ids to target ids that another draft id already means"
        problems.append(Problem(where, "draft_vocab.duplicate", message, _OFFSETS))
    elif ids != sorted(ids):
        message = "d2t does not lead ascending draft ids to ascending target ids"
        problems.append(Problem(where, "draft_vocab.not_ascending", message, _OFFSETS))
    if marked is not None and len(marked) != len(ids):
        message = f"t2d marks {len(marked)} tokens, d2t has {len(ids)}"
        problems.append(Problem(where, "draft_vocab.count", message, _ONE_SOURCE))
    elif marked is not None and not problems:
        wrong = len(set(ids) - set(marked))
        message = f"t2d and d2t name different tokens ({wrong} of {len(ids)})"
        problems.append(Problem(where, "draft_vocab.disagree", message, _ONE_SOURCE))
    return problems
