"""What speculative sampling would accept, from stored hidden states (arXiv 2211.17192), at a temperature, top-p off.

With the target's distribution p and the draft's q, a draft x is accepted with probability min(1, p(x) / q(x)). Two
chances follow for a place whose prefix is the text's:

    overlap   sum over x of min(p(x), q(x)): whatever token the draft may be
    own       min(1, q(x) / p(x)) for x the text's own token: how likely it came from an accepted draft, given that
              the target's draw, however it came about, is x

Given the text the rounds are a Markov chain over its tokens, so the expected number of rounds is exact, and needs no
sampling: `expected_rounds`. With `own` it is that of this very text, and right on average over texts that the target
sampled at this temperature; with `overlap` each step is averaged over the target's draw, with the text as prefix.

Shapes: B rows, T tokens, K draft steps, V target vocab, D draft vocab, R chains of a step, S answers, L tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3.draft.batch import DraftBatch
from eagle3.draft.chains import ChainPlan, plan_chains
from eagle3.draft.loss import TEACHER_ROWS, TargetHead
from eagle3.draft.model import DraftModel
from eagle3.draft.ttt import unroll
from eagle3.draft.vocab import DraftVocab

Span = tuple[int, int]
KINDS = ("overlap", "own")
TOGETHER = 32768
"""Tokens of answers, padding included, whose rounds are reckoned together."""


@dataclass(frozen=True)
class Sampling:
    """Attributes:
    head: all of the target's, on the model's device.
    temperature: of target and draft alike, above 0.
    """

    head: TargetHead
    temperature: float


@dataclass(frozen=True, eq=False)
class Foreseen:
    """What one pass over a batch says of every chain i at every step k, about token i+2+k; 0 where none is drafted.

    Attributes:
        matches: bool [K, B, T], the greedy draft is that token.
        chances: float32 [2, K, B, T], `KINDS`.
    """

    matches: Tensor
    chances: Tensor


@torch.no_grad()
def foresee(model: DraftModel, batch: DraftBatch, vocab: DraftVocab, steps: int, sampling: Sampling) -> Foreseen:
    """Greedy drafts and chances of acceptance in one pass, the batch's own tokens being read."""
    plan = plan_chains(batch.loss_mask, batch.document_ids, steps, "served")
    places = batch.input_ids.numel()
    matches = torch.zeros(steps, places, dtype=torch.bool, device=batch.input_ids.device)
    chances = torch.zeros(len(KINDS), steps, places, device=batch.input_ids.device)
    if plan.document_sources:
        target = _Target.read(batch, vocab, plan, sampling)
        for k, (rows, output) in enumerate(zip(plan.steps, unroll(model, batch, plan), strict=True)):
            own = plan.sources[rows.sources]
            parts = [
                _compare(model.logits(some), target, ahead, vocab, sampling.temperature)
                for some, ahead in zip(output.split(TEACHER_ROWS), rows.ahead.split(TEACHER_ROWS), strict=True)
            ]
            if parts:
                hits, overlap, likely = (torch.cat(column) for column in zip(*parts, strict=True))
                matches[k, own] = hits
                chances[:, k, own] = torch.stack([overlap, likely])
    shape = batch.input_ids.shape
    return Foreseen(matches.view(steps, *shape), chances.view(len(KINDS), steps, *shape))


@dataclass(frozen=True, eq=False)
class _Target:
    """The target at the plan's teacher places, R chains of step 0.

    Attributes:
        logits: [R, D], on the draft vocab, in the head's type, not tempered.
        log_sum: [R], logarithm of the sum that norms p, over the whole vocab.
        own: [R], logarithm of p of the text's next token.
        tokens: int64 [R], that token.
    """

    logits: Tensor
    log_sum: Tensor
    own: Tensor
    tokens: Tensor

    @classmethod
    def read(cls, batch: DraftBatch, vocab: DraftVocab, plan: ChainPlan, sampling: Sampling) -> _Target:
        tokens = batch.input_ids.flatten()[plan.teacher_places + 1]
        states = batch.last_rows(plan.teacher_places)
        found = []
        for rows, following in zip(states.split(TEACHER_ROWS), tokens.split(TEACHER_ROWS), strict=True):
            logits = sampling.head.logits(rows)
            tempered = _tempered(logits, sampling.temperature)
            log_sum = tempered.logsumexp(1)
            own = tempered.gather(1, following[:, None])[:, 0] - log_sum
            found.append((logits.index_select(1, vocab.ids), log_sum, own))
        chosen, log_sums, owns = (torch.cat(column) for column in zip(*found, strict=True))
        return cls(chosen, log_sums, owns, tokens)


def _compare(
    logits: Tensor, target: _Target, ahead: Tensor, vocab: DraftVocab, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """[R] of each: the greedy draft is the text's token; the overlap; the chance of the text's own token.

    Args:
        logits: [R, D], the draft's.
        ahead: int64 [R], each chain's place in `target`.
    """
    tokens = target.tokens[ahead]
    hits = vocab.to_target(logits.argmax(-1)) == tokens
    log_q = _tempered(logits, temperature).log_softmax(-1)
    log_p = _tempered(target.logits[ahead], temperature) - target.log_sum[ahead][:, None]
    overlap = torch.minimum(log_q, log_p).exp().sum(-1)
    known = vocab.to_draft(tokens)
    of_own = log_q.gather(1, known.clamp(min=0)[:, None])[:, 0]
    likely = (of_own - target.own[ahead]).clamp(max=0).exp()
    return hits, overlap.clamp(max=1).float(), likely.masked_fill(known < 0, 0).float()


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature


def expected_rounds(items: Sequence[tuple[Tensor, Sequence[Span]]], steps: int) -> Tensor:
    """float64 [N, steps], each item's expected number of rounds over its answers with 1, 2, .., steps drafts a round.

    Args:
        items: N times chances [K, T], K >= steps, and answers. (k, i) is the probability that chain i's draft at step k
            is accepted, where those before it were; independent of each other. Answers are half-open; the first token
            of each is known before its first round, as in `walks.walk`.
        steps: most drafts a round.
    """
    answers = []
    for number, (chances, spans) in enumerate(items):
        for begin, end in spans:
            first = max(begin, 1) - 1  # the chain of the first round
            if end - 2 > first:
                answers.append((number, chances[:steps, first : end - 2].T.double()))
    answers.sort(key=lambda item: -len(item[1]))
    total = torch.zeros(len(items), steps, dtype=torch.float64)
    begin = 0
    while begin < len(answers):
        together = answers[begin : begin + max(TOGETHER // len(answers[begin][1]), 1)]
        owners = torch.tensor([number for number, _ in together])
        total.index_add_(0, owners, _rounds_of_answers([chances for _, chances in together], steps))
        begin += len(together)
    return total


def _rounds_of_answers(answers: Sequence[Tensor], steps: int) -> Tensor:
    """[S, steps], the expected rounds of each answer.

    Args:
        answers: S times [L, steps], the chances of the chains of its L tokens after the first; the longest comes first.
    """
    padded = torch.nn.utils.rnn.pad_sequence(list(answers), batch_first=True)
    longest = padded.shape[1]
    reach = torch.cat([torch.ones_like(padded[..., :1]), padded.cumprod(2)], 2)
    moves = torch.zeros(longest, steps, len(answers), steps + 1, dtype=torch.float64)
    for drafts in range(1, steps + 1):
        moves[:, drafts - 1, :, :drafts] = (reach[..., :drafts] - reach[..., 1 : drafts + 1]).transpose(0, 1)
        moves[:, drafts - 1, :, drafts] = reach[..., drafts].T
    visits = torch.zeros(longest + steps + 1, steps, len(answers), dtype=torch.float64)
    visits[0] = 1
    here, onward = (
        visits.numpy(),
        moves.permute(0, 3, 1, 2).contiguous().numpy(),
    )  # small steps, which NumPy takes faster
    for place in range(longest):  # a round at a token that is `place` after the first commits 1 .. steps + 1 tokens
        here[place + 1 : place + steps + 2] += here[place] * onward[place]
    inside = torch.arange(longest)[:, None] < torch.tensor([len(item) for item in answers])
    return (visits[:longest] * inside[:, None]).sum(0).T
