from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle3.data.store import StoredSample, StoreReader
from eagle3.data.vocab_count import count_store, count_supervised
from eagle3.data.vocab_coverage import coverage_report
from eagle3.draft.vocab import DraftVocab
from eagle3.errors import ProblemsError

from .cases import AUX, HIDDEN, VOCAB, kinds, writer


def tokens(sample_id: str, ids: list[int], supervised: list[int]) -> StoredSample:
    return StoredSample(
        sample_id,
        torch.tensor(ids),
        torch.tensor(supervised, dtype=torch.bool),
        torch.zeros(len(ids), AUX * HIDDEN, dtype=torch.bfloat16),
        torch.zeros(len(ids), HIDDEN, dtype=torch.bfloat16),
        torch.zeros(len(ids), dtype=torch.int32),
    )


def store(folder: Path, *samples: StoredSample) -> StoreReader:
    with writer(folder) as store:
        store.write_shard(samples)
    return StoreReader(folder)


def test_only_supervised_tokens_count(tmp_path: Path) -> None:
    reader = store(
        tmp_path / "store",
        tokens("a", [1, 2, 2, 3], [0, 1, 1, 1]),
        tokens("b", [2, 5, 19], [1, 0, 1]),
        tokens("c", [7, 7], [0, 0]),
    )
    counts = count_supervised(reader)
    assert counts.dtype == torch.int64 and counts.shape == (VOCAB,)
    assert {index: int(count) for index, count in enumerate(counts) if count} == {2: 3, 3: 1, 19: 1}
    assert count_supervised(reader, [0]).nonzero().flatten().tolist() == [2, 3]


def test_a_store_is_counted_by_source(tmp_path: Path) -> None:
    reader = store(
        tmp_path / "store",
        replace(tokens("a", [1, 2, 2, 3], [0, 1, 1, 1]), source="chat"),
        replace(tokens("b", [2, 5, 19], [1, 0, 1]), source="code"),
        tokens("c", [7, 7], [0, 1]),
        replace(tokens("d", [4, 7], [1, 0]), source="chat"),
    )
    counts = count_store(reader)
    found = {name: of.nonzero().flatten().tolist() for name, of in counts.by_source.items()}
    assert found == {"chat": [2, 3, 4], "code": [2, 19]}
    assert int(counts.total.sum()) == 7
    report = coverage_report(counts, sizes=[1])
    assert {name: share.share for name, share in report.rows[0].by_source.items()} == {"chat": 0.5, "code": 0.5}
    drawn = count_store(reader, share=3)
    assert drawn.parts and {source for source, _ in drawn.parts} <= {"chat", "code", None}


def test_a_store_is_counted_by_source_too(tmp_path: Path) -> None:
    samples = [tokens("a", [1, 2], [0, 1]), tokens("b", [1, 3], [0, 1]), tokens("c", [1, 5], [0, 1])]
    named = [replace(samples[0], source="web"), replace(samples[1], source=""), samples[2]]
    counts = count_store(store(tmp_path / "store", *named))
    assert {name: of.nonzero().flatten().tolist() for name, of in counts.by_source.items()} == {"web": [2], "": [3]}
    assert counts.total.sum() == 3


def test_fault_10_a_corpus_with_fewer_tokens_than_the_draft_vocab(tmp_path: Path) -> None:
    """Target vocab 20, 6 distinct ids, draft size 10: exactly 10 unique ids with those 6, the same in every run."""
    used = [3, 5, 8, 13, 17, 19]
    reader = store(tmp_path / "store", tokens("a", used, [1] * 6))
    counts = count_supervised(reader)
    vocab = DraftVocab.from_counts(counts, 10)
    assert len(set(vocab.ids.tolist())) == 10 and set(used) <= set(vocab.ids.tolist())
    assert torch.equal(vocab.ids, DraftVocab.from_counts(count_supervised(reader), 10).ids)


@pytest.mark.parametrize("size", [0, -1, 21, 4.0])
def test_fault_10_a_draft_vocab_size_that_cannot_be(tmp_path: Path, size: int) -> None:
    reader = store(tmp_path / "store", tokens("a", [1, 2], [1, 1]))
    with pytest.raises(ProblemsError) as error:
        DraftVocab.from_counts(count_supervised(reader), size)
    assert kinds(error.value) == ["draft_vocab.size"]


def test_fault_11_other_data_in_the_same_folder_is_counted_anew(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    first = count_supervised(store(folder, tokens("a", [1, 2, 3], [1, 1, 1])))
    for path in folder.iterdir():
        path.unlink()
    second = count_supervised(store(folder, tokens("a", [6, 7, 8], [1, 1, 1])))
    assert first.nonzero().flatten().tolist() == [1, 2, 3]
    assert second.nonzero().flatten().tolist() == [6, 7, 8]
