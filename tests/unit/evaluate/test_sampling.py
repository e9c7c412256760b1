"""Speculative sampling: chances and expected rounds against plain loops, enumeration and draws."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from eagle3.data.target_argmax import make_target_head
from eagle3.evaluate.acceptance import acceptance, walk_samples
from eagle3.evaluate.result import SamplingAcceptance
from eagle3.evaluate.sampling import Sampling, expected_rounds
from eagle3.evaluate.walks import answer_spans, walk

from .simulate import SamplingServer
from .test_acceptance import MASKS, VOCABULARY, drafter_of, make_model, make_reader


def sampling_of(reader: object, temperature: float) -> Sampling:
    tensors = {name: value.double() for name, value in reader.target_head().items()}  # type: ignore[attr-defined]
    return Sampling(make_target_head(tensors, reader.target_config, "post_norm"), temperature)  # type: ignore[attr-defined]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_equals_a_server_whose_every_outcome_is_enumerated(tmp_path: Path, temperature: float) -> None:
    model = make_model()
    reader = make_reader(tmp_path, model, MASKS[1:])
    sampling = sampling_of(reader, temperature)
    found = walk_samples(model, reader, VOCABULARY, 3, range(len(reader)), sampling=sampling)
    for number in range(len(reader)):
        sample = reader.read(number)
        tokens, target = sample.input_ids.tolist(), torch.full((len(sample.input_ids), 32), torch.nan).double()
        target[sample.loss_mask] = sampling.head.logits(sample.supervised_last.double())
        server = SamplingServer(drafter_of(model), sample.aux_hidden_states.double(), target, temperature)
        for place, kind in enumerate(("overlap", "own")):
            for steps in (1, 3):
                expected = sum(
                    server.rounds(tokens, max(begin, 1), end, steps, kind)
                    for begin, end in answer_spans(sample.loss_mask)
                )
                assert float(found.expected[number][place, steps - 1]) == pytest.approx(expected, rel=1e-5)


def test_the_greedy_figures_of_the_same_pass_are_unchanged_and_batching_changes_nothing(tmp_path: Path) -> None:
    model = make_model()
    reader = make_reader(tmp_path, model)
    sampling = sampling_of(reader, 1.0)
    plain = acceptance(model, reader, VOCABULARY, 4)
    both = acceptance(model, reader, VOCABULARY, 4, sampling=sampling)
    assert replace(both, sampling=None) == plain and plain.sampling is None
    alone = acceptance(model, reader, VOCABULARY, 4, batch_tokens=1, sampling=sampling)
    assert isinstance(both.sampling, SamplingAcceptance) and isinstance(alone.sampling, SamplingAcceptance)
    assert both.sampling.lengths == pytest.approx(alone.sampling.lengths)
    assert both.sampling.accepted == pytest.approx(alone.sampling.accepted)


def test_towards_temperature_0_it_is_greedy_decoding(tmp_path: Path) -> None:
    """On answers that are the target's greedy ones."""
    model = make_model()
    reader = make_reader(tmp_path, model)
    sampling = sampling_of(reader, 1e-4)
    read = reader.read

    def greedy(number: int) -> object:
        """The target's head is made to say the text: its rows are orthogonal, its states those rows."""
        sample = read(number)
        states = torch.nn.functional.one_hot(sample.input_ids.long().roll(-1), 32).float()
        return replace(sample, last_hidden_states=states[sample.loss_mask])

    reader.read = greedy  # type: ignore[method-assign, assignment]
    sampling = replace(sampling, head=replace(sampling.head, lm_head=torch.eye(32).double()))
    result = acceptance(model, reader, VOCABULARY, 4, sampling=sampling)
    assert result.length > 1.3 and result.sampling is not None
    assert result.sampling.lengths == pytest.approx(result.length_by_steps, rel=1e-6)
    assert result.sampling.of_text == pytest.approx(result.length_by_steps, rel=1e-6)
    assert result.sampling.accepted == pytest.approx(result.step_accuracy, abs=1e-6)


def test_expected_rounds_are_the_mean_of_drawn_walks() -> None:
    generator = torch.Generator().manual_seed(0)
    chances = torch.rand(3, 12, generator=generator, dtype=torch.float64)
    spans = [(0, 5), (6, 7), (8, 12)]
    (expected,) = expected_rounds([(chances, spans)], 3)
    draws = 4000
    for steps in (1, 2, 3):
        total = sum(
            walk(torch.rand(3, 12, generator=generator, dtype=torch.float64) < chances, spans, steps).rounds
            for _ in range(draws)
        )
        assert total / draws == pytest.approx(float(expected[steps - 1]), rel=0.02)


@pytest.mark.parametrize("together", [1, 20, 10_000])
def test_with_sure_and_hopeless_drafts_they_are_those_of_the_greedy_walk(
    monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    monkeypatch.setattr("eagle3.evaluate.sampling.TOGETHER", together)
    random, items = Random(1), []
    for number in range(30):
        matches = torch.rand(5, 20, generator=torch.Generator().manual_seed(number)) < 0.6
        begin = random.randrange(3)
        items.append((matches, [(begin, begin + random.randint(1, 8)), (12, 20)][: number % 3]))
    expected = expected_rounds([(matches.double(), spans) for matches, spans in items], 5)
    for found, (matches, spans) in zip(expected.tolist(), items, strict=True):
        assert found == pytest.approx([walk(matches, spans, steps).rounds for steps in range(1, 6)])
