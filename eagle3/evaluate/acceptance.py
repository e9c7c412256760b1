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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3.data.loader import collate
from eagle3.data.store import StoreReader
from eagle3.data.store_format import SampleInfo
from eagle3.draft.loss import active_terms
from eagle3.draft.model import DraftModel
from eagle3.draft.ttt import draft_matches
from eagle3.draft.vocab import DraftVocab
from eagle3.errors import problem_error

Span = tuple[int, int]
RESAMPLES = 1000
CONFIDENCE = 0.95
MOST_SOURCES = 20
OTHERS, UNNAMED = "others", "no source"


@dataclass(frozen=True)
class Walk:
    """Serving rounds over some answers; walks add up.

    Attributes:
        histogram: [K+1] rounds by number of accepted drafts; the last round's is cut at the end of the answer.
        committed: tokens committed; the first token of an answer comes from the prefill and does not count.
        reached: [K] rounds that reach each depth: every draft before it was accepted, and the answer goes on there.
    """

    histogram: tuple[int, ...]
    committed: int
    reached: tuple[int, ...]

    @property
    def rounds(self) -> int:
        return sum(self.histogram)

    @property
    def accepted(self) -> int:
        return sum(count * accepted for accepted, count in enumerate(self.histogram))

    @property
    def taken(self) -> tuple[int, ...]:
        """[K] rounds that accept the draft at each depth."""
        return tuple(sum(self.histogram[depth:]) for depth in range(1, len(self.histogram)))


@dataclass(frozen=True)
class Walks:
    """Walks of some samples, by sample.

    Attributes:
        steps: most drafts a round.
        of_sample: for each sample by its index in the store, its walk with 1, 2, .., steps drafts a round.
        hits, terms: [steps] active terms at each depth, and those whose greedy draft is the answer's token.
    """

    steps: int
    of_sample: dict[int, tuple[Walk, ...]]
    hits: tuple[int, ...]
    terms: tuple[int, ...]

    def pooled(self, drafts: int, indices: Iterable[int] | None = None) -> Walk:
        """The samples' rounds together, with so many drafts each; of `indices` those that are here, default: all."""
        chosen = self.of_sample if indices is None else [index for index in indices if index in self.of_sample]
        return add_walks([self.of_sample[index][drafts - 1] for index in chosen], drafts)


@dataclass(frozen=True)
class SourceAcceptance:
    """Acceptance length of the samples from one source: committed / rounds."""

    length: float
    rounds: int
    samples: int


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
        by_depth: [steps] of the rounds that reach a depth, the share that accepts the draft there.
        by_source: the same length by where the prompts come from; empty where no sample says so.
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
    by_depth: tuple[float, ...]
    by_source: dict[str, SourceAcceptance]


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
    histogram, reached = [0] * (steps + 1), [0] * steps
    committed = 0
    for _, accepted, commit in rounds(matches, spans, steps):
        histogram[accepted] += 1
        committed += commit
        for depth in range(min(commit, steps)):
            reached[depth] += 1
    return Walk(tuple(histogram), committed, tuple(reached))


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
    reached = tuple(sum(item.reached[depth] for item in walks) for depth in range(steps))
    return Walk(histogram, sum(item.committed for item in walks), reached)


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


def acceptance(
    model: DraftModel,
    reader: StoreReader,
    vocab: DraftVocab,
    steps: int,
    indices: Sequence[int] | None = None,
    batch_tokens: int = 8192,
    advance: Callable[[int], None] | None = None,
) -> AcceptanceResult:
    """Acceptance of a draft model on a store's samples, on the device of the model; see `walk_samples`."""
    chosen = range(len(reader.samples)) if indices is None else indices
    return _result(
        walk_samples(model, reader, vocab, steps, chosen, batch_tokens, advance),
        samples_by_source(reader.samples, chosen),
    )


@torch.no_grad()
def walk_samples(
    model: DraftModel,
    reader: StoreReader,
    vocab: DraftVocab,
    steps: int,
    indices: Sequence[int],
    batch_tokens: int = 8192,
    advance: Callable[[int], None] | None = None,
) -> Walks:
    """The rounds of each sample.

    Args:
        steps: most drafts a round; every smaller count is walked besides.
        indices: which of `reader.samples`.
        batch_tokens: tokens of a forward pass, padding included (a longer sample goes alone).
        advance: told how many samples are done since it was last called.
    """
    device = next(model.parameters()).device
    walks: dict[int, tuple[Walk, ...]] = {}
    hits, terms = torch.zeros(steps, dtype=torch.int64), torch.zeros(steps, dtype=torch.int64)
    groups = list(_groups(reader, indices, batch_tokens))
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
            for row, (index, sample) in enumerate(zip(group, samples, strict=True)):
                spans = answer_spans(sample.loss_mask)
                walks[index] = tuple(walk(matches[:, row], spans, count) for count in range(1, steps + 1))
            if advance is not None:
                advance(len(group))
    return Walks(steps, walks, tuple(hits.tolist()), tuple(terms.tolist()))


def samples_by_source(samples: Sequence[SampleInfo], indices: Iterable[int]) -> dict[str, list[int]]:
    """The indices by where the samples' prompts come from; empty where none says so.

    Of more than `MOST_SOURCES` the smallest are put together as `OTHERS`; samples that do not say are `UNNAMED`.
    """
    found: dict[str, list[int]] = {}
    for index in indices:
        source = samples[index].source
        found.setdefault(UNNAMED if source is None else source, []).append(index)
    if set(found) <= {UNNAMED}:
        return {}
    largest = sorted(found, key=lambda name: (-len(found[name]), name))
    kept = {name: found[name] for name in sorted(largest[:MOST_SOURCES])}
    for name in largest[MOST_SOURCES:]:
        kept.setdefault(OTHERS, []).extend(found[name])
    return kept


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


def _result(walks: Walks, sources: dict[str, list[int]]) -> AcceptanceResult:
    steps = walks.steps
    pooled = [walks.pooled(count) for count in range(1, steps + 1)]
    full = pooled[-1]
    lengths = tuple(ratio(item.committed, item.rounds) for item in pooled)
    of_sample = [item[-1] for item in walks.of_sample.values()]
    return AcceptanceResult(
        steps=steps,
        length=lengths[-1],
        interval=bootstrap_interval(of_sample),
        rate=ratio(full.accepted, full.rounds * steps),
        rounds=full.rounds,
        committed=full.committed,
        histogram=full.histogram,
        step_accuracy=tuple(map(ratio, walks.hits, walks.terms)),
        length_by_steps=lengths,
        samples=sum(item.rounds > 0 for item in of_sample),
        by_depth=tuple(map(ratio, full.taken, full.reached)),
        by_source={name: _of_source(walks, indices) for name, indices in sources.items()},
    )


def _of_source(walks: Walks, indices: Sequence[int]) -> SourceAcceptance:
    found = walks.pooled(walks.steps, indices)
    samples = sum(walks.of_sample[index][-1].rounds > 0 for index in indices)
    return SourceAcceptance(ratio(found.committed, found.rounds), found.rounds, samples)
