"""A dry run says what the run does, and does nothing."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from eagle3.cli import main
from eagle3.config import ExtractConfig
from eagle3.errors import ProblemsError
from eagle3.target import estimate
from eagle3.target.estimate import active_parameters, dry_run
from eagle3.target.plan import make_plan
from tests.unit.target.cases import extract_config, write_conversations
from tests.unit.target.stream_cases import CHUNKS, Fake, as_process, stream_config

TinyTarget = Callable[[str], Path]


@pytest.fixture
def cfg(tiny_target: TinyTarget, tmp_path: Path) -> ExtractConfig:
    return stream_config(tiny_target("llama"), tmp_path, "store")


def tree(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*")}


def layer_mib(target: Path) -> float:
    with safe_open(target / "model.safetensors", "pt") as file:
        tensors = [file.get_tensor(name) for name in file.keys() if ".layers." in name]  # noqa: SIM118
    return sum(tensor.nbytes for tensor in tensors) / 2**20


def test_it_says_chunks_passes_and_bytes_and_writes_nothing(cfg: ExtractConfig, tmp_path: Path) -> None:
    (tmp_path / "before").mkdir()
    write_conversations(tmp_path / "data.jsonl", 20)
    before = tree(tmp_path)
    report = dry_run(as_process(cfg, 0, 3))
    assert tree(tmp_path) == before
    text, mib = report.render(), layer_mib(Path(cfg.target.path))
    assert not report.problems
    assert f"{CHUNKS} chunks, {CHUNKS} of them to be done, each a pass over {mib:.2f} MiB of weights" in text
    assert f"{CHUNKS * mib:.2f} MiB read in all, at most {3 * mib:.2f} MiB by a process" in text
    assert "20 samples, 536 tokens" in text and "to be written" in text and "free in" in text
    assert "chunks of 100 tokens, at most 16 in a call of a layer" in text and "planned peak" in text
    assert re.search(r"process 0: 3 chunks, \d+ tokens, .*\n  process 1: 2 chunks.*\n  process 2: 2 chunks", text)
    assert "the largest share is 1.17 times the mean" in text
    assert "7 chunks do not divide evenly among 3 processes: the first have 3, the others 2" in text
    assert "rate: " in text and "time, estimated: " in text and "docs/benchmarks.md" in text


def test_the_chunk_size_that_it_advises_is_even(cfg: ExtractConfig) -> None:
    text = dry_run(as_process(cfg, 0, 3)).render()
    (advised,) = re.findall(r"stream\.chunk_tokens=(\d+)", text)
    section = cfg.stream.model_copy(update={"chunk_tokens": int(advised)})
    even = dry_run(as_process(cfg.model_copy(update={"stream": section}), 0, 3)).render()
    assert "advice" not in even and "9 chunks" in even


def test_hours_follow_the_rate_and_the_largest_share(cfg: ExtractConfig) -> None:
    section = cfg.stream.model_copy(update={"tokens_per_second": 0.01})
    text = dry_run(as_process(cfg.model_copy(update={"stream": section}), 0, 3)).render()
    largest = max(int(tokens) for tokens in re.findall(r"process \d: \d chunks, (\d+) tokens", text))
    assert f"{536 / 36:.1f} hours for one process, {largest / 36:.1f} hours for 3" in text
    assert "as stream.tokens_per_second says" in text


def test_what_is_done_is_not_done_again(cfg: ExtractConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(monkeypatch)
    fake.run(cfg, 1, 3)
    assert "7 chunks, 5 of them to be done" in dry_run(cfg).render()
    fake.run(cfg)
    assert "the store is complete" in dry_run(cfg).render()


def test_what_is_missing_or_damaged_is_done_again(cfg: ExtractConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    Fake(monkeypatch).run(cfg)
    (Path(cfg.output) / "shard-00002.safetensors").unlink()
    os.truncate(Path(cfg.output) / "shard-00005.safetensors", 1000)
    text = dry_run(cfg).render()
    assert "2 shards are missing or damaged, and are done again" in text
    assert "7 chunks, 2 of them to be done" in text and "complete" not in text


def test_one_process_is_told_its_time_once_and_that_no_gpu_is_here(cfg: ExtractConfig) -> None:
    text = dry_run(cfg).render()
    assert re.search(r"time, estimated: [\d.]+ seconds for one process, where each", text)
    assert "there is no GPU here" in text


def test_no_weight_is_loaded(cfg: ExtractConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(tensor: torch.Tensor, *_: object) -> torch.Tensor:
        assert tensor.is_meta, "filled a tensor"
        return tensor

    monkeypatch.setattr(torch.Tensor, "copy_", fill)
    for engine in ("streamed", "transformers"):
        assert f"engine: {engine}" in dry_run(cfg.model_copy(update={"engine": engine})).render()


def test_an_engine_that_holds_the_target_reads_it_once(cfg: ExtractConfig) -> None:
    text = dry_run(cfg.model_copy(update={"engine": "transformers"})).render()
    size = (Path(cfg.target.path) / "model.safetensors").stat().st_size / 2**20
    assert f"one process reads the weights once: {size:.2f} MiB" in text
    assert "time, estimated" in text


def test_every_problem_is_said_at_once(cfg: ExtractConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    Fake(monkeypatch).run(cfg, 0, 2)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=1 << 40, used=1 << 40, free=0))
    section = cfg.stream.model_copy(update={"chunk_tokens": 50, "device_memory_gib": 1e-6})
    report = dry_run(cfg.model_copy(update={"stream": section}))
    assert [problem.kind for problem in report.problems] == [
        "extract.disk",
        "store.other_settings",
        "stream.memory",
        "stream.disk",
    ]
    assert all(problem.message in report.render() for problem in report.problems)


def test_a_checkpoint_that_cannot_be_read_is_said(cfg: ExtractConfig, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(cfg.target.path, tmp_path / "target"))
    (folder / "model.safetensors").unlink()
    other = cfg.model_copy(update={"target": cfg.target.model_copy(update={"path": str(folder)})})
    assert dry_run(other).problems


def test_it_downloads_nothing(cfg: ExtractConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def snapshot(*_: object, local_files_only: bool, **__: object) -> str:
        asked.append(local_files_only)
        raise FileNotFoundError("not in the cache")

    monkeypatch.setattr("eagle3.target.resolve.snapshot_download", snapshot)
    other = cfg.model_copy(update={"target": cfg.target.model_copy(update={"path": "owner/name"})})
    with pytest.raises(ProblemsError, match=r"not in the hub's cache(.|\n)*hf download owner/name"):
        dry_run(other)
    assert asked == [True]


@pytest.mark.parametrize("name", ["kimi", "deepseek_v3"])
def test_of_the_experts_only_the_chosen_ones_count(tiny_target: TinyTarget, tmp_path: Path, name: str) -> None:
    data = write_conversations(tmp_path / "data.jsonl", 2)
    cfg = extract_config(tiny_target(name), data, tmp_path / "store", output_indices=[0, 1, 2])
    plan = estimate.make_plan(cfg)
    model = plan.files.spec.empty(plan.files.folder, torch.float32)
    layers, config = plan.files.spec.decoder_layers(model), plan.files.text_config
    whole = sum(parameter.numel() for layer in layers for parameter in layer.parameters())
    sparse = len(layers) - config["first_k_dense_replace"]
    expert = 3 * config["hidden_size"] * config["moe_intermediate_size"]
    idle = sparse * (config["n_routed_experts"] - config["num_experts_per_tok"]) * expert
    assert active_parameters(list(layers), config["num_experts_per_tok"]) == whole - idle


def test_the_rated_parameters_are_kimis() -> None:
    config = AutoConfig.for_model(
        "deepseek_v3",
        hidden_size=7168,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        num_hidden_layers=61,
        num_attention_heads=64,
        num_key_value_heads=64,
        n_routed_experts=384,
        num_experts_per_tok=8,
        n_shared_experts=1,
        first_k_dense_replace=1,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        vocab_size=163840,
        n_group=1,
        topk_group=1,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert active_parameters(list(model.model.layers), 8) == pytest.approx(estimate._RATED_PARAMETERS, rel=0.01)


def test_the_estimate_says_what_each_type_would_take(
    cfg: ExtractConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a whole store in that type, the bytes of its tensors."""
    before = tree(tmp_path)
    (tmp_path / "cfg.json").write_text(cfg.model_dump_json())
    with pytest.raises(SystemExit) as stop:
        main(["data", "estimate", "--config", str(tmp_path / "cfg.json")])
    (tmp_path / "cfg.json").unlink()
    out = capsys.readouterr().out
    assert not stop.value.code and tree(tmp_path).keys() == before.keys()
    assert "time, estimated: " in out and "dry run: nothing was written" in out
    tokens, supervised, hidden, slots = 536, make_plan(cfg).prepared.supervised_tokens, 64, len(cfg.output_indices)
    for dtype, size, scale in (("bfloat16", 2, 0), ("float16", 2, 0), ("float32", 4, 0), ("float8_e4m3fn", 1, 4)):
        for rows, last in (("all", tokens), ("supervised", supervised)):
            total = tokens * (slots * (size * hidden + scale) + 3) + last * (size * hidden + scale + 2)
            chosen = r" \(this config\)" if (dtype, rows) == ("float32", "supervised") else ""
            line = rf"^{dtype} +{rows} +{total / tokens:,.0f} +{total / 2**20:.2f} MiB{chosen}$"
            assert re.search(line, out, re.MULTILINE), (line, out)
