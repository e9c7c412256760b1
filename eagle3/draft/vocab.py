"""The draft vocab: which target tokens the draft model can propose.

Draft ids ascend in target-id order. Checkpoints store it as SGLang reads it: `d2t`, an int64 *offset*
(`target id = draft id + d2t[draft id]`), and `t2d`, a bool mask over the target's vocabulary.

Shapes: D draft vocab, V target vocab.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from eagle3.errors import Problem, raise_problems
from eagle3.wiring.draft_vocab import check_draft_vocab, draft_vocab_digest


@dataclass(frozen=True, eq=False)
class DraftVocab:
    """The chosen target ids.

    Attributes:
        ids: int64 [D], strictly ascending target ids.
        vocab_size: V.
    """

    ids: torch.Tensor
    vocab_size: int

    @classmethod
    def full(cls, vocab_size: int) -> DraftVocab:
        """Every target token."""
        return cls(torch.arange(vocab_size), vocab_size)

    @classmethod
    def from_counts(cls, counts: torch.Tensor, draft_vocab_size: int, keep_ids: Iterable[int] = ()) -> DraftVocab:
        """`keep_ids`, then the most frequent tokens; ties, and tokens that never occur, by ascending id.

        Args:
            counts: int64 [V], occurrences of each target token.
            draft_vocab_size: D.
            keep_ids: target ids that are kept whatever their count.

        Raises:
            ProblemsError: kinds `draft_vocab.size`, `draft_vocab.keep_ids`.
        """
        vocab_size = counts.numel()
        keep = torch.tensor(sorted(set(keep_ids)), dtype=torch.int64)
        raise_problems(_size_problems(draft_vocab_size, vocab_size, keep))
        priority = counts.to(device="cpu", dtype=torch.int64).clone()
        priority[keep] = torch.iinfo(torch.int64).max
        order = torch.argsort(priority, descending=True, stable=True)
        return cls(order[:draft_vocab_size].sort().values, vocab_size)

    @classmethod
    def from_tables(cls, d2t: torch.Tensor, t2d: torch.Tensor, where: str = "draft vocab") -> DraftVocab:
        """Reads d2t [D] and t2d [V] back.

        Raises:
            ProblemsError: see `check_tables`.
        """
        raise_problems(check_tables(d2t, t2d, t2d.numel(), where))
        return cls(d2t + torch.arange(d2t.numel(), device=d2t.device), t2d.numel())

    def __len__(self) -> int:
        return self.ids.numel()

    @property
    def d2t(self) -> torch.Tensor:
        """int64 [D], offsets: target id = draft id + d2t[draft id]; zeros for a full vocab."""
        return self.ids - torch.arange(len(self), device=self.ids.device)

    @property
    def t2d(self) -> torch.Tensor:
        """bool [V], true at the chosen target ids."""
        return torch.zeros(self.vocab_size, dtype=torch.bool, device=self.ids.device).index_fill_(0, self.ids, True)

    @property
    def digest(self) -> str:
        """`sha256:<hex>` of V and the chosen ids."""
        return draft_vocab_digest(self.ids.tolist(), self.vocab_size)

    def to(self, device: torch.device | str) -> DraftVocab:
        return DraftVocab(self.ids.to(device), self.vocab_size)

    def to_draft(self, target_ids: torch.Tensor) -> torch.Tensor:
        """Draft ids of target ids (any shape), -1 where a target id is not in the draft vocab."""
        places = torch.searchsorted(self.ids, target_ids).clamp_(max=len(self) - 1)
        return torch.where(self.ids[places] == target_ids, places, -1)

    def to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Target ids of draft ids (any shape)."""
        return self.ids[draft_ids]


def check_tables(d2t: torch.Tensor, t2d: torch.Tensor, vocab_size: int, where: str = "draft vocab") -> list[Problem]:
    """Everything that is wrong with a checkpoint's d2t [D] and t2d [V].

    It does not prove that these are the tables the head was trained with: compare digests for that.
    """
    problems = _table_form_problems(d2t, t2d, vocab_size, where)
    return problems or check_draft_vocab(d2t.tolist(), t2d.tolist(), vocab_size, where)


def _table_form_problems(d2t: torch.Tensor, t2d: torch.Tensor, vocab_size: int, where: str) -> list[Problem]:
    problems = []
    if d2t.dtype != torch.int64 or d2t.ndim != 1 or d2t.numel() == 0:
        message = f"d2t is {d2t.dtype} {list(d2t.shape)}, expected torch.int64 [draft vocab]"
        fix = "never cast it: bfloat16 turns 163607 into 163840"
        problems.append(Problem(where, "draft_vocab.d2t", message, fix))
    if t2d.dtype != torch.bool or t2d.shape != (vocab_size,):
        message = f"t2d is {t2d.dtype} {list(t2d.shape)}, expected torch.bool [{vocab_size}]"
        problems.append(
            Problem(where, "draft_vocab.t2d", message, "write it as a bool mask over the target's vocabulary")
        )
    return problems


def _size_problems(draft_vocab_size: object, vocab_size: int, keep: torch.Tensor) -> list[Problem]:
    where = "draft.draft_vocab_size"
    if type(draft_vocab_size) is not int or not 0 < draft_vocab_size <= vocab_size:
        message = f"is {draft_vocab_size!r}, expected a whole number from 1 to {vocab_size}"
        return [Problem(where, "draft_vocab.size", message, "correct it")]
    problems = []
    if keep.numel() > draft_vocab_size:
        message = f"is {draft_vocab_size}, but {keep.numel()} special tokens must be kept"
        problems.append(Problem(where, "draft_vocab.size", message, f"use at least {keep.numel()}"))
    if keep.numel() and (keep[0] < 0 or keep[-1] >= vocab_size):
        message = f"must keep ids {keep[0]} to {keep[-1]}, the vocabulary is 0 to {vocab_size - 1}"
        problems.append(Problem(where, "draft_vocab.keep_ids", message, "use the target's own tokenizer"))
    return problems
