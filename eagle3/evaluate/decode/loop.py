"""One answer by speculative decoding.

Shapes: V target vocab.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3.evaluate.decode.drafter import Drafter
from eagle3.evaluate.decode.draws import Narrowing
from eagle3.evaluate.decode.growth import Drafting, grow
from eagle3.evaluate.decode.rules import Kept, keep_greedy, keep_sampled
from eagle3.evaluate.decode.target import CachedTarget
from eagle3.evaluate.decode.tree import Tree
from eagle3.target.generate import Generated


@dataclass(frozen=True)
class Decoded(Generated):
    """An answer, and how it came about.

    Attributes:
        accepted: accepted drafts of each round; the last one's are cut at the end of the answer.
        seconds: that it took, prompt included.
    """

    accepted: list[int]
    seconds: float


def decode(
    target: CachedTarget,
    drafter: Drafter,
    prompt: Sequence[int],
    limit: int,
    stop_ids: Sequence[int],
    plan: Drafting,
    narrowing: Narrowing | None,
    generator: torch.Generator,
) -> Decoded:
    """The target's answer to a prompt.

    The first token comes from the prompt's own pass. Then each round commits the accepted drafts and one token of the
    target's, cut at the first stop token and at the limit.

    Args:
        prompt: token ids, at least one.
        limit: most tokens of the answer, at least one.
        stop_ids: end-of-text tokens.
        narrowing: how the target is sampled; None: greedily.
        generator: on the CPU; of all draws, the drafts' included.

    Raises:
        ProblemsError: kinds `target.not_finite`, `decode.not_finite`.
    """
    began = time.perf_counter()
    drafter.reset()
    seen = target.prefill(prompt)
    answer = [keep(Tree(), seen.logits, drafter, narrowing, generator)[1]]
    aux, following = seen.aux, [*prompt[1:], *answer]
    accepted: list[int] = []
    while answer[-1] not in stop_ids and len(answer) < limit:
        drafter.extend(aux, following)
        tree = grow(drafter, plan, generator).cut(limit - len(answer))
        seen = target.verify(answer[-1], tree)
        path, own = keep(tree, seen.logits, drafter, narrowing, generator)
        following = [*(tree.token(node) for node in path), own]
        kept = [0, *path]
        target.keep(kept)
        aux = seen.aux[kept]
        committed = _until_stop(following[: limit - len(answer)], stop_ids)
        accepted.append(min(len(path), len(committed)))
        answer += committed
    seconds = time.perf_counter() - began
    return Decoded(answer, "stop" if answer[-1] in stop_ids else "length", accepted, seconds)


def keep(tree: Tree, logits: Tensor, drafter: Drafter, narrowing: Narrowing | None, generator: torch.Generator) -> Kept:
    """The rule of `rules` for this way of decoding; `logits` [N + 1, V]."""
    if narrowing is None:
        return keep_greedy(tree, logits)
    return keep_sampled(tree, lambda node: narrowing.shares(logits[node]), drafter.vocab.ids, generator)


def _until_stop(tokens: list[int], stop_ids: Sequence[int]) -> list[int]:
    for place, token in enumerate(tokens):
        if token in stop_ids:
            return tokens[: place + 1]
    return tokens
