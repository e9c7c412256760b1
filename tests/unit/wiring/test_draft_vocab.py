from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle3.draft.vocab import DraftVocab
from eagle3.wiring.draft_vocab import check_draft_vocab, draft_vocab_digest, target_ids_of
from tests.unit.wiring.cases import kinds

T2D = [0, 0, 1, 0, 0, 1, 0, 1, 0, 1, 0, 0]


def found(d2t: list[int], t2d: list[int] = T2D) -> list[str]:
    return kinds(check_draft_vocab(d2t, t2d, 12, "model.safetensors"))


def test_fault_09_offsets_of_the_chosen_ids_are_accepted() -> None:
    assert target_ids_of([2, 4, 5, 6]) == [2, 5, 7, 9]
    assert found([2, 4, 5, 6]) == []
    assert found([0] * 12, [1] * 12) == []


def test_fault_09_absolute_ids_are_named() -> None:
    assert found([2, 5, 7, 9]) == ["draft_vocab.absolute_ids"]
    assert found(list(range(12)), [1] * 12) == ["draft_vocab.absolute_ids"]


def test_fault_09_duplicates_out_of_range_and_wrong_counts_are_named() -> None:
    assert found([2, 4, 5, 4]) == ["draft_vocab.duplicate"]
    assert found([2, 4, 5, 9]) == ["draft_vocab.out_of_range"]
    assert found([-1, 4, 5, 6]) == ["draft_vocab.out_of_range"]
    assert found([5, 1, 5, 6]) == ["draft_vocab.not_ascending"]
    assert found([2, 4, 5]) == ["draft_vocab.count"]
    assert found([2, 4, 5, 7]) == ["draft_vocab.disagree"]
    assert found([], [0] * 12) == ["draft_vocab.count"]


@given(st.sets(st.integers(0, 29), min_size=1), st.integers(30, 40))
def test_the_digest_is_the_draft_vocabs_own(ids: set[int], vocab_size: int) -> None:
    vocab = DraftVocab(torch.tensor(sorted(ids)), vocab_size)

    assert draft_vocab_digest(sorted(ids), vocab_size) == vocab.digest
    assert check_draft_vocab(vocab.d2t.tolist(), vocab.t2d.tolist(), vocab_size, "") == []


@pytest.mark.parametrize("change", [((2, 5, 7), 12), ((2, 5, 7, 9), 13), ((2, 5, 7, 8), 12)])
def test_another_vocab_has_another_digest(change: tuple[tuple[int, ...], int]) -> None:
    assert draft_vocab_digest(*change) != draft_vocab_digest((2, 5, 7, 9), 12)


@given(st.lists(st.integers(-20, 20), max_size=8), st.lists(st.integers(0, 1), min_size=12, max_size=12))
def test_tables_are_accepted_exactly_if_they_name_the_same_ascending_tokens(d2t: list[int], t2d: list[int]) -> None:
    ids = [draft + offset for draft, offset in enumerate(d2t)]
    good = bool(ids) and ids == [token for token in range(12) if t2d[token]]

    assert (found(d2t, t2d) == []) == good
