"""Which micro-batch of a run takes the most memory, from lengths alone and then from the loss masks themselves.

Legend: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from eagle3.config import TrainConfig
from eagle3.data.dealing import Row
from eagle3.draft.chains import plan_chains
from eagle3.draft.fused.ledger import Ledger
from eagle3.draft.fused.memory import Sizes
from eagle3.train.memory import Place, Run, run_ledger
from eagle3.train.samples import TrainSamples

MOST_READ = 32
"""Micro-batches whose loss masks are read."""


@dataclass(frozen=True)
class Share:
    """One process's share of a micro-batch, by its samples' lengths.

    Attributes:
        rows: its samples.
        tokens: padding included.
        supervised: of these, at most.
        number: micro-batches of its window on its process.
        others: supervised tokens of the others of them, at most.
    """

    rows: Sequence[Row]
    tokens: int
    supervised: int
    number: int
    others: int

    @property
    def extent(self) -> tuple[int, int, int, bool]:
        """What its memory rises with."""
        return self.tokens, self.supervised, self.others, self.number > 1

    def place(self, run: Run) -> Place:
        return Place(self.number, Sizes.at_most(self.others, self.others, run.ttt))

    def bound(self, run: Run) -> Ledger:
        """What it takes at most."""
        return run_ledger(run, Sizes.at_most(self.tokens, self.supervised, run.ttt), self.place(run))


@dataclass(frozen=True)
class Worst:
    """The micro-batch that takes most.

    Attributes:
        count: micro-batches of all processes.
        read: of these, those whose masks were read.
        bound: none takes more.
        ledger: of the one that takes most of those read; the bound's where none was.
        batch, sizes: that micro-batch.
    """

    count: int
    read: int
    bound: int
    ledger: Ledger
    batch: Share
    sizes: Sizes


def largest(samples: TrainSamples, config: TrainConfig, run: Run) -> tuple[int, list[Share]]:
    """How many micro-batches there are, and those of which none is at most as large as another in every respect, the
    one that may take most first."""
    batches = list(_micro_batches(samples, config, run))
    chosen: list[Share] = []
    for batch in sorted(batches, key=lambda batch: batch.extent, reverse=True):
        if not any(all(a >= b for a, b in zip(other.extent, batch.extent, strict=True)) for other in chosen):
            chosen.append(batch)
    return len(batches), sorted(chosen, key=lambda batch: batch.bound(run).peak, reverse=True)


def find_worst(samples: TrainSamples, config: TrainConfig, run: Run) -> Worst:
    """Reads the masks of the `MOST_READ` micro-batches that may take most; a ring's masks are not there yet."""
    count, batches = largest(samples, config, run)
    bound = batches[0].bound(run)
    read = []
    for batch in batches[:MOST_READ]:
        if (sizes := _read(samples, batch, run)) is not None:
            read.append((run_ledger(run, sizes, batch.place(run)), batch, sizes))
    if not read:
        sizes = Sizes.at_most(batches[0].tokens, batches[0].supervised, run.ttt)
        return Worst(count, 0, bound.peak, bound, batches[0], sizes)
    ledger, batch, sizes = max(read, key=lambda found: found[0].peak)
    return Worst(count, len(read), bound.peak, ledger, batch, sizes)


def _micro_batches(samples: TrainSamples, config: TrainConfig, run: Run) -> Iterator[Share]:
    for window in samples.windows(config, run.processes, run.cost):
        for rank in range(run.processes):
            shares = [micro_batch[rank] for micro_batch in window]
            sizes = [_lengths(samples, rows) for rows in shares]
            whole = sum(supervised for _, supervised in sizes)
            for rows, (tokens, supervised) in zip(shares, sizes, strict=True):
                yield Share(rows, tokens, supervised, len(shares), whole - supervised)


def _lengths(samples: TrainSamples, rows: Sequence[Row]) -> tuple[int, int]:
    """Tokens, padding included, and supervised ones."""
    infos = [[samples.info(place) for place in row] for row in rows]
    longest = max((sum(info.tokens for info in row) for row in infos), default=0)
    return len(rows) * longest, sum(info.supervised for row in infos for info in row)


def _read(samples: TrainSamples, batch: Share, run: Run) -> Sizes | None:
    """The micro-batch from its samples' loss masks; None where they are not known."""
    shape = (len(batch.rows), batch.tokens // max(len(batch.rows), 1))
    mask, documents = torch.zeros(shape, dtype=torch.bool), torch.full(shape, -1)
    for number, row in enumerate(batch.rows):
        begin = 0
        for document, place in enumerate(row):
            part = samples.loss_mask(place)
            if part is None:
                return None
            mask[number, begin : begin + len(part)] = part
            documents[number, begin : begin + len(part)] = document
            begin += len(part)
    plan = plan_chains(mask, documents, run.ttt.steps, run.ttt.chain_rule)
    assert run.ttt.chunk is not None
    return Sizes.of(plan, batch.tokens, int(mask.sum()), run.ttt.chunk)
