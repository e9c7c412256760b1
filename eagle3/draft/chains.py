"""Which rows of a batch must be computed, so that nothing else is.

A chain needs its own steps up to its last active term, and the step-0 keys and values of its document up to its own
token; nothing else in a batch reaches the loss. For a draft model of one layer leaving the rest out is exact.

Shapes: B rows, T tokens, K TTT steps, S source tokens (step-0 keys and values), R chains of one step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from eagle3.draft.config import ChainRule
from eagle3.draft.loss import active_terms, document_runs


@dataclass(frozen=True, eq=False)
class StepRows:
    """The chains computed at step k, in batch order.

    Attributes:
        sources: int64 [R], each chain's own token among the plan's sources.
        kept: int64 [R], each chain among those of step k - 1 (at step 0: among the sources).
        ahead: int64 [R], the chain that is k tokens ahead, among those of step 0: it reads at step 0 the token that
            this chain reads now, and its teacher is this chain's teacher now.
        active: bool [R], whether this step's own term counts (under `served` always).
        document_chains: how many of these chains are in each of the plan's documents.
    """

    sources: torch.Tensor
    kept: torch.Tensor
    ahead: torch.Tensor
    active: torch.Tensor
    document_chains: list[int]

    def to(self, device: torch.device) -> StepRows:
        """The same rows on `device`."""
        sources, kept, ahead, active = (
            tensor.to(device) for tensor in (self.sources, self.kept, self.ahead, self.active)
        )
        return StepRows(sources, kept, ahead, active, self.document_chains)


@dataclass(frozen=True, eq=False)
class ChainPlan:
    """What to compute for one batch.

    Attributes:
        sources: int64 [S], flat places in B * T of the tokens that some chain attends to; in each document the
            tokens from its first to its last chain's own.
        chains: int64 [C], each chain's own token among the sources, ascending. At step k chain c reads the token that
            chain c + k reads at step 0.
        document_sources: how many sources each document has; documents without a chain are left out.
        lives: int64 [C] on the CPU, the number of steps that each chain is computed: up to its last active term.
        active: bool [K, C] on the CPU, whether a chain's term counts.
        host: the same plan on the CPU; None where this is it.
    """

    sources: torch.Tensor
    chains: torch.Tensor
    document_sources: list[int]
    lives: torch.Tensor
    active: torch.Tensor
    host: ChainPlan | None = None

    def to(self, device: torch.device) -> ChainPlan:
        """The same plan on `device`."""
        return replace(self, sources=self.sources.to(device), chains=self.chains.to(device), host=self.host or self)

    @property
    def teacher_places(self) -> torch.Tensor:
        """int64 [C], flat places in B * T where the teacher is read; every step's are among them."""
        return self.sources[self.chains] + 1

    @cached_property
    def steps(self) -> list[StepRows]:
        """The rows of each step, K entries."""
        host = self.host or self
        lengths = torch.tensor(host.document_sources, dtype=torch.int64)
        documents = torch.repeat_interleave(lengths)[host.chains]
        ranks = torch.arange(len(host.chains))
        rows, previous = [], None
        for k, active in enumerate(host.active):
            alive = ranks[host.lives > k]
            own = host.chains[alive]
            kept = own if previous is None else torch.searchsorted(previous, alive)
            counts = torch.bincount(documents[alive], minlength=len(lengths)).tolist()
            rows.append(StepRows(own, kept, alive + k, active[alive], counts).to(self.sources.device))
            previous = alive
        return rows


def plan_chains(loss_mask: torch.Tensor, document_ids: torch.Tensor, steps: int, rule: ChainRule) -> ChainPlan:
    """Plans a batch on the CPU (one transfer of each argument) and moves the plan to their device.

    Args:
        loss_mask: bool [B, T].
        document_ids: int64 [B, T], -1 = padding.
        steps: K.
        rule: see `active_terms`.
    """
    document_ids = document_ids.cpu()
    active = active_terms(loss_mask.cpu(), document_ids, steps, rule).flatten(1)
    lives = (active * torch.arange(1, steps + 1, dtype=torch.uint8)[:, None]).amax(0)
    places = lives.nonzero().flatten()
    sources, documents = _sources(places, document_runs(document_ids).flatten())
    chains = torch.searchsorted(sources, places)
    document_sources = torch.bincount(documents).tolist()
    return ChainPlan(sources, chains, document_sources, lives[places].long(), active[:, places]).to(loss_mask.device)


def _sources(chains: torch.Tensor, runs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Flat places [S] that the chains at flat places [R] attend to, and the number [S] of each one's document.

    Args:
        chains: ascending.
        runs: int64 [B * T], the document of each place.
    """
    last_chain = torch.full((int(runs[-1]) + 1,), -1).scatter_reduce_(0, runs[chains], chains, "amax")
    sources = (torch.arange(runs.numel()) <= last_chain[runs]).nonzero().flatten()
    return sources, runs[sources].unique_consecutive(return_inverse=True)[1]
