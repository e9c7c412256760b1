from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle3.config import TargetConfig
from eagle3.data.chat import load_tokenizer, template_digest, tokenizer_digest
from eagle3.data.store import StoredSample, StoreReader
from eagle3.errors import ProblemsError
from eagle3.target.tiny import make_tiny_llama
from eagle3.train.plan import make_run
from eagle3.train.setup import check_dataset_contract, make_setup
from eagle3.wiring.contract import config_digest
from eagle3.wiring.targets import read_target_config
from tests.old_stores import as_version_2
from tests.stores import VOCAB, random_contract, train_config, write_random_store


def kinds(error: ProblemsError) -> list[str]:
    return [problem.kind for problem in error.problems]


@pytest.mark.parametrize(
    ("stored", "words"),
    [((1, 3, 6), "one too late"), ((-1, 0, 2, 5), "embedding"), ((0, 2, 6), "[0, 2, 6]"), ((0, 5), "[0, 5]")],
)
def test_a_dataset_from_other_layers_is_refused_in_words(tmp_path: Path, stored: tuple[int, ...], words: str) -> None:
    contract = replace(random_contract(), output_indices=stored)
    problems = check_dataset_contract(train_config(tmp_path / "store", tmp_path / "run"), contract)
    assert [problem.kind for problem in problems] == ["contract.output_indices"]
    assert words in problems[0].message


def test_impossible_layers_in_the_config_are_named(tmp_path: Path) -> None:
    config = train_config(tmp_path / "store", tmp_path / "run", output_indices=[5, 2, 99])
    found = {problem.kind for problem in check_dataset_contract(config, random_contract())}
    assert found >= {"layers.unsorted", "layers.out_of_range"}


def test_a_store_of_other_layers_stops_before_a_run_folder_exists(tmp_path: Path) -> None:
    store = write_random_store(tmp_path / "store", count=2)
    with pytest.raises(ProblemsError, match=r"contract\.output_indices"):
        make_setup(train_config(store, tmp_path / "run", output_indices=[1, 3, 6]))
    assert not (tmp_path / "run").exists()


def test_a_target_that_is_given_is_compared_and_every_difference_listed(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "target")
    tokenizer = load_tokenizer(str(folder))
    text_config = read_target_config(folder)
    same = replace(
        random_contract(),
        target_config_digest=config_digest(text_config),
        hidden_size=text_config["hidden_size"],
        vocab_size=text_config["vocab_size"],
        num_hidden_layers=text_config["num_hidden_layers"],
        tokenizer_digest=tokenizer_digest(tokenizer),
        chat_template_digest=template_digest(tokenizer),
    )
    target = TargetConfig(path=str(folder))
    config = train_config(tmp_path / "store", tmp_path / "run").model_copy(update={"target": target})
    assert check_dataset_contract(config, same) == []
    other = replace(
        same, tokenizer_digest="sha256:" + "9" * 64, hidden_size=7, target_config_digest="sha256:" + "8" * 64
    )
    found = {problem.kind for problem in check_dataset_contract(config, other)}
    assert found == {"contract.tokenizer_digest", "contract.hidden_size", "contract.target_config_digest"}


def test_held_out_store_of_another_contract_is_refused_with_every_difference(tmp_path: Path) -> None:
    store = write_random_store(tmp_path / "store", count=2)
    contract = replace(random_contract(), tokenizer_digest="sha256:" + "9" * 64, target_name="other")
    other = write_random_store(tmp_path / "other", count=2, contract=contract)
    with pytest.raises(ProblemsError) as caught:
        make_setup(train_config(store, tmp_path / "run", eval_dataset=str(other)))
    assert set(kinds(caught.value)) == {"contract.tokenizer_digest", "contract.target_name"}


def only_ids(low: int, high: int) -> Callable[[StoredSample], StoredSample]:
    def change(sample: StoredSample) -> StoredSample:
        return replace(sample, input_ids=low + sample.input_ids % (high - low))

    return change


def test_fault_11_the_draft_vocab_follows_the_dataset_and_the_size(tmp_path: Path) -> None:
    first = write_random_store(tmp_path / "a", change=only_ids(2, 6))
    second = write_random_store(tmp_path / "b", change=only_ids(20, 24))
    run = tmp_path / "run"
    chosen = {
        (store.name, size): set(
            make_setup(train_config(store, run, draft={"draft_vocab_size": size})).vocab.ids.tolist()
        )
        for store in (first, second)
        for size in (6, 4)
    }
    assert chosen["a", 6] == {0, 1, 2, 3, 4, 5}
    assert chosen["b", 6] == {0, 1, 20, 21, 22, 23}
    assert {0, 1} < chosen["a", 4] < chosen["a", 6]
    assert make_setup(train_config(first, run, draft={})).vocab.ids.tolist() == list(range(VOCAB))


def test_the_draft_vocab_counts_training_samples_only(tmp_path: Path) -> None:
    def change(sample: StoredSample) -> StoredSample:
        return replace(sample, input_ids=torch.full_like(sample.input_ids, 2 + int(sample.id[1:])))

    store = write_random_store(tmp_path / "store", count=8, change=change)
    config = train_config(store, tmp_path / "run", eval_fraction=0.25, draft={"draft_vocab_size": 8})
    setup = make_setup(config)
    assert setup.samples.heldout is not None
    held_out = {2 + index for index in setup.samples.heldout.indices}
    assert set(setup.vocab.ids.tolist()) == {0, 1} | (set(range(2, 10)) - held_out)
    assert "100.00% of the supervised tokens" in " ".join(setup.notes)


def test_contract_of_the_run_is_the_datasets_with_the_draft_vocab(tmp_path: Path) -> None:
    setup = make_setup(train_config(write_random_store(tmp_path / "store"), tmp_path / "run"))
    assert setup.contract == random_contract().with_draft_vocab(setup.vocab.digest)


@pytest.mark.parametrize("init", ["target_head", "random"])
def test_the_drafter_starts_from_the_target_as_the_config_says(tmp_path: Path, init: str) -> None:
    store = write_random_store(tmp_path / "store")
    draft = {"draft_vocab_size": 24, "init": init}
    setup = make_setup(train_config(store, tmp_path / "run", draft=draft))
    model, target = setup.module.model, StoreReader(store).target_head()
    assert torch.equal(model.embed_tokens.weight, target["embed_tokens.weight"])
    assert torch.equal(model.lm_head.weight, target["lm_head.weight"][setup.vocab.ids]) == (init == "target_head")
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_fault_03_samples_cut_before_their_answer_are_dropped_and_counted(tmp_path: Path) -> None:
    store = write_random_store(tmp_path / "store", [(44, (40, 44)), (12, (8, 12))])
    setup = make_setup(train_config(store, tmp_path / "run", max_length=32))
    assert setup.samples.train.indices == [1]
    assert any("1 of 2 samples have no supervised token within 32: dropped" in note for note in setup.notes)


def test_fault_03_a_dataset_with_nothing_to_learn_is_an_error(tmp_path: Path) -> None:
    store = write_random_store(tmp_path / "store", [(44, (40, 44)), (44, (36, 44))])
    with pytest.raises(ProblemsError, match=r"train\.nothing_supervised"):
        make_setup(train_config(store, tmp_path / "run", max_length=32))


def test_the_hold_out_depends_on_the_seed_alone_and_leaves_something_to_train_on(tmp_path: Path) -> None:
    store = write_random_store(tmp_path / "store", count=10)

    def held_out(seed: int, fraction: float = 0.3) -> list[int]:
        samples = make_setup(train_config(store, tmp_path / "run", eval_fraction=fraction, seed=seed)).samples
        heldout = [] if samples.heldout is None else samples.heldout.indices
        assert sorted(samples.train.indices + heldout) == list(range(10))
        return heldout

    assert len(held_out(0)) == 3
    assert held_out(0) == held_out(0) != held_out(1)
    assert len(held_out(0, 0.01)) == 1
    assert len(held_out(0, 0.99)) == 9
    assert held_out(0, 0.0) == []


def test_held_out_samples_that_are_trained_on_are_pointed_out(tmp_path: Path) -> None:
    store = write_random_store(tmp_path / "store", count=4)
    setup = make_setup(train_config(store, tmp_path / "run", eval_dataset=str(store)))
    assert "4 of 4 held-out samples have the id of a training sample" in setup.notes


def test_the_targets_whole_head_is_kept_only_where_some_samples_lack_its_greedy_tokens(tmp_path: Path) -> None:
    new = write_random_store(tmp_path / "new", count=6)
    other = write_random_store(tmp_path / "other", count=4, seed=7)
    old, old_other = as_version_2(new, tmp_path / "old"), as_version_2(other, tmp_path / "old-other")
    for train, heldout, narrow in ((new, None, True), (new, other, True), (old, None, False), (new, old_other, False)):
        config = train_config(train, tmp_path / "run", eval_dataset=None if heldout is None else str(heldout))
        setup = make_setup(config)
        assert len(setup.head.lm_head) == (len(setup.vocab) if narrow else VOCAB)
        assert (setup.head.ids is not None) == narrow
        assert any("greedy tokens are not stored" in note for note in setup.notes) != narrow
        run = make_run(config, setup.samples, setup.module.ttt, 1)
        assert run.types.argmax == narrow
    assert torch.equal(setup.head.lm_head, StoreReader(new).target_head()["lm_head.weight"].float())
