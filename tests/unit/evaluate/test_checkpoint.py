from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from eagle3.cli import main
from eagle3.config import PlanConfig, ServeConfig
from eagle3.data.store import StoreReader
from eagle3.errors import ProblemsError
from eagle3.evaluate.acceptance import acceptance
from eagle3.evaluate.checkpoint import EvaluationReport, evaluate_checkpoint
from eagle3.serve.export import export_run
from eagle3.serve.planner import make_plan
from eagle3.serve.saved_draft import load_run

from ..serve.cases import Run, make_contract, make_run, make_samples, make_store, make_target_config

SCHEMA = Path(__file__).parents[3] / "docs/schemas/evaluation.schema.json"
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


@pytest.mark.parametrize("temperature", [None, 0.7])
def test_json_is_what_the_schema_says_and_the_planner_reads_it(
    run: Run, tmp_path: Path, temperature: float | None
) -> None:
    report = evaluate_checkpoint(run.folder, run.dataset, 4, temperature=temperature)
    value = json.loads(report.to_json())
    jsonschema.validate(value, json.loads(SCHEMA.read_text(encoding="utf-8")))
    assert [row["length"] for row in value["by_steps"]] == list(report.result.length_by_steps)
    assert (value["sampling"] is None) == (temperature is None)
    never = replace(report, result=replace(report.result, by_depth=(0.0, math.nan)))
    assert json.loads(never.to_json())["by_depth"] == [0.0, None], "none of them is not no data"
    (tmp_path / "evaluation.json").write_text(report.to_json())
    cost = {"verify_fixed_ms": 20, "verify_per_token_ms": 1, "draft_ms_per_step": 0.2}
    config = PlanConfig.model_validate({"acceptance_file": str(tmp_path / "evaluation.json"), "cost": cost})
    rows = make_plan(config).batches[0].rows
    assert [row.acceptance_length for row in rows[:4]] == pytest.approx(report.result.length_by_steps)


def test_json_without_data_has_nulls_and_the_planner_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path, masks=[[0, 0, 1]])
    text = evaluate_checkpoint(run.folder, run.dataset, 2, temperature=1.0).to_json()
    value = json.loads(text)
    jsonschema.validate(value, json.loads(SCHEMA.read_text(encoding="utf-8")))
    assert value["by_steps"][0]["length"] is None and value["sampling"]["lengths"] == [None, None]
    (tmp_path / "evaluation.json").write_text(text)
    with pytest.raises(ProblemsError, match=r"plan\.acceptance_file"):
        make_plan(PlanConfig(acceptance_file=str(tmp_path / "evaluation.json")))


def test_the_command_prints_ten_step_counts_json_and_sampling(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["evaluate", "--checkpoint", str(run.folder), "--dataset", str(run.dataset)]
    for args, code in (([], 0), (["--json", "--temperature", "1"], 0), (["--temperature", "0", "--json"], 2)):
        with pytest.raises(SystemExit) as stop:
            main([*where, *args])
        out = capsys.readouterr().out
        assert int(stop.value.code or 0) == code
        if not args:
            assert [line.split()[0] for line in out.splitlines()[2:12]] == [str(count) for count in range(1, 11)]
        elif code == 0:
            assert json.loads(out)["sampling"]["temperature"] == 1
        else:
            assert json.loads(out)["problems"][0]["kind"] == "evaluate.temperature"


def test_the_table_shows_sampling(run: Run) -> None:
    report = evaluate_checkpoint(run.folder, run.dataset, 2, temperature=1.0)
    assert report.result.sampling is not None
    lines = report.render().splitlines()
    assert "sampling at temperature 1" in lines[-4]
    assert f"{report.result.sampling.lengths[1]:.3f}" in lines[-1]


def test_the_table_says_when_there_is_no_data(tmp_path: Path) -> None:
    run = make_run(tmp_path, masks=[[0, 0, 1]])
    report = evaluate_checkpoint(run.folder, run.dataset, 2)
    assert isinstance(report, EvaluationReport) and "no data" in report.render()
