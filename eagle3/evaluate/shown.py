"""What a drafter does on a sample, round by round, for people to look at.

Shapes: T tokens, K draft steps.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from eagle3.data.loader import collate
from eagle3.data.store import StoredSample
from eagle3.draft.model import DraftModel
from eagle3.draft.ttt import draft_tokens
from eagle3.draft.vocab import DraftVocab
from eagle3.evaluate.walks import answer_spans, rounds

PROMPT_TOKENS = 32
"""Tokens of a prompt's end that are shown."""
ANSWER_TOKENS = 64
"""Tokens of an answer's beginning that are shown."""


@dataclass(frozen=True)
class Round:
    """A round of greedy speculative decoding, all of it target ids.

    Attributes:
        accepted: drafts that are the answer's next tokens.
        missed: the draft after them, which is not; None where all were accepted, or the answer ends.
        own: the answer's token after the accepted drafts, which the target gives; None where the answer ends.
    """

    accepted: list[int]
    missed: int | None
    own: int | None


@dataclass(frozen=True)
class Shown:
    """The beginning of a sample's first answer that has a round; its first token comes from the prefill.

    Attributes:
        prompt: ids before the answer, the last of them.
    """

    sample: str
    prompt: list[int]
    first: int
    rounds: list[Round]

    @property
    def length(self) -> float:
        """Acceptance length of these rounds."""
        return sum(len(item.accepted) + (item.own is not None) for item in self.rounds) / len(self.rounds)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def show(model: DraftModel, sample: StoredSample, vocab: DraftVocab, steps: int, max_length: int) -> Shown | None:
    """A sample's first rounds, on the device of the model; None where it has none within `max_length` tokens.

    Args:
        steps: K, drafts a round.
    """
    ids = sample.input_ids.tolist()
    spans = [(begin, min(end, max_length)) for begin, end in answer_spans(sample.loss_mask)]
    span = next(((begin, end) for begin, end in spans if end - 1 > max(begin, 1)), None)
    if span is None:
        return None
    begin, end = max(span[0], 1), min(span[1], span[0] + ANSWER_TOKENS)
    batch = collate([[sample]], end).to(next(model.parameters()).device)
    drafts = draft_tokens(model, batch, vocab, steps)[:, 0].cpu()
    following = torch.stack([batch.input_ids[0].cpu().roll(-2 - k) for k in range(steps)])
    found = []
    for last, accepted, commit in rounds(drafts == following, [(begin, end)], steps):
        tokens = ids[last + 1 : last + 1 + commit]
        missed = int(drafts[accepted, last - 1]) if accepted < steps else -1
        ended = commit == accepted
        found.append(
            Round(tokens[:accepted], None if ended or missed < 0 else missed, None if ended else tokens[accepted])
        )
    return Shown(sample.id, ids[max(begin - PROMPT_TOKENS, 0) : begin], ids[begin], found)
