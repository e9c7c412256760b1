"""Offline acceptance: what greedy speculative decoding would accept, from stored hidden states alone.

A serving round at the last committed token p drafts K tokens from chain p-1: the aux hidden states up to token
p-1 and the embedding of token p. A drafted token is only conditioned on where every earlier one of the round was
accepted, i.e. equals the answer's token. So feeding the draft model the answer's own tokens (teacher forcing, as
the training-time test of arXiv 2503.01840 does) gives, up to the first miss, exactly the drafts of the serving
loop, and what comes after the first miss is never looked at: the walk below commits exactly what a greedy server
would, provided that the stored answers are the target's own greedy ones. On other text it says how often the
draft model would follow that text.

Shapes: B rows, T tokens, K draft steps.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3.data.loader import collate
from eagle3.data.store import StoreReader
from eagle3.draft.loss import active_terms
from eagle3.draft.model import DraftModel
from eagle3.draft.ttt import draft_matches
from eagle3.draft.vocab import DraftVocab
from eagle3.errors import problem_error

Span = tuple[int, int]
RESAMPLES = 1000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Walk:
    """Serving rounds over some answers; walks add up.

    Attributes:
        histogram: [K+1] rounds by number of accepted drafts; the last round's is cut at the end of the answer.
        committed: tokens committed; the first token of an answer comes from the prefill and does not count.
    """

    histogram: tuple[int, ...]
    committed: int

    @property
    def rounds(self) -> int:
        return sum(self.histogram)

    @property
    def accepted(self) -> int:
        return sum(count * accepted for accepted, count in enumerate(self.histogram))


@dataclass(frozen=True)
class AcceptanceResult:
    """Acceptance of `steps` drafts a round, pooled over samples (sums first, then the ratio).

    Attributes:
        length: acceptance length, committed / rounds; 1.0 is no gain.
        interval: its 95% percentile bootstrap interval over samples.
        rate: acceptance rate, accepted drafts / drafted tokens (steps a round).
        histogram: [steps+1] rounds by number of accepted drafts.
        step_accuracy: [steps] share of the active terms at each depth whose greedy draft is the answer's token.
        length_by_steps: [steps] acceptance length with 1, 2, ..., steps drafts a round.
        samples: samples with at least one round.
    """

    steps: int
    length: float
    interval: tuple[float, float]
    rate: float
    rounds: int
    committed: int
    histogram: tuple[int, ...]
    step_accuracy: tuple[float, ...]
    length_by_steps: tuple[float, ...]
    samples: int


def answer_spans(loss_mask: Tensor) -> list[Span]:
    """The runs of supervised tokens in a sample's loss mask [T], as half-open (begin, end)."""
    padded = torch.nn.functional.pad(loss_mask.to(torch.int8), (1, 1))
    edges = padded.diff().nonzero().flatten().tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def walk(matches: Tensor, spans: Sequence[Span], steps: int) -> Walk:
    """Walks the serving rounds over one sample's answers.

    Args:
        matches: [K, T] bool, K >= steps; (k, i) says whether chain i's draft at step k is token i+2+k.
        spans: answers, half-open; the first token of each is known before its first round.
        steps: drafts a round.
    """
    histogram = [0] * (steps + 1)
    committed = 0
    for _, accepted, commit in rounds(matches, spans, steps):
        histogram[accepted] += 1
        committed += commit
    return Walk(tuple(histogram), committed)


def rounds(matches: Tensor, spans: Sequence[Span], steps: int) -> Iterator[tuple[int, int, int]]:
    """(last committed token's place, accepted drafts, tokens committed) of each serving round; see `walk`."""
    leading = matches[:steps].long().cumprod(0).sum(0).tolist()
    for begin, end in spans:
        last = max(begin, 1)  # token 0 has no state before it, so no chain can draft after it
        while (left := end - 1 - last) > 0:
            accepted = min(leading[last - 1], left)
            commit = min(accepted + 1, left)
            yield last, accepted, commit
            last += commit


def add_walks(walks: Sequence[Walk], steps: int) -> Walk:
    """The pooled walk of several samples, each of `steps` drafts a round."""
    histogram = tuple(sum(item.histogram[accepted] for item in walks) for accepted in range(steps + 1))
    return Walk(histogram, sum(item.committed for item in walks))


def ratio(part: int, whole: int) -> float:
    """part / whole; NaN where there is nothing to divide by: no data is neither 0 nor 1."""
    return part / whole if whole else math.nan


def bootstrap_interval(walks: Sequence[Walk], seed: int = 0) -> tuple[float, float]:
    """95% percentile interval of the pooled acceptance length under resampling of samples."""
    generator = random.Random(seed)
    pairs = [(item.committed, item.rounds) for item in walks if item.rounds]
    if not pairs:
        return math.nan, math.nan
    lengths = []
    for _ in range(RESAMPLES):
        drawn = generator.choices(pairs, k=len(pairs))
        lengths.append(sum(committed for committed, _ in drawn) / sum(rounds for _, rounds in drawn))
    lengths.sort()
    tail = round(RESAMPLES * (1 - CONFIDENCE) / 2)
    return lengths[tail], lengths[-tail - 1]


@torch.no_grad()
def acceptance(
    model: DraftModel,
    reader: StoreReader,
    vocab: DraftVocab,
    steps: int,
    indices: Sequence[int] | None = None,
    batch_tokens: int = 8192,
    advance: Callable[[int], None] | None = None,
) -> AcceptanceResult:
    """Acceptance of a draft model on a store's samples, on the device of the model.

    Args:
        steps: drafts a round; every smaller count is reported besides.
        indices: which of `reader.samples`; default: all.
        batch_tokens: tokens of a forward pass, padding included (a longer sample goes alone).
        advance: told how many samples are done since it was last called.
    """
    chosen = range(len(reader.samples)) if indices is None else indices
    device = next(model.parameters()).device
    walks: list[list[Walk]] = [[] for _ in range(steps)]
    hits, terms = torch.zeros(steps, dtype=torch.int64), torch.zeros(steps, dtype=torch.int64)
    groups = list(_groups(reader, chosen, batch_tokens))
    with reader.ahead(groups) as done:
        for group in groups:
            samples = [reader.read(index) for index in group]
            done(1)
            batch = collate([[sample] for sample in samples], max(len(sample.input_ids) for sample in samples))
            batch = batch.to(device)
            if not torch.isfinite(batch.aux).all():
                names = ", ".join(sample.id for sample in samples if not torch.isfinite(sample.aux_hidden_states).all())
                message = f"NaN or infinity in the hidden states of {names}; a drafter's NaN would count as a miss"
                fix = "run `eagle3 data repair`, then `eagle3 extract` again"
                raise problem_error(reader.name, "store.non_finite", message, fix)
            matches = draft_matches(model, batch, vocab, steps)
            active = active_terms(batch.loss_mask, batch.document_ids, steps, "served")
            hits += matches.sum((1, 2)).cpu()
            terms += active.sum((1, 2)).cpu()
            matches = matches.cpu()
            for row, sample in enumerate(samples):
                spans = answer_spans(sample.loss_mask)
                for count in range(1, steps + 1):
                    walks[count - 1].append(walk(matches[:, row], spans, count))
            if advance is not None:
                advance(len(group))
    accuracy = [ratio(hit, term) for hit, term in zip(hits.tolist(), terms.tolist(), strict=True)]
    return _result(walks, accuracy)


def _groups(reader: StoreReader, indices: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Samples of like length together, longest first (the largest batch fails first, if any does)."""
    group: list[int] = []
    longest = 0
    for index in sorted(indices, key=lambda index: (-reader.samples[index].tokens, index)):
        longest = longest or reader.samples[index].tokens
        if group and (len(group) + 1) * longest > batch_tokens:
            yield group
            group, longest = [], reader.samples[index].tokens
        group.append(index)
    if group:
        yield group


def _result(walks: list[list[Walk]], step_accuracy: list[float]) -> AcceptanceResult:
    steps = len(walks)
    pooled = [add_walks(of_count, count) for count, of_count in enumerate(walks, start=1)]
    full = pooled[-1]
    lengths = tuple(ratio(item.committed, item.rounds) for item in pooled)
    return AcceptanceResult(
        steps=steps,
        length=lengths[-1],
        interval=bootstrap_interval(walks[-1]),
        rate=ratio(full.accepted, full.rounds * steps),
        rounds=full.rounds,
        committed=full.committed,
        histogram=full.histogram,
        step_accuracy=tuple(step_accuracy),
        length_by_steps=lengths,
        samples=sum(item.rounds > 0 for item in walks[-1]),
    )
