"""Rows of the fused step: chunks of chains, each chunk's chains in the order in which they end.

Chains that live longest come first, so that the chains of step k are the first rows of those of step k - 1, and no
step gathers another's rows.

Shapes: S sources, C chains of the batch, R chains of a chunk, K TTT steps, N rows of a chunk over all steps (those of
step 0, then those of step 1, ..).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from eagle3.draft.chains import ChainPlan

QUERY_BLOCK = 64
"""Rows that share one entry in `Chunk.readers`."""
KEY_BLOCK = 64


@dataclass(frozen=True, eq=False)
class Chunk:
    """One chunk of chains.

    Attributes:
        counts: chains computed at each step, K numbers that never rise.
        ranks: int32 [R], each row's chain. At step k it reads the token that chain `rank + k` reads at step 0, and
            that chain's teacher is its teacher.
        ends: int32 [N], the chain's own token among the sources, the last that it attends to.
        begins: int32 [N], its document's first source.
        steps: int32 [N], each row's step.
        teachers: int32 [N], the chain whose teacher each row has.
        active: bool [N], whether the row's own term counts.
        step_starts: int32 [K + 1], the first of each step's rows, and N.
        reader_starts: int32 [2 * key blocks + 1], into `readers`.
        readers: int32, two lists for each block of `KEY_BLOCK` sources: the blocks of `QUERY_BLOCK` rows that all
            attend to all of it, and the others that have some row which attends to some of it.
    """

    counts: list[int]
    ranks: torch.Tensor
    ends: torch.Tensor
    begins: torch.Tensor
    steps: torch.Tensor
    teachers: torch.Tensor
    active: torch.Tensor
    step_starts: torch.Tensor
    reader_starts: torch.Tensor
    readers: torch.Tensor

    @property
    def offsets(self) -> list[int]:
        """The first of each step's rows, and N."""
        offsets = [0]
        for count in self.counts:
            offsets.append(offsets[-1] + count)
        return offsets


def make_chunks(plan: ChainPlan, most: int) -> list[Chunk]:
    """Cuts a plan's chains into chunks of about equal size.

    Args:
        plan: on the CPU.
        most: chains in a chunk.
    """
    begins = _document_begins(plan)[plan.chains]
    return [_chunk(plan, begins, first, last) for first, last in _cuts(len(plan.chains), most)]


def chunk_counts(plan: ChainPlan, most: int) -> list[list[int]]:
    """The chains at each step, of each chunk that `make_chunks` makes."""
    return [_counts(plan, first, last) for first, last in _cuts(len(plan.chains), most)]


def _cuts(total: int, most: int) -> Iterator[tuple[int, int]]:
    """The first chain of each chunk and the one after its last."""
    pieces = -(-total // most)
    return pairwise(total * piece // max(pieces, 1) for piece in range(pieces + 1))


def _counts(plan: ChainPlan, first: int, last: int) -> list[int]:
    lives = plan.lives[first:last]
    return [int((lives > k).sum()) for k in range(len(plan.active))]


def _document_begins(plan: ChainPlan) -> torch.Tensor:
    """The first source of each source's document, [S]."""
    lengths = torch.tensor(plan.document_sources)
    return torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)


def _chunk(plan: ChainPlan, begins: torch.Tensor, first: int, last: int) -> Chunk:
    """The chunk of chains [first, last).

    Args:
        begins: [C], the first source of each chain's document.
    """
    order = first + plan.lives[first:last].argsort(descending=True, stable=True)
    counts = _counts(plan, first, last)
    rows = torch.cat([order[:count] for count in counts])
    steps = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    ends, starts = plan.chains[rows], begins[rows]
    reader_starts, readers = _readers(starts, ends, len(plan.sources))
    step_starts = torch.nn.functional.pad(torch.tensor(counts).cumsum(0), (1, 0))
    return Chunk(
        counts=counts,
        ranks=order.int(),
        ends=ends.int(),
        begins=starts.int(),
        steps=steps.int(),
        teachers=(rows + steps).int(),
        active=plan.active[steps, rows],
        step_starts=step_starts.int(),
        reader_starts=reader_starts,
        readers=readers,
    )


def _readers(begins: torch.Tensor, ends: torch.Tensor, source_count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`reader_starts` and `readers` of rows that attend to sources begins .. ends."""
    blocks = -(-len(ends) // QUERY_BLOCK)
    padding = blocks * QUERY_BLOCK - len(ends)
    begins = torch.nn.functional.pad(begins, (0, padding), value=source_count).view(blocks, -1)
    ends = torch.nn.functional.pad(ends, (0, padding), value=-1).view(blocks, -1)
    keys = torch.arange(0, source_count, KEY_BLOCK)[:, None]
    meets = (begins.amin(1) < keys + KEY_BLOCK) & (ends.amax(1) >= keys)
    covers = (begins.amax(1) <= keys) & (ends.amin(1) >= keys + KEY_BLOCK - 1)
    lists = torch.stack([covers, meets & ~covers], 1).flatten(0, 1)
    return torch.nn.functional.pad(lists.sum(1).cumsum(0), (1, 0)).int(), lists.nonzero()[:, 1].int()
