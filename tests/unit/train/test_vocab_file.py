"""A run whose draft vocab is a file's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle3.config import TrainConfig, load_config
from eagle3.data.store import StoreReader
from eagle3.data.vocab_file import VocabFile
from eagle3.draft.vocab import DraftVocab
from eagle3.errors import ProblemsError
from eagle3.train.setup import make_setup, planned_shape
from tests.stores import VOCAB, train_config, write_random_store

IDS = [1, 4, 6, 8, 9, 12, 13, 15]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return Path(write_random_store(tmp_path / "store", count=4))


def vocab_file(store: Path, **changes: object) -> VocabFile:
    vocab = DraftVocab(torch.tensor(IDS), VOCAB)
    return replace(VocabFile(vocab, StoreReader(store).contract.tokenizer_digest, [], {}), **changes)


def test_the_files_vocab_is_trained_and_its_digest_is_in_the_contract(store: Path, tmp_path: Path) -> None:
    made = vocab_file(store)
    made.write(tmp_path / "vocab.json")
    config = train_config(store, tmp_path / "run", vocab_file=str(tmp_path / "vocab.json"), draft={})
    setup = make_setup(config)
    assert setup.vocab.ids.tolist() == IDS
    assert setup.contract.draft_vocab_digest == made.vocab.digest
    assert setup.module.model.config.draft_vocab_size == len(IDS)
    assert any(f"draft vocab: {len(IDS)} of {VOCAB} tokens" in note for note in setup.notes)
    assert planned_shape(config, setup.samples.train.reader).draft_vocab_size == len(IDS)


def test_a_vocab_of_another_tokenizer_or_size_is_refused(store: Path, tmp_path: Path) -> None:
    path = tmp_path / "vocab.json"
    vocab_file(store, tokenizer_digest="sha256:0").write(path)
    config = train_config(store, tmp_path / "run", vocab_file=str(path), draft={"draft_vocab_size": 9})
    with pytest.raises(ProblemsError) as error:
        make_setup(config)
    assert [problem.kind for problem in error.value.problems] == ["vocab.other_tokenizer", "vocab.size"]
    assert not (tmp_path / "run").exists()


def test_a_vocab_file_beside_a_drafter_whose_vocab_is_kept_is_refused() -> None:
    given = ["dataset=d", "output=o", "output_indices=[1]", "vocab_file=v.json", "init_from=x"]
    with pytest.raises(ProblemsError, match="rebuild_vocab=true"):
        load_config(TrainConfig, None, given)
    assert load_config(TrainConfig, None, [*given, "rebuild_vocab=true"]).vocab_file == "v.json"


def test_fault_11_another_size_in_the_same_folder_is_chosen_anew(store: Path, tmp_path: Path) -> None:
    for size in (8, 4, 16):
        config = train_config(store, tmp_path / "run", draft={"draft_vocab_size": size})
        assert len(make_setup(config).vocab) == size


def test_fault_11_no_size_and_an_old_table_in_the_folder_is_the_full_vocab(store: Path, tmp_path: Path) -> None:
    """A file counts only where it is named."""
    vocab_file(store).write(tmp_path / "run" / "vocab.json")
    vocab_file(store).write(store.parent / "vocab.json")
    assert len(make_setup(train_config(store, tmp_path / "run", draft={"draft_vocab_size": None})).vocab) == VOCAB
