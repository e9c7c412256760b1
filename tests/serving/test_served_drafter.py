"""A drafter that our trainer trained, served by the real engine, reaches what `eagle3 evaluate` said it would."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from eagle3.config import ExtractConfig, RegenerateConfig, ServeConfig, TrainConfig, load_config
from eagle3.data.store import StoreReader
from eagle3.evaluate.acceptance import answer_spans
from eagle3.evaluate.checkpoint import evaluate_checkpoint
from eagle3.serve.export import export_run
from eagle3.target.extract import run_extract
from eagle3.target.regenerate import run_regenerate
from eagle3.train.trainer import run_training
from eagle3.wiring.layers import default_output_indices
from tests.serving.conftest import EngineScript
from tests.serving.constructed import acceptance_length
from tests.serving.sglang_venv import SERVED_VERSION, smollm2

DEMO = files("eagle3.demo")
TRAINED_ON, ASKED, NEW_TOKENS, STEPS = 64, 8, 40, 3
INDICES = list(default_output_indices(30))


def recipe(model: type[Any], name: str, **values: Any) -> Any:
    """A config of the demo, with some keys changed."""
    overrides = [f"{key.replace('__', '.')}={json.dumps(value, default=str)}" for key, value in values.items()]
    return load_config(model, Path(str(DEMO / "recipe" / f"{name}.yaml")), overrides)


def first_lines(path: Path, name: str, count: int) -> Path:
    lines = (DEMO / "data" / name).read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[:: len(lines) // count][:count]), encoding="utf-8")
    return path


@pytest.mark.timeout(900)
def test_the_served_acceptance_length_is_the_predicted_one(engine: EngineScript, tmp_path: Path) -> None:
    target = smollm2()
    states, held_out, run = tmp_path / "states", tmp_path / "held-out", tmp_path / "run"
    train_data = first_lines(tmp_path / "train.jsonl", "answers.jsonl", TRAINED_ON)
    questions = first_lines(tmp_path / "questions.jsonl", "mt_bench.jsonl", ASKED)
    answers = tmp_path / "answers.jsonl"
    regenerate = {"target__path": target, "data__path": questions, "output": answers, "max_new_tokens": NEW_TOKENS}
    run_regenerate(recipe(RegenerateConfig, "regenerate", **regenerate))
    for data, output in ((train_data, states), (answers, held_out)):
        values = {"target__path": target, "data__path": data, "output": output, "output_indices": INDICES}
        run_extract(recipe(ExtractConfig, "extract", **values))
    run_training(recipe(TrainConfig, "train", dataset=states, output=run, output_indices=INDICES, epochs=2))
    serve = {"run": run, "output": tmp_path / "checkpoint", "engine_version": SERVED_VERSION}
    export = export_run(recipe(ServeConfig, "serve", **serve)).output

    predicted = evaluate_checkpoint(export, held_out, STEPS).result

    reader = StoreReader(held_out)
    samples = [reader.read(index) for index in range(len(reader))]
    spans = [answer_spans(sample.loss_mask)[0] for sample in samples]
    rows = [sample.input_ids.tolist() for sample in samples]
    request = {
        "target": target,
        "drafters": [export],
        "steps": STEPS,
        "prompts": [row[:begin] for row, (begin, _) in zip(rows, spans, strict=True)],
        "max_new_tokens": [end - begin for begin, end in spans],
        "options": {"max_running_requests": ASKED},
    }
    (replies,) = engine("generate", request, timeout=600)
    same = [
        reply["output_ids"] == row[begin:end] for reply, row, (begin, end) in zip(replies, rows, spans, strict=True)
    ]
    served = acceptance_length([reply["meta_info"] for reply in replies])
    rounds = sum(reply["meta_info"]["spec_verify_ct"] for reply in replies)
    print(f"answers equal {sum(same)} of {ASKED}; rounds {rounds} served, {predicted.rounds} predicted")
    print(f"acceptance length {served:.4f} served, {predicted.length:.4f} predicted")
    assert sum(same) >= ASKED - 1, "greedy in float32 on both sides; a near tie may differ"
    assert served == pytest.approx(predicted.length, rel=0.03)
    assert predicted.length > 1.05, "a drafter that has learned nothing proves nothing"
