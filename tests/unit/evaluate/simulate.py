"""Greedy speculative decoding, one token at a time, with the slow reference drafter: what the walk must equal."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import torch

from eagle3.draft.config import DraftConfig
from eagle3.draft.reference import State, draft_logits
from eagle3.draft.vocab import DraftVocab


class Drafter:
    """Drafts from its own drafts; sees committed tokens only."""

    def __init__(self, state: State, config: DraftConfig, vocab: DraftVocab) -> None:
        self.state, self.config, self.vocab = state, config, vocab

    def draft(self, aux: torch.Tensor, committed: Sequence[int], steps: int) -> list[int]:
        tokens = list(committed)
        for step in range(1, steps + 1):
            start = len(committed) - 2
            logits = draft_logits(self.state, self.config, aux, torch.tensor(tokens), start, step)
            tokens.append(int(self.vocab.ids[logits[-1].argmax()]))
        return tokens[len(committed) :]


def serve_answer(
    drafter: Drafter, aux: torch.Tensor, tokens: Sequence[int], begin: int, end: int, steps: int
) -> list[tuple[int, int]]:
    """(accepted, committed) of each round in which a server whose target says `tokens` answers from begin to end."""
    rounds = []
    committed = list(tokens[: begin + 1])
    while len(committed) < end:
        rest = list(tokens[len(committed) : end])
        drafts = drafter.draft(aux, committed, steps)
        accepted = 0
        while accepted < min(steps, len(rest)) and drafts[accepted] == rest[accepted]:
            accepted += 1
        new = rest[: accepted + 1]  # the accepted drafts and the target's own next token
        committed += new
        rounds.append((accepted, len(new)))
    return rounds


def make_tokens(drafter: Drafter, aux: torch.Tensor, mask: Sequence[int], random: Random, most: int) -> list[int]:
    """Tokens whose answers follow the drafter for a random number of tokens, up to `most`, again and again."""
    vocab_size = drafter.config.vocab_size
    tokens = [random.randrange(vocab_size) for _ in range(2)]
    while len(tokens) < len(mask):
        if mask[len(tokens)]:
            drafts = drafter.draft(aux, tokens, most)
            tokens += drafts[: random.randint(0, most)]
        tokens.append(random.randrange(vocab_size))
    return tokens[: len(mask)]


class SamplingServer:
    """Speculative sampling over a text that the target is known to say, by enumeration of what may be accepted.

    Attributes:
        target: [T, V], the target's logits at each of the text's tokens.
        drafter: reads the text's own tokens, which accepted drafts are.
    """

    def __init__(self, drafter: Drafter, aux: torch.Tensor, target: torch.Tensor, temperature: float) -> None:
        self.drafter, self.aux, self.target, self.temperature = drafter, aux, target, temperature
        self.known: dict[tuple[int, int, str], float] = {}

    def chance(self, tokens: Sequence[int], last: int, depth: int, kind: str) -> float:
        """That the draft at a depth of the round after token `last` is accepted, those before it being the text's."""
        if (last, depth, kind) not in self.known:
            self.known[last, depth, kind] = self._chance(tokens, last, depth, kind)
        return self.known[last, depth, kind]

    def _chance(self, tokens: Sequence[int], last: int, depth: int, kind: str) -> float:
        q = [0.0] * self.target.shape[1]
        logits = draft_logits(
            self.drafter.state, self.drafter.config, self.aux, torch.tensor(tokens), last - 1, depth + 1
        )[depth]
        shares = torch.softmax(logits / self.temperature, 0).tolist()
        for share, token in zip(shares, self.drafter.vocab.ids.tolist(), strict=True):
            q[token] = share
        p = torch.softmax(self.target[last + depth] / self.temperature, 0).tolist()
        if kind == "overlap":
            return sum(min(one, other) for one, other in zip(p, q, strict=True))
        own = tokens[last + 1 + depth]
        return min(1.0, q[own] / p[own])

    def rounds(self, tokens: Sequence[int], last: int, end: int, steps: int, kind: str) -> float:
        """Expected rounds until the answer is committed up to its end."""
        left = end - 1 - last
        if left <= 0:
            return 0.0
        total, here = 1.0, 1.0
        for accepted in range(steps + 1):
            goes_on = self.chance(tokens, last, accepted, kind) if accepted < min(steps, left) else 0.0
            total += here * (1 - goes_on) * self.rounds(tokens, last + min(accepted + 1, left), end, steps, kind)
            here *= goes_on
        return total
