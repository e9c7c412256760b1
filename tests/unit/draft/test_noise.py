"""Noise on aux states: its size, and that it depends on seed, step, sample and position alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eagle3.draft.batch import DraftBatch
from eagle3.draft.config import TTTSettings
from eagle3.draft.noise import add_noise, noise_keys
from eagle3.errors import ProblemsError

from .cases import AUX, HIDDEN, gradients, make_batch, make_document, make_model, run_loss

DOCUMENTS = [make_document([0, 0, 1, 1, 1, 1], 1), make_document([0, 1, 1, 1], 2), make_document([1, 1, 1, 1, 1], 3)]
NAMES = ["a", "b", "c"]


def packed(rows: list[list[int]], padding: int = 0) -> DraftBatch:
    """These documents in rows, with noise."""
    batch = make_batch([[DOCUMENTS[number] for number in row] for row in rows], padding)
    batch = replace(batch, sample_ids=[NAMES[number] for row in rows for number in row])
    return batch.with_noise(0.25, seed=3, step=7)


def of_documents(batch: DraftBatch, rows: list[list[int]]) -> dict[int, torch.Tensor]:
    width, found = batch.input_ids.shape[1], {}
    for row, documents in enumerate(rows):
        begin = row * width
        for number in documents:
            end = begin + len(DOCUMENTS[number].ids)
            found[number], begin = batch.aux_rows(torch.arange(begin, end)), end
    return found


def test_a_sample_gets_the_same_wherever_it_lies() -> None:
    one = of_documents(packed([[0, 1, 2]]), [[0, 1, 2]])
    for rows in ([[0], [1], [2]], [[2, 0], [1]], [[1, 2], [0]]):
        found = of_documents(packed(rows, padding=len(rows) - 2), rows)
        assert all(torch.equal(found[number], one[number]) for number in one)
    assert not any(torch.equal(one[number], DOCUMENTS[number].aux) for number in one)
    picked = packed([[0, 1, 2]]).aux_rows(torch.tensor([4, 9]))
    assert torch.equal(picked, torch.stack([one[0][4], one[1][3]])), "rows that are picked out of a batch too"


def test_it_is_uniform_and_a_share_of_each_slots_size() -> None:
    sizes = torch.tensor([0.01, 1.0, 100.0]).repeat_interleave(200)
    aux = torch.randn(400, 600, generator=torch.Generator().manual_seed(0)) * sizes
    keys = noise_keys(["a"], 0, 1).expand(400)
    noise = add_noise(aux.clone(), 3, 0.2, keys, torch.arange(400)) - aux
    unit = (noise.unflatten(1, (3, 200)) / aux.unflatten(1, (3, 200)).square().mean(-1, keepdim=True).sqrt()) / 0.2
    assert unit.abs().max() < 1.0001
    for slot in range(3):
        counts = torch.histc(unit[:, slot], 10, -1, 1)
        assert ((counts / counts.sum() - 0.1).abs() < 0.005).all(), "400 x 200 draws"
    flat = unit[:, 1]
    assert abs(float((flat[1:] * flat[:-1]).mean())) < 0.005 > abs(float((flat[:, 1:] * flat[:, :-1]).mean()))


def test_seed_step_and_sample_each_change_it() -> None:
    batch = packed([[0, 1, 2]])
    places = torch.arange(6)
    others = [
        batch.with_noise(0.25, seed=4, step=7),
        batch.with_noise(0.25, seed=3, step=8),
        replace(batch, sample_ids=["d", "b", "c"]).with_noise(0.25, seed=3, step=7),
    ]
    assert torch.equal(batch.aux_rows(places), packed([[0, 1, 2]]).aux_rows(places))
    assert not any(torch.equal(batch.aux_rows(places), other.aux_rows(places)) for other in others)


@pytest.mark.parametrize("chunk", [None, 4])
def test_loss_and_gradients_are_those_of_the_states_with_noise(chunk: int | None) -> None:
    """In both implementations of the step; the teacher has none."""
    model, rows, settings = make_model(), [[0, 1], [2]], TTTSettings(3, chunk=chunk)
    batch = packed(rows)
    noised = of_documents(batch, rows)
    documents = [[replace(DOCUMENTS[number], aux=noised[number]) for number in row] for row in rows]
    expected, found = run_loss(model, make_batch(documents), settings), run_loss(model, batch, settings)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-12, atol=0)
    slopes = gradients(model, expected.loss)
    for name, value in gradients(model, found.loss).items():
        torch.testing.assert_close(value, slopes[name], rtol=0, atol=1e-11)
    plain = run_loss(model, replace(batch, noise_keys=None), settings)
    assert abs(float((plain.loss - found.loss).detach())) > 1e-4


def test_bf16_states_stay_bf16_and_the_batch_itself_is_left_alone() -> None:
    batch = packed([[0]])
    low = replace(batch, aux=batch.aux.bfloat16())
    before = low.aux.clone()
    noised = low.aux_rows(torch.arange(6))
    assert noised.dtype == torch.bfloat16 and noised.shape == (6, AUX * HIDDEN)
    assert torch.equal(low.aux, before)
    torch.testing.assert_close(noised.double(), batch.aux_rows(torch.arange(6)), rtol=0.02, atol=0.02)


def test_a_width_below_zero_is_refused() -> None:
    with pytest.raises(ProblemsError, match=r"ttt\.hidden_noise is -1"):
        TTTSettings(hidden_noise=-1)
