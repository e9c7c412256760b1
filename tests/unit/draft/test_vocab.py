"""The draft vocab's tables: offsets, order, padding, and every malformed table by name."""

from __future__ import annotations

import pytest
import torch

from eagle3.draft.vocab import DraftVocab, check_tables
from eagle3.errors import ProblemsError


def kinds(d2t: torch.Tensor, t2d: torch.Tensor, vocab_size: int) -> list[str]:
    return [problem.kind for problem in check_tables(d2t, t2d, vocab_size)]


def mask_of(ids: list[int], vocab_size: int) -> torch.Tensor:
    return torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, torch.tensor(ids), True)


def test_fault_09_tables_hold_offsets() -> None:
    vocab = DraftVocab(torch.tensor([2, 5, 7, 9]), 12)
    assert vocab.d2t.tolist() == [2, 4, 5, 6] and vocab.d2t.dtype == torch.int64
    assert vocab.t2d.nonzero().flatten().tolist() == [2, 5, 7, 9] and vocab.t2d.dtype == torch.bool
    assert check_tables(vocab.d2t, vocab.t2d, 12) == []
    assert torch.equal(DraftVocab.from_tables(vocab.d2t, vocab.t2d).ids, vocab.ids)


def test_fault_09_full_vocab_is_the_zero_offset() -> None:
    vocab = DraftVocab.full(12)
    assert not vocab.d2t.any() and vocab.t2d.all() and check_tables(vocab.d2t, vocab.t2d, 12) == []
    first_token_alone = DraftVocab(torch.tensor([0]), 12)
    assert check_tables(first_token_alone.d2t, first_token_alone.t2d, 12) == []


@pytest.mark.parametrize(
    ("d2t", "t2d", "kind"),
    [
        (torch.tensor([2, 5, 7, 9]), mask_of([2, 5, 7, 9], 20), "draft_vocab.absolute_ids"),
        (torch.arange(20), mask_of(list(range(20)), 20), "draft_vocab.absolute_ids"),
        (torch.tensor([2, 4, 3, 6]), mask_of([2, 5, 9], 20), "draft_vocab.duplicate"),  # 5 twice
        (torch.tensor([5, 1, 5, 6]), mask_of([2, 5, 7, 9], 20), "draft_vocab.not_ascending"),
        (torch.tensor([2, 4, 5, 17]), mask_of([2, 5, 7, 9], 20), "draft_vocab.out_of_range"),
        (torch.tensor([-1, 4, 5, 6]), mask_of([2, 5, 7, 9], 20), "draft_vocab.out_of_range"),
        (torch.tensor([2, 4, 5, 6], dtype=torch.int32), mask_of([2, 5, 7, 9], 20), "draft_vocab.d2t"),
        (torch.tensor([2.0, 4.0, 5.0, 6.0]), mask_of([2, 5, 7, 9], 20), "draft_vocab.d2t"),
        (torch.zeros(0, dtype=torch.int64), mask_of([2], 20), "draft_vocab.d2t"),
        (torch.tensor([2, 4, 5, 6]), mask_of([2, 5, 7, 9, 11], 20), "draft_vocab.count"),
        (torch.tensor([2, 4, 5, 6]), mask_of([2, 5, 7, 10], 20), "draft_vocab.disagree"),
        (torch.tensor([2, 4, 5, 6]), mask_of([2, 5, 7, 9], 20).long(), "draft_vocab.t2d"),
        (torch.tensor([2, 4, 5, 6]), mask_of([2, 5, 7, 9], 21), "draft_vocab.t2d"),
    ],
)
def test_fault_09_malformed_tables_are_named(d2t: torch.Tensor, t2d: torch.Tensor, kind: str) -> None:
    assert kind in kinds(d2t, t2d, 20)


def test_fault_09_bf16_would_move_ids() -> None:
    ids = torch.tensor([257, 1001, 163607])
    vocab = DraftVocab(ids, 163840)
    with pytest.raises(ProblemsError, match=r"draft_vocab\.d2t"):
        DraftVocab.from_tables(vocab.d2t.bfloat16(), vocab.t2d)


def test_fault_10_fewer_distinct_tokens_than_entries_are_padded_the_same_way_every_time() -> None:
    counts = torch.zeros(20, dtype=torch.int64)
    used = [3, 4, 8, 11, 12, 19]
    counts[used] = torch.tensor([5, 1, 9, 2, 2, 7])
    vocabs = [DraftVocab.from_counts(counts, 10) for _ in range(2)]
    assert vocabs[0].ids.tolist() == sorted([*used, 0, 1, 2, 5]) == vocabs[1].ids.tolist()
    assert vocabs[0].digest == vocabs[1].digest


@pytest.mark.parametrize("size", [0, -1, 21, 4.0, True])
def test_fault_10_impossible_sizes_are_refused(size: object) -> None:
    with pytest.raises(ProblemsError, match=r"draft_vocab\.size.*from 1 to 20"):
        DraftVocab.from_counts(torch.ones(20, dtype=torch.int64), size)  # type: ignore[arg-type]


def test_most_frequent_tokens_are_chosen_and_special_tokens_kept() -> None:
    counts = torch.tensor([0, 4, 9, 4, 9, 1])
    kept = counts.clone()
    assert DraftVocab.from_counts(counts, 3).ids.tolist() == [1, 2, 4]
    assert DraftVocab.from_counts(counts, 3, keep_ids=[0, 5, 5]).ids.tolist() == [0, 2, 5]
    assert torch.equal(counts, kept), "the caller's counts are left alone"
    with pytest.raises(ProblemsError, match="use at least 4"):
        DraftVocab.from_counts(counts, 3, keep_ids=[0, 1, 2, 3])
    for outside in (6, -1):
        with pytest.raises(ProblemsError, match=r"draft_vocab\.keep_ids"):
            DraftVocab.from_counts(counts, 3, keep_ids=[outside])


def test_fault_19_mapping_through_the_tables_equals_the_trainers() -> None:
    vocab = DraftVocab(torch.tensor([1, 4, 6, 11]), 12)
    greedy = torch.randn(16, 4, generator=torch.Generator().manual_seed(0)).argmax(-1)
    assert len(greedy.unique()) > 2
    assert torch.equal(greedy + vocab.d2t[greedy], vocab.to_target(greedy))
    assert torch.equal(vocab.to_draft(vocab.to_target(greedy)), greedy)


def test_to_draft_says_minus_one_outside_the_vocab() -> None:
    vocab = DraftVocab(torch.tensor([1, 4, 6, 11]), 12)
    expected = [-1, 0, -1, -1, 1, -1, 2, -1, -1, -1, -1, 3]
    assert vocab.to_draft(torch.arange(12).view(3, 4)).tolist() == [expected[:4], expected[4:8], expected[8:]]
    assert vocab.to_draft(torch.tensor([-1])).tolist() == [-1]


def test_digest_tells_vocabs_apart() -> None:
    digests = {DraftVocab(torch.tensor(ids), size).digest for ids, size in (([1, 4], 12), ([1, 5], 12), ([1, 4], 13))}
    assert len(digests) == 3
