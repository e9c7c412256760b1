"""`eagle3 serve bench` and `sweep` with the real server: every round is the one that `eagle3 evaluate` foresees."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from eagle3.config import BenchConfig, ServeConfig, SweepConfig, build_config
from eagle3.evaluate.checkpoint import evaluate_checkpoint
from eagle3.serve.bench.run import run_bench
from eagle3.serve.export import export_run
from eagle3.serve.launch import free_port
from eagle3.serve.launch.ports import port_fault
from eagle3.serve.sweep.run import run_sweep
from eagle3.target.extract import run_extract
from eagle3.target.regenerate import run_regenerate
from eagle3.target.tiny import make_tiny_llama
from eagle3.train.trainer import run_training
from tests.serving.conftest import ServerStarter
from tests.serving.sglang_venv import HERE, SERVED_VERSION, VENV, environment
from tests.stores import train_config
from tests.unit.target.cases import extract_config, regenerate_config

LAYERS, STEPS, NEW_TOKENS, ASKED = [1, 3, 5], 3, 20, 3
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
def test_every_round_is_the_foreseen_one(server: ServerStarter, drafter: Path, tmp_path: Path) -> None:
    foreseen = evaluate_checkpoint(drafter / "draft", drafter / "store", STEPS).result
    url = server("--model-path", drafter / "target", "--dtype", "float32", "--enable-metrics", *EAGLE,
                 "--speculative-draft-model-path", drafter / "draft")  # fmt: skip

    result = run_bench(config(drafter, tmp_path / "bench", url, load={"concurrency": [1, 2]}))

    assert result.problems == [], result.problems
    assert [row.name for row in result.rows] == ["3 steps"] * 2
    for row in result.rows:
        assert row.facts.version == SERVED_VERSION and row.foreign == 0 and row.flushed and row.requests == ASKED
        assert row.against["reference"].compared == ASKED and row.against["reference"].different == 0
        assert row.cached_share is not None and row.cached_share < 0.5, "the template's first tokens are shared"
        found = row.acceptance
        assert found is not None and found.unsure == 0
        assert (found.verifies, found.committed) == (foreseen.rounds, foreseen.committed)
        assert found.histogram == foreseen.histogram
        assert [depth.share for depth in found.by_depth] == list(foreseen.by_depth)
        assert found.length.value == foreseen.length > 1.2, "a drafter that has learned nothing proves nothing"
    chat = run_bench(config(drafter, tmp_path / "chat", url, api="chat"))
    [row] = chat.rows
    assert chat.problems == [] and row.acceptance is None and row.counted is not None
    assert row.counted.length.value == foreseen.length


@pytest.mark.timeout(580)
def test_a_sweep_of_two_step_counts(drafter: Path, tmp_path: Path) -> None:
    foreseen = evaluate_checkpoint(drafter / "draft", drafter / "store", 2).result
    ours = {name: value for name, value in environment().items() if os.environ.get(name) != value}
    launch = {
        "target": str(drafter / "target"),
        "checkpoint": str(drafter / "draft"),
        "engine_version": SERVED_VERSION,
        "dtype": "float32",
        "port": free_port(),
        "python": str(VENV / "bin" / "python"),
        "launcher": [str(HERE / "scripts" / "server.py")],
        "env": ours,
    }
    bench = config(drafter, tmp_path / "unused", "http://unused", load={"concurrency": [2]})
    values = {"launch": launch, "load": bench.load.model_dump(), "steps": [1, 2], "baseline": False,
              "output": str(tmp_path / "sweep")}  # fmt: skip

    result = run_sweep(build_config(SweepConfig, values, "test"))

    assert result.problems == [], result.problems
    assert [row.name for row in result.flat] == ["1 step", "2 steps"]
    for row, expected in zip(result.flat, foreseen.by_steps, strict=True):
        assert row.acceptance is not None and row.acceptance.length.value == expected.length
        assert row.acceptance.histogram == expected.histogram
        assert row.against["reference"].compared == ASKED and row.against["reference"].different == 0
    assert len(result.ranking(2)) == 2
    assert port_fault("127.0.0.1", result.sweep_rows[0].setting.command.port) is None
