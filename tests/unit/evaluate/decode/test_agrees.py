"""Real decoding against offline evaluation: the same answers, the same drafter, the same figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from eagle3.data.store import StoredSample, StoreReader
from eagle3.draft.loss import TargetHead
from eagle3.evaluate.acceptance import acceptance
from eagle3.evaluate.decode.draws import Narrowing
from eagle3.evaluate.decode.growth import Drafting
from eagle3.evaluate.decode.loop import Decoded, decode
from eagle3.evaluate.decode.result import Answer, make_set
from eagle3.evaluate.decode.target import CachedTarget
from eagle3.evaluate.sampling import Sampling
from eagle3.target.generate import generate

from ...serve.cases import VOCAB, make_contract, make_store, make_target_config
from .cases import INDICES, generator, make_drafter, make_target

STOP = (4,)
IDS = [0, 2, 3, 4, 5, 7, 8, 11, 13, 17, 19, 22, 25, 29, 30]


def prompts(count: int, length: int = 3) -> list[list[int]]:
    return torch.randint(0, VOCAB, (count, length), generator=generator(5)).tolist()


@torch.no_grad()
def store(folder: Path, target: CachedTarget, asked: Sequence[list[int]], answers: Sequence[Decoded]) -> StoreReader:
    """The target's states of these answers, as extraction stores them."""
    samples = []
    for number, (prompt, answer) in enumerate(zip(asked, answers, strict=True)):
        ids = [*prompt, *answer.ids]
        mask = torch.zeros(len(ids), dtype=torch.bool)
        mask[len(prompt) :] = True
        last = target.model.base_model(torch.tensor([ids])).last_hidden_state[0].float()
        aux = target.prefill(ids).aux.float().clone()
        samples.append(StoredSample(f"s{number}", torch.tensor(ids), mask, aux, last))
    config = make_target_config(num_hidden_layers=4)
    return StoreReader(make_store(folder, make_contract(config, INDICES), config, samples))


def figures(answers: Sequence[Decoded], steps: int) -> Sequence[Answer]:
    return [Answer(str(n), len(item.ids), item.accepted, item.seconds) for n, item in enumerate(answers)]


def test_greedy_acceptance_is_what_evaluate_says_for_each_number_of_steps(tmp_path: Path) -> None:
    """In float32; answers that end by a stop token, by the limit, and after their first token are among them."""
    target = make_target(vocab=VOCAB)
    target.model.float()
    asked = prompts(7)
    own = [generate(target.model, [prompt], [14], STOP, 0.0, [0])[0].ids for prompt in asked]
    often = Counter(token for ids in own for token in ids).most_common(4)
    drafter = make_drafter(target, sorted(token for token, _ in often))  # so that it is right by chance
    drafter.model.float()
    by_steps = []
    for steps in (1, 2, 4):
        plan = Drafting(steps, 1, steps + 1)
        answers = [decode(target, drafter, prompt, 14, STOP, plan, None, generator()) for prompt in asked]
        by_steps.append((steps, answers))
    assert len({tuple(tuple(answer.ids) for answer in answers) for _, answers in by_steps}) == 1
    assert {answer.finish for answer in by_steps[0][1]} == {"stop", "length"}
    reader = store(tmp_path, target, asked, by_steps[0][1])
    expected = acceptance(drafter.model, reader, drafter.vocab, 4)
    for steps, answers in by_steps:
        found, wanted = make_set(figures(answers, steps), steps, steps, seed=0), expected.by_steps[steps - 1]
        assert (found.histogram, found.rounds) == (wanted.histogram, wanted.rounds)
        assert (found.length, found.rate) == (wanted.length, wanted.rate)
        assert found.committed == expected.committed
    assert found.by_depth == pytest.approx(expected.by_depth, nan_ok=True)
    assert expected.length > 1.1 and sum(expected.histogram[2:]) > 0, "the case must accept something"


def test_sampled_acceptance_is_what_evaluate_expects(tmp_path: Path) -> None:
    """Of the very texts that were sampled; the difference is within four standard errors over answers."""
    target = make_target(vocab=VOCAB)
    drafter = make_drafter(target, IDS)
    temperature, steps, count = 1.5, 2, 50
    plan = Drafting(steps, 1, steps + 1, "drawn", temperature)
    asked = prompts(count, 2)
    answers = [
        decode(target, drafter, prompt, 8, (), plan, Narrowing(temperature), generator(number))
        for number, prompt in enumerate(asked)
    ]
    reader = store(tmp_path, target, asked, answers)
    model = target.model
    head = TargetHead(model.lm_head.weight.float(), model.model.norm.weight.float(), 1e-5, "post_norm")
    drafter.model.float()
    expected = acceptance(drafter.model, reader, drafter.vocab, steps, sampling=Sampling(head, temperature)).sampling
    assert expected is not None
    found = make_set(figures(answers, steps), steps, steps, seed=0)
    error = (found.interval[1] - found.interval[0]) / 4
    assert found.length > 1.2
    assert abs(found.length - expected.of_text[-1]) < 4 * error
    assert abs(found.length - expected.lengths[-1]) < 4 * error
