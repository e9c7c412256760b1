"""Coverage of draft vocabs, in all and by source, exact or estimated; vocab files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.data.chat import TokenSample
from eagle3.data.vocab_count import count_samples
from eagle3.data.vocab_coverage import SIZES, Share, coverage_report, held
from eagle3.data.vocab_file import VocabFile, read_vocab
from eagle3.draft.vocab import DraftVocab
from eagle3.errors import ProblemsError

from .cases import digest, kinds

VOCAB = 2_000


def sample(ids: list[int], source: str | None = None, prompt: int = 0) -> TokenSample:
    """`prompt` tokens that are not supervised, then `ids`."""
    return TokenSample("x", [1] * prompt + ids, [False] * prompt + [True] * len(ids), source)


def test_shares_in_all_and_of_each_source_count_supervised_tokens_alone() -> None:
    counts = count_samples([sample([5, 5, 5, 6], "a", prompt=9), sample([7, 7, 8, 9], "b")], 12)
    report = coverage_report(counts, sizes=[1, 2, 5])
    assert [row.overall.share for row in report.rows] == [3 / 8, 5 / 8, 1.0]
    assert report.rows[1].by_source == {"a": Share(3 / 4), "b": Share(2 / 4)}
    assert (report.tokens, report.distinct, report.samples, report.of) == (8, 5, 2, 2)
    assert all(row.overall.error is None for row in report.rows)


def test_of_many_sources_the_smallest_are_put_together() -> None:
    large = [sample([number], f"s{number:02}") for number in range(20)]
    counts = count_samples([*large, *large, sample([30], "a"), sample([31], "b"), sample([32])], VOCAB)
    assert sorted(counts.by_source) == ["others", *(f"s{number:02}" for number in range(20))]
    assert counts.by_source["others"].nonzero().flatten().tolist() == [30, 31]


def test_forced_tokens_take_their_place_in_every_size() -> None:
    counts = count_samples([sample([5, 5, 6])], 12)
    report = coverage_report(counts, keep_ids=[0, 11], sizes=[1, 2, 3, 13])
    assert [(row.size, row.overall.share) for row in report.rows] == [(2, 0.0), (3, 2 / 3)]
    assert report.left_out == [1, 13] and report.forced == 2


def test_the_table_has_the_four_sizes_and_the_sources() -> None:
    counts = count_samples([sample([5, 70_000], "web"), sample([6], "books")], 100_000)
    text = coverage_report(counts).render()
    assert [f"{size:,}" in text for size in SIZES] == [True] * 4
    assert "web" in text and "books" in text and "3 supervised tokens (all 2 samples)" in text
    json.dumps(coverage_report(counts).to_dict())


def corpus() -> list[TokenSample]:
    """Samples of different lengths; each draws from a part of a long-tailed vocabulary, so tokens cluster."""
    generator = torch.Generator().manual_seed(0)
    weights = 1.0 / torch.arange(1, VOCAB + 1)
    samples = []
    for _ in range(1_500):
        own = weights * (torch.rand(VOCAB, generator=generator) < 0.3)
        length = int(torch.randint(5, 200, (1,), generator=generator))
        samples.append(sample(torch.multinomial(own, length, replacement=True, generator=generator).tolist()))
    return samples


def test_the_error_of_a_draw_holds_as_often_as_it_says() -> None:
    """Against what vocabs of such halves hold of the whole data, 19 times out of 20."""
    samples = corpus()
    whole = count_samples(samples, VOCAB)
    inside, widths = 0, []
    for seed in range(60):
        counts = count_samples(samples, VOCAB, share=200, seed=seed)
        [row] = coverage_report(counts, sizes=[400]).rows
        estimate, error = row.overall.share, row.overall.error
        assert error is not None
        shares = []
        for half in (counts.parts[0::2], counts.parts[1::2]):
            seen = torch.bincount(torch.cat([part for _, part in half]), minlength=VOCAB)
            shares.append(held(whole.total, DraftVocab.from_counts(seen, 400)))
        inside += abs(sum(shares) / 2 - estimate) <= error
        widths.append(error)
    assert 54 <= inside <= 60
    assert 0.002 < sum(widths) / 60 < 0.03


def test_a_draw_says_that_it_is_one_and_is_the_same_for_the_same_seed() -> None:
    samples = corpus()[:300]
    first = coverage_report(count_samples(samples, VOCAB, share=50, seed=1), sizes=[100])
    assert first == coverage_report(count_samples(samples, VOCAB, share=50, seed=1), sizes=[100])
    assert first != coverage_report(count_samples(samples, VOCAB, share=50, seed=2), sizes=[100])
    assert "50 of 300 samples, drawn at random" in first.render() and "±" in first.render()
    assert coverage_report(count_samples(samples, VOCAB, share=300), sizes=[100]).rows[0].overall.error is None


def test_no_token_of_a_draw_speaks_for_itself() -> None:
    """Tokens that come once: a vocab of the other half holds none of them; by source likewise."""
    samples = [sample([number, 1_000], "odd" if number % 2 else "even") for number in range(100)]
    [row] = coverage_report(count_samples(samples, VOCAB, share=80), sizes=[41]).rows
    assert row.overall.share == 0.5
    assert {name: share.share for name, share in row.by_source.items()} == {"odd": 0.5, "even": 0.5}


def test_nothing_supervised_is_held_whole() -> None:
    assert held(torch.zeros(5, dtype=torch.int64), DraftVocab.full(5)) == 1.0


def the_file(ids: list[int], forced: list[int] | None = None) -> VocabFile:
    vocab = DraftVocab(torch.tensor(ids), 20)
    return VocabFile(vocab, digest("tokenizer"), forced or [], {"samples": 3, "share": 0.5})


def test_a_vocab_file_comes_back_and_can_be_changed(tmp_path: Path) -> None:
    path = tmp_path / "new" / "vocab.json"
    the_file([2, 5, 7, 9], forced=[2]).write(path)
    found = read_vocab(path)
    assert found.vocab.ids.tolist() == [2, 5, 7, 9] and found.vocab.digest == the_file([2, 5, 7, 9]).vocab.digest
    changed = found.changed(add=[19, 0], remove=[7, 2])
    assert changed.vocab.ids.tolist() == [0, 5, 9, 19] and changed.forced == [0, 19]
    assert changed.vocab.digest != found.vocab.digest and changed.counted["share"] is None
    changed.write(path)
    assert read_vocab(path).vocab.ids.tolist() == [0, 5, 9, 19]


def test_every_id_that_cannot_be_changed_is_named() -> None:
    with pytest.raises(ProblemsError, match=r"(?s)-1, 20.*5.*6") as error:
        the_file([2, 5]).changed(add=[-1, 20, 5], remove=[6])
    assert kinds(error.value) == ["vocab.ids"] * 3
    with pytest.raises(ProblemsError, match="all of its ids"):
        the_file([2, 5]).changed(remove=[2, 5])


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"ids": [2, 5, 7, 8]}, "vocab.digest"),
        ({"vocab_size": 21}, "vocab.digest"),
        ({"ids": [5, 2]}, "vocab.file"),
        ({"ids": [2, 2]}, "vocab.file"),
        ({"ids": [2, 20]}, "vocab.file"),
        ({"ids": [2, 5.0]}, "vocab.file"),
        ({"ids": [True, 5]}, "vocab.file"),
        ({"ids": []}, "vocab.file"),
        ({"forced": [3]}, "vocab.file"),
        ({"vocab_size": 0}, "vocab.file"),
        ({"format": 2}, "vocab.file"),
        ({"more": 1}, "vocab.file"),
        ({"counted": []}, "vocab.file"),
        ({"counted": {"share": "0.5"}}, "vocab.file"),
        ({"tokenizer_digest": None}, "vocab.file"),
    ],
)
def test_a_changed_vocab_file_is_refused(tmp_path: Path, change: dict[str, Any], kind: str) -> None:
    path = tmp_path / "vocab.json"
    the_file([2, 5, 7, 9], forced=[2]).write(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ProblemsError) as error:
        read_vocab(path)
    assert kinds(error.value) == [kind]
