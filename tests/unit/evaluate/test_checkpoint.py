from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from eagle3.config import ServeConfig
from eagle3.data.store import StoreReader
from eagle3.errors import ProblemsError
from eagle3.evaluate.acceptance import acceptance
from eagle3.evaluate.checkpoint import EvaluationReport, evaluate_checkpoint
from eagle3.serve.export import export_run
from eagle3.serve.saved_draft import load_run

from ..serve.cases import Run, make_contract, make_run, make_samples, make_store, make_target_config

MASKS = [[0, 0] + [1] * 30, [0, 1, 1, 1, 1, 0, 0, 1, 1, 1]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path, masks=MASKS)


def test_a_run_its_checkpoint_and_its_export_agree(run: Run, tmp_path: Path) -> None:
    export_run(ServeConfig(run=str(run.folder), output=str(tmp_path / "out"), dtype="float32"))
    folders = (run.folder, run.folder / "checkpoints" / "step-00000020", tmp_path / "out")
    results = [evaluate_checkpoint(folder, run.dataset, 3).result for folder in folders]
    reader = StoreReader(run.dataset)
    direct = acceptance(load_run(run.folder).model(run.embedding), reader, run.vocab, 3)
    assert results == [direct] * 3 and direct.rounds > 20


def test_the_embedding_comes_from_the_dataset(run: Run, tmp_path: Path) -> None:
    before = evaluate_checkpoint(run.folder, run.dataset, 3).result
    model = load_run(run.folder).model(run.embedding * -1)
    assert acceptance(model, StoreReader(run.dataset), run.vocab, 3).step_accuracy != before.step_accuracy


def test_every_difference_between_checkpoint_and_dataset_is_listed(run: Run, tmp_path: Path) -> None:
    target = make_target_config()
    contract = make_contract(target, (0, 4, 7))
    contract = replace(contract, tokenizer_digest="sha256:" + "9" * 64, target_name="other")
    store = make_store(tmp_path / "other", contract, target, make_samples(MASKS))
    with pytest.raises(ProblemsError) as caught:
        evaluate_checkpoint(run.folder, store, 3)
    kinds = {problem.kind for problem in caught.value.problems}
    assert kinds == {"contract.output_indices", "contract.tokenizer_digest", "contract.target_name"}


def test_a_store_of_another_type_will_do(run: Run, tmp_path: Path) -> None:
    """A drafter that learned from an fp8 store is evaluated on its target's own states."""
    contract = replace(StoreReader(run.dataset).contract, dtype="float8_e4m3fn")
    halved = [
        replace(
            sample,
            aux_hidden_states=sample.aux_hidden_states.bfloat16(),
            last_hidden_states=sample.last_hidden_states.bfloat16(),
        )
        for sample in make_samples(MASKS)
    ]
    store = make_store(tmp_path / "fp8", contract, make_target_config(), halved)
    assert evaluate_checkpoint(run.folder, store, 3).result.rounds > 20


def test_a_folder_that_is_none_of_ours_is_named(tmp_path: Path, run: Run) -> None:
    with pytest.raises(ProblemsError) as caught:
        evaluate_checkpoint(tmp_path, run.dataset, 3)
    assert [problem.kind for problem in caught.value.problems] == ["evaluate.checkpoint"]


def test_the_table_shows_every_number_of_drafts(run: Run) -> None:
    report = evaluate_checkpoint(run.folder, run.dataset, 3)
    lines = report.render().splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["1", "2", "3"]
    assert f"{report.result.length_by_steps[1]:.3f}" in lines[3]
    assert "95% interval" in lines[6] and "acceptance rate" in lines[6]


def test_the_table_says_when_there_is_no_data(tmp_path: Path) -> None:
    run = make_run(tmp_path, masks=[[0, 0, 1]])
    report = evaluate_checkpoint(run.folder, run.dataset, 2)
    assert isinstance(report, EvaluationReport) and "no data" in report.render()
