"""`extract_hidden_states.py` and `eagle3 regenerate` as a user runs them: real processes, killed with SIGKILL."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eagle3.config import ExtractConfig, RegenerateConfig, Section, dump_config
from eagle3.data.store import StoreReader, verify
from eagle3.data.store_format import MANIFEST_FILE
from eagle3.target.extract import run_extract
from eagle3.target.regenerate import run_regenerate
from eagle3.target.tiny import make_tiny_kimi, make_tiny_llama
from tests.unit.target.cases import extract_config, regenerate_config, write_conversations
from tests.unit.target.fake_answers import FakeAnswers

ROOT = Path(__file__).parents[2]
EXTRACT = [str(ROOT / "extract_hidden_states.py")]
REGENERATE = ["-m", "eagle3.cli", "regenerate"]
SAMPLES = 40
"""Two in a shard, so that a kill after the first few shards comes in time."""


def start(command: list[str], cfg: Section, folder: Path) -> subprocess.Popen[str]:
    config = folder / f"{type(cfg).__name__}.yaml"
    config.write_text(dump_config(cfg))
    return subprocess.Popen(
        [sys.executable, *command, "--config", str(config)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def kill_when(process: subprocess.Popen[str], ready: Callable[[], bool]) -> None:
    """SIGKILL as soon as there is something on disk."""
    deadline = time.monotonic() + 120
    while not ready():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def listed_shards(folder: str) -> int:
    manifest = Path(folder) / MANIFEST_FILE
    return len(json.loads(manifest.read_text())["shards"]) if manifest.exists() else 0


@pytest.fixture
def extraction(tmp_path: Path) -> ExtractConfig:
    data = write_conversations(tmp_path / "data.jsonl", SAMPLES)
    target = make_tiny_kimi(tmp_path / "tiny-kimi")
    return extract_config(target, data, tmp_path / "store", output_indices=[2, 30, 58], shard_max_samples=2)


def test_killed_extraction_resumes_to_an_equal_store(extraction: ExtractConfig, tmp_path: Path) -> None:
    whole = extraction.model_copy(update={"output": str(tmp_path / "whole")})
    assert run_extract(whole).extracted == SAMPLES
    kill_when(start(EXTRACT, extraction, tmp_path), lambda: listed_shards(extraction.output) >= 3)
    done = 2 * listed_shards(extraction.output)
    assert 6 <= done < SAMPLES, "the kill came too late to show anything"
    assert run_extract(extraction).extracted == SAMPLES - done
    assert verify(Path(extraction.output), deep=True) == []
    first, second = StoreReader(whole.output), StoreReader(extraction.output)
    assert first.samples == second.samples
    for index in range(SAMPLES):
        one, other = first.read(index), second.read(index)
        assert torch.equal(one.input_ids, other.input_ids) and torch.equal(one.loss_mask, other.loss_mask)
        assert torch.equal(one.aux_hidden_states, other.aux_hidden_states)
        assert torch.equal(one.last_hidden_states, other.last_hidden_states)


def test_resume_under_other_settings_exits_2_and_lists_each(extraction: ExtractConfig, tmp_path: Path) -> None:
    small = extraction.model_copy(update={"data": extraction.data.model_copy(update={"limit": 4})})
    run_extract(small)
    other = small.model_copy(update={"output_indices": [3, 31, 59], "last_hidden_states": "pre_norm"})
    process = start(EXTRACT, other, tmp_path)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "contract.output_indices" in errors and "contract.last_hidden_states" in errors
    assert "Traceback" not in errors


def test_killed_regeneration_resumes_to_an_equal_file(tmp_path: Path) -> None:
    data = write_conversations(tmp_path / "data.jsonl", 20)
    target = make_tiny_llama(tmp_path / "tiny-llama")
    cfg: RegenerateConfig = regenerate_config(target, data, tmp_path / "out.jsonl", batch_size=2, max_new_tokens=24)
    whole = cfg.model_copy(update={"output": str(tmp_path / "whole.jsonl")})
    assert run_regenerate(whole).generated == 20
    partial = Path(f"{cfg.output}.partial")
    kill_when(start(REGENERATE, cfg, tmp_path), lambda: partial.exists() and partial.read_bytes().count(b"\n") >= 4)
    assert not Path(cfg.output).exists()
    done = partial.read_bytes().count(b"\n")
    assert 4 <= done < 20, "the kill came too late to show anything"
    assert run_regenerate(cfg).generated == 20 - done
    assert Path(cfg.output).read_bytes() == Path(whole.output).read_bytes()


def test_regeneration_from_a_server_killed_in_the_middle_asks_what_is_missing(tmp_path: Path) -> None:
    data = write_conversations(tmp_path / "data.jsonl", 40)
    target = make_tiny_llama(tmp_path / "tiny-llama")
    fake = FakeAnswers(delay=0.05)
    with fake.running() as url:
        server = {"urls": [url], "model": "/models/tiny", "concurrency": 2}
        cfg: RegenerateConfig = regenerate_config(target, data, tmp_path / "out.jsonl", server=server)
        partial = Path(f"{cfg.output}.partial")
        kill_when(start(REGENERATE, cfg, tmp_path), lambda: partial.exists() and partial.read_bytes().count(b"\n") >= 6)
        done = partial.read_bytes().count(b"\n")
        assert not Path(cfg.output).exists() and 6 <= done < 40
        time.sleep(0.2)  # what was in flight ends at the server
        fake.requests.clear()
        process = start(REGENERATE, cfg, tmp_path)
        told, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert len(fake.requests) == 40 - done and f"{40 - done} made by this run" in told
    lines = [json.loads(line) for line in Path(cfg.output).read_text().splitlines()]
    assert [line["id"] for line in lines] == [f"c{number}" for number in range(40)]


def test_failures_end_with_exit_code_2_and_a_dry_run_asks_nobody(tmp_path: Path) -> None:
    data = write_conversations(tmp_path / "data.jsonl", 3)
    target = make_tiny_llama(tmp_path / "tiny-llama")
    fake = FakeAnswers(fault=lambda number, _: "400" if number == 1 else None)
    with fake.running() as url:
        server = {"urls": [url], "model": "/models/tiny"}
        cfg: RegenerateConfig = regenerate_config(target, data, tmp_path / "out.jsonl", server=server)
        plan = start([*REGENERATE, "--dry-run"], cfg, tmp_path)
        told, _ = plan.communicate(timeout=120)
        assert plan.returncode == 0 and "3 answers to make" in told and not fake.requests
        process = start(REGENERATE, cfg, tmp_path)
        told, errors = process.communicate(timeout=120)
    assert process.returncode == 2 and "Traceback" not in errors
    assert "1 prompts have no answer" in told
    assert len(Path(f"{cfg.output}.failed.jsonl").read_text().splitlines()) == 1
