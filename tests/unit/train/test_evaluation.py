"""Evaluations: the same on one, two and four ranks; what the record says; threads stand for ranks."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.data.store import StoredSample
from eagle3.evaluate.acceptance import acceptance
from eagle3.train.evaluation import Evaluation, evaluate
from eagle3.train.setup import Setup, make_setup
from tests.stores import train_config, write_random_store

SOURCES = ("chat", "code", None)


class Meeting:
    """Sums tensors of several threads."""

    def __init__(self, ranks: int) -> None:
        self.parts: dict[int, torch.Tensor] = {}
        self.barrier = threading.Barrier(ranks, timeout=60)

    def total(self, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        self.parts[rank] = tensor
        self.barrier.wait()
        total = torch.stack([self.parts[number] for number in sorted(self.parts)]).sum(0)
        self.barrier.wait()
        return total


class Rank:
    """One of them, as `eagle3.train.engines.base.Ranks` describes it."""

    device = torch.device("cpu")

    def __init__(self, index: int, count: int, meeting: Meeting) -> None:
        self.process_index, self.num_processes, self._meeting = index, count, meeting

    def autocast(self) -> AbstractContextManager[None]:
        return nullcontext()

    def no_sync(self, model: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        raise AssertionError

    def reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        assert reduction == "sum"
        return self._meeting.total(self.process_index, tensor)


def sourced(sample: StoredSample) -> StoredSample:
    """With a source, and answers that a random drafter sometimes foresees: few different tokens."""
    number = int(sample.id[1:])
    return replace(sample, source=SOURCES[number % 3], input_ids=sample.input_ids % 3)


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    folder = tmp_path_factory.mktemp("evaluation")
    store = write_random_store(folder / "store", count=30, change=sourced)
    values = {"eval_fraction": 0.5, "draft": {"draft_vocab_size": 5, "init": "random"}}
    return make_setup(train_config(store, folder / "run", **values), 1)


def on_ranks(setup: Setup, count: int, depths: int | None = None) -> list[Evaluation]:
    meeting, found = Meeting(count), {}

    def work(index: int) -> None:
        rank = Rank(index, count, meeting)
        found[index] = evaluate(deepcopy(setup.module), setup.head, setup.samples.heldout, 2, rank, depths)  # type: ignore[arg-type]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[index] for index in range(count)]


@pytest.mark.parametrize("count", [2, 4, 16])
def test_metrics_are_equal_however_many_ranks_share_the_samples(setup: Setup, count: int) -> None:
    one, found = on_ranks(setup, 1)[0], on_ranks(setup, count)
    assert all(other == found[0] for other in found)
    assert found[0].loss == pytest.approx(one.loss, abs=1e-6)
    assert replace(found[0], loss=one.loss) == one


def test_it_is_what_acceptance_counts_overall_by_depth_and_by_source(setup: Setup) -> None:
    found, heldout = on_ranks(setup, 1, depths=5)[0], setup.samples.heldout
    assert heldout is not None
    model, reader, vocab = setup.module.model, heldout.reader, setup.module.vocab
    at_three = acceptance(model, reader, vocab, 3, heldout.indices)
    deep = acceptance(model, reader, vocab, 5, heldout.indices).by_depth
    assert found.acceptance_length == at_three.length > 1 and found.acceptance_rate == at_three.rate
    assert found.acceptance_by_depth == [None if share != share else share for share in deep]
    assert found.acceptance_by_source == {name: source.length for name, source in at_three.by_source.items()}
    assert set(found.acceptance_by_source) == {"chat", "code", "no source"}
    assert len(on_ranks(setup, 1)[0].acceptance_by_depth) == 3, "the TTT steps, unless another number is given"


def test_a_store_without_sources_has_none_in_its_evaluations(tmp_path: Path) -> None:
    store = write_random_store(tmp_path / "store")
    setup = make_setup(train_config(store, tmp_path / "run", eval_fraction=0.5), 1)
    assert on_ranks(setup, 1)[0].acceptance_by_source == {}
