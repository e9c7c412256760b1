"""When products can be made in float8, and a run that makes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.draft.fused.weights import Weights
from eagle3.errors import ProblemsError
from eagle3.train.float8 import check_float8
from eagle3.train.tracking import read_log
from eagle3.train.trainer import run_training
from tests.stores import train_config, write_random_store
from tests.unit.draft.cases import make_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPE = replace(
    make_config(), hidden_size=64, target_hidden_size=64, vocab_size=64,
    intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    draft_vocab_size=32,
)  # fmt: skip


def test_widths_are_multiples_of_16_each_that_is_not_is_named() -> None:
    assert check_float8(SHAPE, "no", CPU) == []
    problems = check_float8(replace(SHAPE, draft_vocab_size=31, intermediate_size=120), "no", CPU)
    assert [problem.kind for problem in problems] == ["train.float8"] * 2
    assert "draft.draft_vocab_size is 31" in problems[0].message
    assert "draft.intermediate_size is 120" in problems[1].message


def test_a_gpu_needs_bf16_and_compute_capability_8_9() -> None:
    assert check_float8(SHAPE, "bf16", CUDA, (9, 0)) == check_float8(SHAPE, "bf16", CUDA, (8, 9)) == []
    messages = [problem.message for problem in check_float8(SHAPE, "no", CUDA, (8, 0))]
    assert len(messages) == 2 and "mixed_precision is no" in messages[0] and "8.0" in messages[1]


def test_a_run_in_float8_is_near_the_same_run_in_float32(tmp_path: Path) -> None:
    store = write_random_store(tmp_path / "store")
    draft = {"draft_vocab_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    draft |= {"intermediate_size": 32}
    losses = []
    for name, float8 in (("plain", False), ("float8", True)):
        ttt = {"steps": 2, "float8": float8}
        run_training(train_config(store, tmp_path / name, ttt=ttt, draft=draft))
        records = read_log(tmp_path / name / "log.jsonl")
        losses.append([record["loss"] for record in records if record["kind"] == "train"])
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.03)


def test_a_run_that_cannot_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    store = write_random_store(tmp_path / "store")
    config = train_config(store, tmp_path / "run", ttt={"float8": True}, draft={"draft_vocab_size": 15})
    with pytest.raises(ProblemsError, match="draft_vocab_size is 15"):
        run_training(config)
    assert not (tmp_path / "run").exists()


def test_an_evaluation_rounds_the_weights_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = write_random_store(tmp_path / "store", count=8)
    made: list[Weights] = []
    original = Weights.of

    def counting(*args: Any) -> Weights:
        made.append(original(*args))
        return made[-1]

    monkeypatch.setattr(Weights, "of", counting)
    draft = {"draft_vocab_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    draft |= {"intermediate_size": 32}
    ttt = {"steps": 2, "float8": True}
    config = train_config(store, tmp_path / "run", ttt=ttt, draft=draft, eval_fraction=0.5, max_steps=2)
    run_training(config)
    assert len(made) == 2 + 2  # before the first step and at the end; a step each
