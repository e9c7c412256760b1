from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from eagle3.data.store import StoreReader
from eagle3.data.store_format import SampleInfo
from eagle3.draft.config import DraftConfig
from eagle3.draft.model import DraftModel
from eagle3.draft.vocab import DraftVocab
from eagle3.errors import ProblemsError
from eagle3.evaluate.acceptance import MOST_SOURCES, acceptance, samples_by_source
from eagle3.evaluate.bootstrap import ratio_intervals
from eagle3.evaluate.result import AcceptanceResult, SourceAcceptance
from eagle3.evaluate.walks import Walk, add_walks, answer_spans, walk

from ..serve.cases import VOCAB, make_contract, make_samples, make_store, make_target_config
from .simulate import Drafter, make_tokens, serve_answer

OUTPUTS = (1, 5, 8)
VOCABULARY = DraftVocab(torch.tensor([0, 2, 3, 5, 8, 9, 13, 17, 20, 21, 30]), VOCAB)
MASKS = (
    [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0],  # two answers
    [0, 0, 1, 0, 0, 1, 1, 1, 1, 1, 1],  # an answer of one token; the last runs to the sample's end
    [0, 1, 1],
    [0, 0, 0, 1],  # no round at all
    [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
)


def make_model(**overrides: object) -> DraftModel:
    """In float64, every weight random."""
    config = DraftConfig.from_target(make_target_config(), 3, draft_vocab_size=len(VOCABULARY), head_dim=6, **overrides)
    model = DraftModel(config).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in model.parameters():
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            value.copy_(1 + 0.3 * noise if value.ndim == 1 else 0.4 * noise)
    return model


def drafter_of(model: DraftModel) -> Drafter:
    return Drafter({name: value.detach() for name, value in model.named_parameters()}, model.config, VOCABULARY)


def make_reader(folder: Path, model: DraftModel, masks: Sequence[Sequence[int]] = MASKS, most: int = 4) -> StoreReader:
    """A store of answers that the drafter can partly foresee."""
    random, drafter = Random(0), drafter_of(model)
    samples = []
    for sample, mask in zip(make_samples(masks), masks, strict=True):
        tokens = make_tokens(drafter, sample.aux_hidden_states.double(), mask, random, most)
        samples.append(replace(sample, input_ids=torch.tensor(tokens)))
    target = make_target_config()
    return StoreReader(make_store(folder, make_contract(target, OUTPUTS), target, samples))


def simulated(reader: StoreReader, model: DraftModel, steps: int) -> list[tuple[int, int]]:
    rounds = []
    for number in range(len(reader)):
        sample = reader.read(number)
        for begin, end in answer_spans(sample.loss_mask):
            aux = sample.aux_hidden_states.double()
            rounds += serve_answer(drafter_of(model), aux, sample.input_ids.tolist(), begin, end, steps)
    return rounds


@pytest.mark.parametrize("norm_output", [False, True])
def test_equals_autoregressive_serving_token_by_token(tmp_path: Path, norm_output: bool) -> None:
    model = make_model(norm_output=norm_output)
    reader = make_reader(tmp_path, model)
    result = acceptance(model, reader, VOCABULARY, 4)
    for steps in (1, 2, 3, 4):
        rounds = simulated(reader, model, steps)
        accepted, committed = [a for a, _ in rounds], sum(c for _, c in rounds)
        assert result.length_by_steps[steps - 1] == committed / len(rounds)
        if steps == 4:
            assert set(accepted) == {0, 1, 2, 3, 4}, "the case must exercise every outcome"
            assert result.histogram == tuple(accepted.count(count) for count in range(5))
            assert (result.rounds, result.committed) == (len(rounds), committed)
            assert result.rate == sum(accepted) / (4 * len(rounds))
            assert result.length == committed / len(rounds)
        item = result.by_steps[steps - 1]
        assert item.histogram == tuple(accepted.count(count) for count in range(steps + 1))
        assert (item.rounds, item.rate) == (len(rounds), sum(accepted) / (steps * len(rounds)))
        assert item.interval[0] <= item.length <= item.interval[1]
    assert result.samples == 4


def test_more_drafts_than_were_trained_or_than_an_answer_has(tmp_path: Path) -> None:
    """Ten a round on answers of up to eleven tokens, which end inside an accepted prefix."""
    model = make_model()
    reader = make_reader(tmp_path, model, MASKS[4:], most=9)
    result = acceptance(model, reader, VOCABULARY, 10)
    assert len(result.by_steps) == 10 and sum(result.full.histogram[3:]) > 0
    for steps in (1, 6, 10):
        rounds = simulated(reader, model, steps)
        assert result.length_by_steps[steps - 1] == sum(committed for _, committed in rounds) / len(rounds)
        assert result.by_steps[steps - 1].histogram == tuple(
            [accepted for accepted, _ in rounds].count(count) for count in range(steps + 1)
        )


def test_acceptance_by_depth_is_that_of_the_rounds_that_get_there(tmp_path: Path) -> None:
    """Counted in a simulation that drafts token by token: a draft behind the answer's end is none."""
    model = make_model()
    reader = make_reader(tmp_path, model)
    reached, taken = [0] * 3, [0] * 3
    for number in range(len(reader)):
        sample = reader.read(number)
        aux, tokens = sample.aux_hidden_states.double(), sample.input_ids.tolist()
        for begin, end in answer_spans(sample.loss_mask):
            last = max(begin, 1)
            while last < end - 1:
                drafts, accepted = drafter_of(model).draft(aux, tokens[: last + 1], 3), 0
                for depth in range(min(3, end - 1 - last)):
                    if accepted == depth:
                        reached[depth] += 1
                        accepted += drafts[depth] == tokens[last + 1 + depth]
                        taken[depth] += accepted == depth + 1
                last += accepted + 1
    assert reached[2] > taken[2] > 0
    assert acceptance(model, reader, VOCABULARY, 3).by_depth == tuple(
        one / all_ for one, all_ in zip(taken, reached, strict=True)
    )


def test_acceptance_by_source_is_that_of_its_samples(tmp_path: Path) -> None:
    model = make_model()
    plain = make_reader(tmp_path / "plain", model)
    assert acceptance(model, plain, VOCABULARY, 3).by_source == {}
    samples = [replace(plain.read(number), source=(None, "b", "a", "b", "a")[number]) for number in range(5)]
    target = make_target_config()
    reader = StoreReader(make_store(tmp_path / "named", make_contract(target, OUTPUTS), target, samples))
    found = acceptance(model, reader, VOCABULARY, 3).by_source
    assert list(found) == ["a", "b", "no source"]
    for name, indices in {"a": [2, 4], "b": [1, 3], "no source": [0]}.items():
        alone = acceptance(model, reader, VOCABULARY, 3, indices)
        assert found[name] == SourceAcceptance(
            alone.length, alone.rounds, alone.samples, alone.interval, alone.length_by_steps
        )


def test_of_many_sources_the_smallest_are_put_together() -> None:
    names = [f"s{number:02}" for number in range(MOST_SOURCES + 3) for _ in range(2)] + ["s22"]
    found = samples_by_source(
        [SampleInfo(str(place), 3, 1, name) for place, name in enumerate(names)], range(len(names))
    )
    assert list(found) == [*(f"s{number:02}" for number in range(MOST_SOURCES - 1)), "s22", "others"]
    assert found["others"] == [38, 39, 40, 41, 42, 43] and found["s22"] == [44, 45, 46]


def test_every_answer_token_but_the_first_is_committed_once(tmp_path: Path) -> None:
    model = make_model()
    reader = make_reader(tmp_path, model)
    spans = [answer_spans(reader.read(number).loss_mask) for number in range(len(reader))]
    expected = sum(end - begin - 1 for of_sample in spans for begin, end in of_sample)
    assert acceptance(model, reader, VOCABULARY, 3).committed == expected


def test_batching_and_padding_change_nothing(tmp_path: Path) -> None:
    model = make_model()
    reader = make_reader(tmp_path, model)
    together = acceptance(model, reader, VOCABULARY, 3, batch_tokens=10_000)
    assert acceptance(model, reader, VOCABULARY, 3, batch_tokens=1) == together
    assert acceptance(model, reader, VOCABULARY, 3, batch_tokens=30) == together


def test_only_the_chosen_samples_count_and_they_are_pooled(tmp_path: Path) -> None:
    model = make_model()
    reader = make_reader(tmp_path, model)
    first, last = (acceptance(model, reader, VOCABULARY, 3, [number]) for number in (0, 2))
    both = acceptance(model, reader, VOCABULARY, 3, [2, 0])
    assert first.rounds != last.rounds and first.length != last.length
    assert both.length == (first.committed + last.committed) / (first.rounds + last.rounds)
    assert both.length != (first.length + last.length) / 2


def test_step_accuracy_is_the_share_of_active_terms(tmp_path: Path) -> None:
    model = make_model()
    reader = make_reader(tmp_path, model, [[0, 0, 1, 1, 1, 1]])
    sample = reader.read(0)
    drafter, tokens = drafter_of(model), sample.input_ids.tolist()
    result = acceptance(model, reader, VOCABULARY, 2)
    firsts = [
        drafter.draft(sample.aux_hidden_states.double(), tokens[: p + 1], 1)[0] == tokens[p + 1] for p in (2, 3, 4)
    ]
    assert result.step_accuracy[0] == sum(firsts) / 3
    deeper = acceptance(model, reader, VOCABULARY, 4).step_accuracy
    assert math.isnan(deeper[3]) and not math.isnan(deeper[2])


def test_without_a_round_there_is_no_data_rather_than_a_number(tmp_path: Path) -> None:
    model = make_model()
    result = acceptance(model, make_reader(tmp_path, model, [[0, 0, 0, 1], [0, 1]]), VOCABULARY, 2)
    assert result.rounds == result.committed == result.samples == 0 and result.histogram == (0, 0, 0)
    numbers = (result.length, result.rate, *result.interval, *result.step_accuracy, *result.length_by_steps)
    assert all(math.isnan(number) for number in numbers)


def matches_of(chains: dict[int, int], tokens: int, steps: int) -> torch.Tensor:
    """[K, T], where chain i has so many leading matches (and none, then one more, after them)."""
    matches = torch.zeros(steps, tokens, dtype=torch.bool)
    for chain, leading in chains.items():
        matches[:leading, chain] = True
        matches[leading + 1 :, chain] = True
    return matches


@pytest.mark.parametrize(
    ("chains", "spans", "histogram", "committed", "reached"),
    [
        ({}, [(4, 8)], (3, 0, 0, 0), 3, (3, 0, 0)),
        ({3: 2}, [(4, 8)], (0, 0, 1, 0), 3, (1, 1, 1)),  # two drafts and the target's own token end the answer
        ({3: 3}, [(4, 8)], (0, 0, 0, 1), 3, (1, 1, 1)),  # the draft itself ends it
        ({3: 3}, [(4, 7)], (0, 0, 1, 0), 2, (1, 1, 0)),  # what lies behind the end is cut, and not reached
        ({3: 1, 5: 1}, [(4, 8)], (0, 2, 0, 0), 3, (2, 1, 0)),
        ({3: 1, 4: 3}, [(4, 8)], (1, 1, 0, 0), 3, (2, 1, 0)),  # chain 4 is jumped over
        ({3: 1, 8: 1}, [(4, 7), (9, 12)], (0, 2, 0, 0), 4, (2, 2, 0)),
        ({}, [(4, 5)], (0, 0, 0, 0), 0, (0, 0, 0)),  # an answer of one token needs no round
        ({0: 2}, [(0, 4)], (0, 0, 1, 0), 2, (1, 1, 0)),  # nothing can draft after token 0
        ({}, [], (0, 0, 0, 0), 0, (0, 0, 0)),
    ],
)
def test_walk(
    chains: dict[int, int],
    spans: list[tuple[int, int]],
    histogram: tuple[int, ...],
    committed: int,
    reached: tuple[int, ...],
) -> None:
    assert walk(matches_of(chains, 12, 3), spans, 3) == Walk(histogram, committed, reached)


def test_walk_uses_no_more_than_its_steps() -> None:
    matches = torch.ones(5, 21, dtype=torch.bool)
    assert walk(matches, [(1, 21)], 3) == Walk((0, 0, 0, 5), 19, (5, 5, 5))
    assert walk(matches, [(1, 21)], 1) == Walk((0, 10), 19, (10,))


def test_walks_add_up() -> None:
    total = add_walks([Walk((1, 2, 0), 5, (3, 2)), Walk((0, 1, 3), 11, (4, 4))], 2)
    assert total == Walk((1, 3, 3), 16, (7, 6)) and total.rounds == 7 and total.accepted == 9
    assert total.taken == (6, 3)


def test_answer_spans() -> None:
    assert answer_spans(torch.tensor([1, 1, 0, 1, 0, 0, 1], dtype=torch.bool)) == [(0, 2), (3, 4), (6, 7)]
    assert answer_spans(torch.zeros(3, dtype=torch.bool)) == []


def bootstrap_interval(walks: Sequence[Walk], seed: int = 0) -> tuple[float, float]:
    above, below = ([[getattr(item, name)] for item in walks] for name in ("committed", "rounds"))
    return ratio_intervals(torch.tensor(above), torch.tensor(below), seed)[0]


def test_bootstrap_in_blocks_is_the_bootstrap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the plain one, sample by sample, with the same draws; the last block is a shorter one."""
    monkeypatch.setattr("eagle3.evaluate.bootstrap._ENTRIES", 7 * 64)
    generator = torch.Generator().manual_seed(2)
    below = torch.randint(1, 30, (7, 2), generator=generator)
    above = below + torch.randint(0, 30, (7, 2), generator=generator)
    found = ratio_intervals(above, below, seed=4)
    drawing, draws = torch.Generator().manual_seed(4), []
    for count in [64] * 15 + [40]:
        draws += torch.randint(7, (count, 7), generator=drawing).tolist()
    for column in range(2):
        ratios = sorted(
            sum(int(above[one, column]) for one in drawn) / sum(int(below[one, column]) for one in drawn)
            for drawn in draws
        )
        assert found[column] == pytest.approx((ratios[25], ratios[-26]))


def test_bootstrap_is_seeded_and_brackets_the_pooled_length() -> None:
    random = Random(3)
    walks = [Walk((random.randint(1, 20), random.randint(1, 20)), 0, (0,)) for _ in range(40)]
    walks = [replace(item, committed=item.rounds + item.accepted) for item in walks]
    pooled = add_walks(walks, 1)
    low, high = bootstrap_interval(walks)
    assert (low, high) == bootstrap_interval(walks) != bootstrap_interval(walks, seed=1)
    assert low < pooled.committed / pooled.rounds < high
    few_low, few_high = bootstrap_interval(walks[:5])
    assert few_high - few_low > high - low
    assert bootstrap_interval([Walk((1, 1), 3, (2,))] * 9) == (1.5, 1.5)
    assert bootstrap_interval([Walk((1, 1), 3, (2,)), Walk((0, 0), 0, (0,))]) == (1.5, 1.5)


def test_bootstrap_covers_the_truth_about_as_often_as_it_says() -> None:
    random = Random(0)
    covered = 0
    for _ in range(60):
        walks = [Walk((10 - hits, hits), 10 + hits, (10,)) for hits in (random.choice((1, 3, 5, 9)) for _ in range(30))]
        low, high = bootstrap_interval(walks)
        covered += low <= 1.45 <= high
    assert 50 <= covered < 60


def test_result_is_plain_data(tmp_path: Path) -> None:
    model = make_model()
    result = acceptance(model, make_reader(tmp_path, model, MASKS[:1]), VOCABULARY, 2)
    assert isinstance(result, AcceptanceResult) and all(isinstance(item, float) for item in result.step_accuracy)


def test_states_that_are_not_finite_are_refused_by_name_instead_of_counted_as_misses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    reader = make_reader(tmp_path, model)
    read = reader.read
    monkeypatch.setattr(
        reader, "read", lambda index: replace(read(index), aux_hidden_states=read(index).aux_hidden_states * math.nan)
    )
    with pytest.raises(ProblemsError, match=rf"store\.non_finite.*{reader.samples[0].id}"):
        acceptance(model, reader, VOCABULARY, 2)
