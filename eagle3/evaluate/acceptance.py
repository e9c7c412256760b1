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

from collections.abc import Callable, Iterable, Iterator, Sequence

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
from eagle3.evaluate.result import AcceptanceResult, make_result
from eagle3.evaluate.sampling import KINDS, Sampling, expected_rounds, foresee
from eagle3.evaluate.walks import Walk, Walks, answer_spans, walk

MOST_SOURCES = 20
OTHERS, UNNAMED = "others", "no source"


def acceptance(
    model: DraftModel,
    reader: StoreReader,
    vocab: DraftVocab,
    steps: int,
    indices: Sequence[int] | None = None,
    batch_tokens: int = 8192,
    advance: Callable[[int], None] | None = None,
    sampling: Sampling | None = None,
    seed: int = 0,
) -> AcceptanceResult:
    """Acceptance of a draft model on a store's samples, on the device of the model; see `walk_samples`.

    Args:
        seed: of the resampling behind the intervals.
    """
    chosen = range(len(reader.samples)) if indices is None else indices
    walks = walk_samples(model, reader, vocab, steps, chosen, batch_tokens, advance, sampling)
    temperature = None if sampling is None else sampling.temperature
    return make_result(walks, samples_by_source(reader.samples, chosen), temperature, seed)


@torch.no_grad()
def walk_samples(
    model: DraftModel,
    reader: StoreReader,
    vocab: DraftVocab,
    steps: int,
    indices: Sequence[int],
    batch_tokens: int = 8192,
    advance: Callable[[int], None] | None = None,
    sampling: Sampling | None = None,
) -> Walks:
    """The rounds of each sample.

    Args:
        steps: most drafts a round; every smaller count is walked besides.
        indices: which of `reader.samples`.
        batch_tokens: tokens of a forward pass, padding included (a longer sample goes alone).
        advance: told how many samples are done since it was last called.
        sampling: reckon what speculative sampling would accept, too.
    """
    device = next(model.parameters()).device
    walks: dict[int, tuple[Walk, ...]] = {}
    expected: dict[int, Tensor] = {}
    hits, terms = torch.zeros(steps, dtype=torch.int64), torch.zeros(steps, dtype=torch.int64)
    overlaps = torch.zeros(steps, dtype=torch.float64)
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
            chances = None
            if sampling is None:
                matches = draft_matches(model, batch, vocab, steps)
            else:
                foreseen = foresee(model, batch, vocab, steps, sampling)
                matches, chances = foreseen.matches, foreseen.chances.double().cpu()
                overlaps += chances[KINDS.index("overlap")].sum((1, 2))
            active = active_terms(batch.loss_mask, batch.document_ids, steps, "served")
            hits += matches.sum((1, 2)).cpu()
            terms += active.sum((1, 2)).cpu()
            matches = matches.cpu()
            spans = [answer_spans(sample.loss_mask) for sample in samples]
            for row, index in enumerate(group):
                walks[index] = tuple(walk(matches[:, row], spans[row], count) for count in range(1, steps + 1))
            if chances is not None:
                items = [(kind[:, row], spans[row]) for row in range(len(group)) for kind in chances]
                rounds = expected_rounds(items, steps).view(len(group), len(KINDS), steps)
                expected.update(zip(group, rounds, strict=True))
            if advance is not None:
                advance(len(group))
    sums = () if sampling is None else tuple(overlaps.tolist())
    return Walks(steps, walks, tuple(hits.tolist()), tuple(terms.tolist()), expected, sums)


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
