"""`eagle3 serve bench` against the real server: its acceptance is, to the round, what `eagle3 evaluate` foresees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eagle3.cli import app
from eagle3.config import BenchConfig, ServeConfig, build_config
from eagle3.evaluate.checkpoint import evaluate_checkpoint
from eagle3.serve.bench.run import run_bench
from eagle3.serve.export import export_run
from eagle3.target.extract import run_extract
from eagle3.target.regenerate import run_regenerate
from eagle3.target.tiny import make_tiny_llama
from eagle3.train.trainer import run_training
from tests.serving.conftest import ServerStarter
from tests.serving.sglang_venv import SERVED_VERSION
from tests.stores import train_config
from tests.unit.target.cases import extract_config, regenerate_config

LAYERS, STEPS, NEW_TOKENS, ASKED = [1, 3, 5], 3, 20, 4
EAGLE = ("--speculative-algorithm", "EAGLE3", "--speculative-num-steps", str(STEPS), "--speculative-eagle-topk", "1",
         "--speculative-num-draft-tokens", str(STEPS + 1))  # fmt: skip


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`target`, `prompts.jsonl`, its `answers.jsonl` and their `store`, and a `draft` that has learned some of them."""
    folder = tmp_path_factory.mktemp("bench")
    target = make_tiny_llama(folder / "target")
    prompts = folder / "prompts.jsonl"
    words = ["alpha", "beta", "gamma", "delta"]
    asked = [f"{words[item % 4]} {'word ' * item}?" for item in range(ASKED)]
    prompts.write_text("".join(json.dumps({"id": f"p{n}", "prompt": text}) + "\n" for n, text in enumerate(asked)))
    run_regenerate(regenerate_config(target, prompts, folder / "answers.jsonl", max_new_tokens=NEW_TOKENS))
    run_extract(extract_config(target, folder / "answers.jsonl", folder / "store", output_indices=LAYERS))
    optim = {"learning_rate": 3e-3}
    settings: dict[str, Any] = {"output_indices": LAYERS, "max_length": 256, "epochs": 40, "optim": optim,
                                "draft": {"draft_vocab_size": 256}}  # fmt: skip
    run_training(train_config(folder / "store", folder / "run", **settings))
    values = {"run": str(folder / "run"), "output": str(folder / "draft"), "engine_version": SERVED_VERSION}
    export_run(ServeConfig(**values, dtype="float32"))
    return folder


def config(folder: Path, output: Path, *urls: str, **values: Any) -> BenchConfig:
    load = {
        "sets": {"all": str(folder / "prompts.jsonl")},
        "max_new_tokens": NEW_TOKENS,
        "reference": str(folder / "answers.jsonl"),
        "passes": 1,
        "warmup": 1,
        **values.pop("load", {}),
    }
    top = {"target": {"path": str(folder / "target")}, "urls": list(urls), "load": load, "output": str(output)}
    return build_config(BenchConfig, {**top, **values}, "test")


@pytest.mark.timeout(580)
def test_every_round_is_the_foreseen_one_and_the_baseline_gives_the_same_answers(
    server: ServerStarter, drafter: Path, tmp_path: Path
) -> None:
    foreseen = evaluate_checkpoint(drafter / "draft", drafter / "store", STEPS).result
    own = ("--model-path", drafter / "target", "--dtype", "float32", "--enable-metrics", "--sleep-on-idle")
    drafting = server(*own, *EAGLE, "--speculative-draft-model-path", drafter / "draft")
    plain = server(*own)
    cfg = config(
        drafter, tmp_path / "bench", drafting, baseline_url=plain, load={"concurrency": [1, 2], "timeout_seconds": 300}
    )

    result = run_bench(cfg)

    assert result.problems == [], result.problems
    assert [row.name for row in result.rows] == ["3 steps", "no drafter"] * 2
    for row in result.rows:
        assert row.facts.version == SERVED_VERSION and row.foreign == 0 and row.flushed and row.requests == ASKED
        assert row.against["reference"].compared == ASKED and row.against["reference"].different == 0
        assert row.cached_share is not None and row.cached_share < 0.5, "the template's first tokens are shared"
    for row in result.rows[::2]:
        found = row.acceptance
        assert found is not None and found.unsure == 0
        assert (found.verifies, found.committed) == (foreseen.rounds, foreseen.committed)
        assert found.histogram == foreseen.histogram
        assert [depth.share for depth in found.by_depth] == pytest.approx(list(foreseen.by_depth), abs=0)
        assert found.length.value == foreseen.length > 1.2, "a drafter that has learned nothing proves nothing"
        assert row.speedup is not None and row.against["baseline"].different == 0
    assert result.rows[1].acceptance is None and result.rows[1].facts.speculates is False

    plan = CliRunner().invoke(
        app,
        ["serve", "plan", f"bench_files=[{tmp_path / 'bench' / 'bench.json'}]", "cost.draft_ms_per_step=0.5", "--json"],
    )
    assert plan.exit_code == 2 and "plan.missing" in plan.stdout, "one step count is too few for verify's line"
    chat = run_bench(config(drafter, tmp_path / "chat", drafting, api="chat"))
    [row] = chat.rows
    assert chat.problems == [] and row.acceptance is None and row.counted is not None
    assert row.counted.length.value == pytest.approx(foreseen.length, abs=0)
