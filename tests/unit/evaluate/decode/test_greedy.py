"""Greedy decoding says what the target says, whatever the drafter drafts."""

from __future__ import annotations

import pytest
import torch

from eagle3.evaluate.decode.growth import Drafting
from eagle3.evaluate.decode.loop import Decoded, decode
from eagle3.evaluate.decode.target import CachedTarget
from eagle3.target.generate import generate

from .cases import CHAIN, FAMILIES, PLANS, Foreseeing, generator, make_drafter, make_target

PROMPTS = ([3, 1, 4, 1, 5, 9, 2], [7])
CASES = [(family, plan) for family in FAMILIES for plan in ("chain", "tree")] + [("llama", "wide")]
NO_STOP = (99,)  # a token that does not exist


def own(target: CachedTarget, prompt: list[int], limit: int, stop: tuple[int, ...]) -> list[int]:
    """What Transformers' own loop generates."""
    return generate(target.model, [prompt], [limit], stop, 0.0, [0])[0].ids


def said(
    target: CachedTarget, prompt: list[int], plan: Drafting, noise: float | None, limit: int, stop: tuple[int, ...]
) -> Decoded:
    """With a random drafter, or one that foresees."""
    ids = [0, 1, 2, 3, 5, 6, 8, 9, 11]
    drafter = make_drafter(target, ids) if noise is None else Foreseeing(target, prompt[0], range(12), noise)
    return decode(target, drafter, prompt, limit, stop, plan, None, generator())


@pytest.mark.parametrize(("family", "plan"), CASES)
def test_greedy_answers_are_the_targets_own_token_for_token(family: str, plan: str) -> None:
    target = make_target(family)
    lengths = []
    for prompt in PROMPTS:
        expected = own(target, prompt, 12, NO_STOP)
        for noise in (None, 0.0) if len(prompt) == 1 else (0.0, 2.0):
            found = said(target, prompt, PLANS[plan], noise, 12, NO_STOP)
            assert (found.ids, found.finish) == (expected, "length")
            assert sum(found.accepted) + len(found.accepted) in (11, 12)  # the last round may end in a draft
            lengths.append(11 / len(found.accepted))
    assert min(lengths) < 2.5 and max(lengths) >= 2.75, "the case must have misses and whole rounds"


@pytest.mark.parametrize("plan", ["chain", "tree"])
def test_answers_end_inside_an_accepted_prefix(plan: str) -> None:
    """At every length: a stop token and a limit in the first, the middle and the last place of a round."""
    target, prompt = make_target(), PROMPTS[0]
    whole = own(target, prompt, 20, NO_STOP)
    cut_inside = 0
    for limit in range(1, 11):
        found = said(target, prompt, PLANS[plan], 0.0, limit, NO_STOP)
        assert (found.ids, found.finish) == (whole[:limit], "length")
        left = limit - 1
        for accepted in found.accepted[:-1]:
            assert accepted == PLANS[plan].steps
            left -= accepted + 1
        assert not found.accepted or found.accepted[-1] == min(left, PLANS[plan].steps)
        cut_inside += 0 < left <= PLANS[plan].steps
    assert cut_inside > 5
    for token in sorted(set(whole)):
        expected = own(target, prompt, 20, (token,))
        found = said(target, prompt, PLANS[plan], 0.0, 20, (token, 99))
        assert (found.ids, found.finish) == (expected, "stop") and found.ids[-1] == token
        assert sum(found.accepted) <= len(expected) - 1


def test_in_float32_too() -> None:
    target = make_target("deepseek_v3")
    target.model.float()
    drafter = Foreseeing(target, 3, range(12), 1.0)
    found = decode(target, drafter, PROMPTS[0], 24, NO_STOP, CHAIN, None, generator())
    assert found.ids == own(target, PROMPTS[0], 24, NO_STOP) and sum(found.accepted) > 5


def test_the_cache_holds_the_kept_tokens_and_nothing_else() -> None:
    """After rounds of a tree, what the target says next and its states are those of a fresh pass."""
    for family in FAMILIES:
        target = make_target(family)
        drafter = Foreseeing(target, 3, range(12), 2.0)
        found = decode(target, drafter, PROMPTS[0], 15, NO_STOP, PLANS["tree"], None, generator())
        tokens = [*PROMPTS[0], *found.ids]
        assert max(found.accepted) > 0
        # All but the last token, or less where the last round was cut inside an accepted prefix.
        assert len(tokens) - 1 <= target.length
        keys = [layer.keys.clone() for layer in target._cache.layers]
        target.prefill(tokens[:-1])
        for kept, fresh in zip(keys, target._cache.layers, strict=True):
            torch.testing.assert_close(kept[..., : len(tokens) - 1, :], fresh.keys, rtol=0, atol=1e-9)
