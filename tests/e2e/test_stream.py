"""`extract_hidden_states.py` with the streamed engine as several real processes, killed with SIGKILL and started again:
the store is byte for byte the one that a single process makes.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from eagle3.config import ExtractConfig, dump_config
from eagle3.data.store import StoreReader, verify
from eagle3.target.extract import run_extract
from eagle3.target.tiny import make_tiny_kimi
from tests.e2e.test_extract import ROOT, listed_shards
from tests.unit.target.cases import extract_config, relative, write_conversations
from tests.unit.target.stream_cases import content


@pytest.fixture(scope="module")
def cfg(tmp_path_factory: pytest.TempPathFactory) -> ExtractConfig:
    """14 chunks of a tiny Kimi of 61 layers, two shards each."""
    folder = tmp_path_factory.mktemp("stream")
    data = write_conversations(folder / "data.jsonl", 40)
    return extract_config(
        make_tiny_kimi(folder / "target"),
        data,
        folder / "whole",
        output_indices=[2, 30, 58],
        engine="streamed",
        stream={"chunk_tokens": 100, "micro_tokens": 64},
        shard_max_samples=2,
    )


@pytest.fixture(scope="module")
def whole(cfg: ExtractConfig) -> dict[str, bytes]:
    report = run_extract(cfg)
    assert report.extracted == 40 and not report.lacking
    assert verify(Path(cfg.output), deep=True) == []
    return content(cfg.output)


def start(cfg: ExtractConfig, config: Path, environment: dict[str, str], *more: str) -> subprocess.Popen[str]:
    config.write_text(dump_config(cfg))
    return subprocess.Popen(
        [sys.executable, str(ROOT / "extract_hidden_states.py"), "--config", str(config), *more],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def torchrun(rank: int, count: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank)}


def slurm_array(task: int, count: int) -> dict[str, str]:
    return {
        "SLURM_ARRAY_TASK_ID": str(task + 1),
        "SLURM_ARRAY_TASK_MIN": "1",
        "SLURM_ARRAY_TASK_COUNT": str(count),
    }


def test_two_processes_at_once_make_the_same_store(cfg: ExtractConfig, whole: dict[str, bytes], tmp_path: Path) -> None:
    shared = cfg.model_copy(update={"output": str(tmp_path / "store")})
    processes = [start(shared, tmp_path / f"{rank}.yaml", torchrun(rank, 2)) for rank in range(2)]
    for process in processes:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
    assert content(shared.output) == whole


def test_three_processes_that_are_killed_and_started_again_make_the_same_store(
    cfg: ExtractConfig, whole: dict[str, bytes], tmp_path: Path
) -> None:
    shared = cfg.model_copy(update={"output": str(tmp_path / "store")})
    generator = random.Random(0)
    for killed in (True, False):
        processes = [start(shared, tmp_path / f"{task}.yaml", slurm_array(task, 3)) for task in range(3)]
        begun, deadline = listed_shards(shared.output), time.monotonic() + 240
        while listed_shards(shared.output) == begun and any(process.poll() is None for process in processes):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(generator.uniform(0, 0.3))
        for process in processes if killed else ():
            process.kill()
        for process in processes:
            _, errors = process.communicate(timeout=240)
            assert process.returncode in (0, -9), errors
        if killed:
            assert listed_shards(shared.output) < 27, "the kill came too late to show anything"
    assert content(shared.output) == whole


def test_the_states_are_those_that_the_whole_model_gives(
    cfg: ExtractConfig, whole: dict[str, bytes], tmp_path: Path
) -> None:
    other = cfg.model_copy(update={"output": str(tmp_path / "store"), "engine": "transformers"})
    run_extract(other)
    streamed, held = StoreReader(cfg.output), StoreReader(other.output)
    assert streamed.contract == held.contract and streamed.samples == held.samples
    assert streamed.fingerprint is not None and held.fingerprint is not None
    for one, two in zip(map(streamed.read, range(40)), map(held.read, range(40)), strict=True):
        assert torch.equal(one.input_ids, two.input_ids) and torch.equal(one.loss_mask, two.loss_mask)
        assert relative(one.aux_hidden_states, two.aux_hidden_states) < 1e-5
        assert relative(one.last_hidden_states, two.last_hidden_states) < 1e-5
    for index, rows in held.fingerprint.states.items():
        assert relative(torch.tensor(streamed.fingerprint.states[index]), torch.tensor(rows)) < 1e-5, index
    for name, tensor in held.target_head().items():
        assert torch.equal(streamed.target_head()[name], tensor)


def test_chunk_size_and_packing_change_rounding_only(
    cfg: ExtractConfig, whole: dict[str, bytes], tmp_path: Path
) -> None:
    section = cfg.stream.model_copy(update={"chunk_tokens": 100_000, "micro_tokens": 1024})
    other = cfg.model_copy(update={"output": str(tmp_path / "store"), "stream": section})
    run_extract(other)
    one, two = StoreReader(cfg.output), StoreReader(other.output)
    for index in range(40):
        for name in ("aux_hidden_states", "last_hidden_states"):
            assert relative(getattr(two.read(index), name), getattr(one.read(index), name)) < 1e-5


def test_a_dry_run_from_the_command_line_plans_and_exits(cfg: ExtractConfig, tmp_path: Path) -> None:
    other = cfg.model_copy(update={"output": str(tmp_path / "store")})
    process = start(other, tmp_path / "config.yaml", torchrun(0, 4), "--dry-run")
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "14 chunks, 14 of them to be done" in output and "nothing was written" in output
    assert not Path(other.output).exists()
    bad = other.model_copy(update={"stream": cfg.stream.model_copy(update={"device_memory_gib": 1e-6})})
    process = start(bad, tmp_path / "config.yaml", {}, "--dry-run")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2 and "stream.memory" in output
