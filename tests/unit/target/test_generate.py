from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from eagle3.errors import ProblemsError
from eagle3.target.generate import Generated, eos_ids, generate, prompt_seed
from tests.unit.target.cases import SHARED_PREFIX_BATCH, make_engine

TinyTarget = Callable[[str], Path]
LIMIT = 24


def greedy_alone(model: PreTrainedModel, prompt: Sequence[int], limit: int, stop_ids: Sequence[int]) -> Generated:
    """The plainest greedy decoding: the whole sequence again for every token, no cache, no padding."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(limit):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] in stop_ids:
                return Generated(ids[len(prompt) :], "stop")
    return Generated(ids[len(prompt) :], "length")


def run(model: PreTrainedModel, prompts: Sequence[Sequence[int]], stop_ids: Sequence[int]) -> list[Generated]:
    return generate(model, prompts, [LIMIT] * len(prompts), stop_ids, 0.0, [0] * len(prompts))


@pytest.mark.parametrize("name", ["llama", "qwen3", "deepseek_v3"])
def test_batched_greedy_equals_one_at_a_time(tiny_target: TinyTarget, name: str) -> None:
    """PAD = EOS in all of them; one answer is made to stop in the middle of its batch."""
    model = make_engine(tiny_target(name), [0]).model
    free = [greedy_alone(model, prompt, LIMIT, []) for prompt in SHARED_PREFIX_BATCH]
    stop = free[0].ids[5]
    expected = [greedy_alone(model, prompt, LIMIT, [stop]) for prompt in SHARED_PREFIX_BATCH]
    assert {answer.finish for answer in expected} == {"stop", "length"}
    assert run(model, SHARED_PREFIX_BATCH, [stop]) == expected
    assert [run(model, [prompt], [stop])[0] for prompt in SHARED_PREFIX_BATCH] == expected


def test_the_first_stop_token_ends_an_answer_whichever_it_is(tiny_target: TinyTarget) -> None:
    model = make_engine(tiny_target("llama"), [0]).model
    free = greedy_alone(model, SHARED_PREFIX_BATCH[0], LIMIT, []).ids
    never = [token for token in range(512) if token not in free]
    for other in (never[0], never[-1]):
        stops = sorted([free[3], other])
        expected = Generated(free[: free.index(free[3]) + 1], "stop")
        assert run(model, SHARED_PREFIX_BATCH, stops)[0] == expected


def test_a_prompt_may_hold_the_stop_token(tiny_target: TinyTarget) -> None:
    """A ChatML prompt is full of `<|im_end|>`, which is EOS and PAD."""
    model = make_engine(tiny_target("llama"), [0]).model
    (eos,) = eos_ids(model)
    prompts = [[eos, 7, eos, 8, eos], [9, 10], [eos]]
    expected = [greedy_alone(model, prompt, LIMIT, [eos]) for prompt in prompts]
    assert run(model, prompts, [eos]) == expected


def test_each_answer_has_its_own_limit(tiny_target: TinyTarget) -> None:
    model = make_engine(tiny_target("llama"), [0]).model
    (eos,) = eos_ids(model)
    answers = generate(model, SHARED_PREFIX_BATCH, [3, 7, 5], [eos], 0.0, [0, 0, 0])
    for prompt, limit, answer in zip(SHARED_PREFIX_BATCH, [3, 7, 5], answers, strict=True):
        assert answer == greedy_alone(model, prompt, limit, [eos])


def test_the_checkpoints_sampling_defaults_are_not_applied(tiny_target: TinyTarget) -> None:
    model = make_engine(tiny_target("llama"), [0]).model
    expected = run(model, SHARED_PREFIX_BATCH, [511])
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.do_sample = True
    before = model.generation_config
    assert run(model, SHARED_PREFIX_BATCH, [511]) == expected
    assert model.generation_config is before


def test_eos_may_be_a_number_or_a_list_but_not_absent(tiny_target: TinyTarget) -> None:
    model = make_engine(tiny_target("llama"), [0]).model
    assert eos_ids(model) == (511,)
    model.generation_config.eos_token_id = [511, 3, 511]
    assert eos_ids(model) == (3, 511)
    model.generation_config.eos_token_id = None
    with pytest.raises(ProblemsError, match=r"target\.no_eos"):
        eos_ids(model)


def test_a_sample_does_not_depend_on_the_prompts_beside_it(tiny_target: TinyTarget) -> None:
    model = make_engine(tiny_target("llama"), [0]).model
    seeds = [prompt_seed(0, name) for name in "abc"]
    together = generate(model, SHARED_PREFIX_BATCH, [LIMIT] * 3, [511], 1.0, seeds)
    alone = [
        generate(model, [prompt], [LIMIT], [511], 1.0, [seed])[0]
        for prompt, seed in zip(SHARED_PREFIX_BATCH, seeds, strict=True)
    ]
    assert together == alone
    assert generate(model, SHARED_PREFIX_BATCH, [LIMIT] * 3, [511], 1.0, [seed + 1 for seed in seeds]) != together
    assert run(model, SHARED_PREFIX_BATCH, [511]) != together


def test_samples_follow_the_targets_distribution(tiny_target: TinyTarget) -> None:
    """First tokens of 2,000 samples against softmax(logits / T), by total variation."""
    model = make_engine(tiny_target("llama"), [0]).model
    prompt, temperature, count = SHARED_PREFIX_BATCH[2], 0.7, 2000
    with torch.inference_mode():
        expected = (model(input_ids=torch.tensor([prompt])).logits[0, -1] / temperature).softmax(-1)
    answers = generate(model, [prompt] * count, [1] * count, [511], temperature, range(count))
    found = torch.bincount(torch.tensor([answer.ids[0] for answer in answers]), minlength=512) / count
    assert (found - expected).abs().sum() / 2 < 0.1
    greedy = torch.nn.functional.one_hot(expected.argmax(), 512)
    assert (greedy - expected).abs().sum() / 2 > 0.3, "a flat test would pass for greedy too"


def test_top_k_and_top_p_leave_the_likeliest_tokens_only(tiny_target: TinyTarget) -> None:
    model = make_engine(tiny_target("llama"), [0]).model
    prompt, count = SHARED_PREFIX_BATCH[2], 200
    with torch.inference_mode():
        chances, order = model(input_ids=torch.tensor([prompt])).logits[0, -1].softmax(-1).sort(descending=True)
    half = int((chances.cumsum(0) < 0.5).sum()) + 1

    def drawn(**narrow: object) -> set[int]:
        answers = generate(model, [prompt] * count, [1] * count, [511], 1.0, range(count), **narrow)  # type: ignore[arg-type]
        return {answer.ids[0] for answer in answers}

    assert drawn(top_k=3) == set(order[:3].tolist())
    assert drawn(top_k=1) == drawn(top_p=1e-6) == {int(order[0])}
    assert drawn(top_p=0.5) <= set(order[:half].tolist()) and len(drawn(top_p=0.5)) > 3
    assert len(drawn()) > half


@pytest.mark.parametrize("value", [[], "x", [1.5], -1, 512])
def test_an_eos_that_is_no_token_is_refused(tiny_target: TinyTarget, value: object) -> None:
    model = make_engine(tiny_target("llama"), [0]).model
    model.generation_config.eos_token_id = value
    with pytest.raises(ProblemsError, match=r"target\.no_eos"):
        eos_ids(model)


def test_a_target_that_computes_nan_is_refused_and_gives_no_answer(tiny_target: TinyTarget) -> None:
    model = make_engine(tiny_target("llama"), [0]).model
    model.model.norm.weight.data[0] = torch.nan
    with pytest.raises(ProblemsError, match=r"target\.not_finite"):
        run(model, SHARED_PREFIX_BATCH, [511])
