"""The benchmarks of the training step and the optimizer run, on a CPU and in small, so that they do not rot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from runpy import run_path
from statistics import mean, stdev

import pytest
import torch

from eagle3.config import dump_config, load_config
from eagle3.data.store import StoreReader
from eagle3.draft.chains import plan_chains
from eagle3.draft.config import TTTSettings
from eagle3.draft.fused.memory import Sizes, Types, step_ledger
from eagle3.errors import ProblemsError
from eagle3.target.tiny import make_tiny_llama
from eagle3.train.setup import ttt_settings
from eagle3.train.tracking import read_log
from tests.stores import train_config, write_random_store
from tests.unit.data.chat_cases import tokenizer

ROOT = Path(__file__).parents[2]
PEER = """
import torch

def build(config):
    assert config["hidden_size"] == 64
    return torch.nn.Linear(192, 8)

def step(state, batch):
    assert batch["last_hidden"].shape == (*batch["input_ids"].shape, 64) and len(batch["draft_ids"]) == 256
    state(batch["aux"].float())[batch["loss_mask"]].sum().backward()
"""


def test_the_training_steps_benchmark_times_both_steps_and_a_peer(tmp_path: Path) -> None:
    (tmp_path / "peer.py").write_text(PEER)
    command = [sys.executable, "benchmarks/train_step.py", "--shape", "tiny", "--weights", "mixed", "--device", "cpu"]
    command += ["--tokens", "96", "--documents", "2", "--fractions", "0.5", "--steps", "2", "--repeats", "2"]
    found = []
    for chunk in ("20", "0"):
        run = [*command, "--chunk", chunk, "--peer", str(tmp_path / "peer.py")]
        lines = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
        found += [json.loads(line) for line in lines]
    assert [line["step"] for line in found] == ["eagle3", "peer"] * 2
    for line in found:
        assert line["tokens_per_second"] > 0 and 0.3 < line["supervised_fraction"] < 0.7
    assert all(line["matmul_share"] > 0 for line in found if line["step"] == "eagle3")
    assert ["planned_gib" in line for line in found] == [True, False, False, False]


def test_the_training_steps_benchmark_plans_what_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    found, device = run_path(str(ROOT / "benchmarks" / "train_step.py")), torch.device("cpu")
    batch = found["make_batch"]("tiny", 96, 2, 0.5, device)
    config, tokens = found["make_config"]("tiny"), batch.input_ids.numel()
    for float8 in (False, True):
        ttt = TTTSettings(2, 0.8, "served", 20, float8)
        module, _ = found["make_module"]("tiny", ttt, device, "bf16")
        plan = plan_chains(batch.loss_mask, batch.document_ids, 2, "served")
        sizes = Sizes.of(plan, tokens, len(batch.last_hidden), 20)
        expected = step_ledger(config, Types(2, 2, float8=float8), sizes).peak
        assert found["planned_bytes"](module, batch, ttt) == expected


def test_the_optimizers_benchmark_times_every_type_of_moments() -> None:
    command = [sys.executable, "benchmarks/optimizer.py", "--shape", "tiny", "--device", "cpu", "--repeats", "2"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    found = {line["moments"]: line for line in map(json.loads, lines)}
    assert list(found) == ["float32", "bfloat16", "float8", "torch"]
    assert all(line["milliseconds"] > 0 and line["gb_per_second"] > 0 for line in found.values())
    sizes = [found[kind]["moments_bytes"] for kind in ("float32", "bfloat16", "float8")]
    assert sizes[0] > sizes[1] > sizes[2] and found["torch"]["moments_bytes"] == sizes[0]
    count = found["float32"]["parameters"]
    assert found["float32"]["bytes"] == count * 28 and count * 16 < found["float8"]["bytes"] < count * 17


def test_the_float8_benchmark_trains_with_and_without() -> None:
    command = [sys.executable, "benchmarks/float8.py", "--device", "cpu", "--hidden", "64", "--vocab", "64"]
    command += ["--documents", "1", "--steps", "20", "--seeds", "0", "--rate", "3e-3"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    plain, float8 = map(json.loads, lines)
    assert (plain["float8"], float8["float8"]) == (False, True) and plain["losses"] != float8["losses"]
    for found in (plain, float8):
        assert len(found["losses"]) == 10 and found["losses"][-1] < 0.9 * found["losses"][0]
    assert abs(float8["losses"][-1] / plain["losses"][-1] - 1) < 0.05


def test_the_scaling_benchmark_takes_whole_steps() -> None:
    command = [sys.executable, "benchmarks/scaling.py", "--shape", "tiny", "--tokens", "96", "--repeats", "2"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    lines = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    found = list(map(json.loads, lines.splitlines()))
    assert [(line["engine"], line["processes"], line["accumulate"]) for line in found] == [
        ("single", 1, 1),
        ("single", 1, 4),
    ]
    assert all(line["tokens_per_second"] > 0 for line in found)


def test_the_ablation_trains_what_is_lacking_and_compares_seed_by_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = write_random_store(tmp_path / "store", count=10)
    (tmp_path / "train.yaml").write_text(
        dump_config(train_config(store, tmp_path / "unused", max_steps=2, ttt={"steps": 2}))
    )
    settings = {"base": [], "lk": ["ttt.loss=lk_alpha"], "wild": ["optim.learning_rate=1e30"]}
    values = {"config": str(tmp_path / "train.yaml"), "held_out": 0.3, "seeds": [0, 1], "settings": settings}
    (tmp_path / "ablation.yaml").write_text(json.dumps(values))
    ablation = run_path(str(ROOT / "benchmarks" / "ablation.py"))
    out = tmp_path / "out"
    assert not ablation["run"](tmp_path / "ablation.yaml", out, [], ["base"])
    table = capsys.readouterr().out.splitlines()
    assert table[2].startswith("| base (as the config) | 2 | 1.") and "seed 1: not finished" in table[3]
    before = {path: path.stat().st_mtime_ns for path in (out / "runs").rglob("*") if path.is_file()}

    assert ablation["run"](tmp_path / "ablation.yaml", out, [], []), "a loss that is not finite"

    table = (out / "table.md").read_text().splitlines()
    assert "seed 0: train.not_finite, seed 1: train.not_finite" in table[4]
    lengths = {}
    for name in ("base", "lk"):
        logs = [read_log(out / "runs" / f"{name}-seed{seed}" / "log.jsonl") for seed in (0, 1)]
        lengths[name] = [log[-1]["acceptance_length"] for log in logs]
    gains = [mine - base for mine, base in zip(lengths["lk"], lengths["base"], strict=True)]
    cells = [cell.strip() for cell in table[3].split("|")]
    assert cells[3] == f"{mean(lengths['lk']):.3f} ± {stdev(lengths['lk']):.3f}"
    assert cells[4] == f"{mean(gains):+.3f} ± {stdev(gains):.3f}"
    assert all(path.stat().st_mtime_ns == time for path, time in before.items()), "what was finished is left alone"
    held_out, trained = (
        {sample.id for sample in StoreReader(out / "split" / part).samples} for part in ("part-00000", "part-00001")
    )
    assert not held_out & trained and len(held_out) == 3 and len(trained) == 7


def test_every_setting_of_the_shipped_ablation_is_a_config_that_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    ablation = run_path("benchmarks/ablation.py")
    file = load_config(ablation["Ablation"], "benchmarks/ablation.yaml")
    configs = ablation["make_configs"](file, Path("out"), ["target.path=target"])
    assert len(configs) == len(file.settings) * len(file.seeds) and len(file.settings) > 15
    assert all(ttt_settings(config).steps for config in configs.values())
    wrong = file.model_copy(update={"settings": {"a": ["ttt.loss=x"], "b": ["optim.names=muon"]}})
    with pytest.raises(ProblemsError, match=r"(?s)setting a: .*setting b: "):
        ablation["make_configs"](wrong, Path("out"), [])


@pytest.mark.parametrize("temperature", [[], ["--temperature", "1"]])
def test_the_evaluations_benchmark_counts_and_times(temperature: list[str]) -> None:
    command = [sys.executable, "benchmarks/evaluate.py", "--shape", "tiny", "--device", "cpu", "--samples", "4"]
    command += ["--tokens", "64", "--batch-tokens", "128", "--steps", "4", *temperature]
    found = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert found["tokens_per_second"] > 0 and found["tflop_per_second"] > 0


def test_the_evaluations_benchmark_counts_what_torch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    found = run_path(str(ROOT / "benchmarks" / "evaluate.py"))
    with FlopCounterMode(display=False) as counter:
        found["measure"]("tiny", 1, 64, 0.5, 3, 1.0, 64, "cpu")
    counted = found["operations"](found["make_config"]("tiny"), 64, 32, 3, True)
    assert counter.get_total_flops() / 2 == pytest.approx(counted, rel=0.1)  # a pass to warm up, and one more


def test_the_datas_benchmark_runs_with_every_kind_of_conversation(tmp_path: Path) -> None:
    tokenizer(eos_token="<|im_end|>", special=("<s>", "<|im_start|>", "<|im_end|>")).save_pretrained(tmp_path)
    command = [sys.executable, "benchmarks/data.py", "--small", "--tokenizer", str(tmp_path)]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    found = [json.loads(line) for line in lines][1:]
    kinds = ("one answer", "4 answers", "answer_ids")
    assert [line["what"] for line in found] == [*kinds, *(f"{kind}, generation" for kind in kinds)]
    assert all(line["bare_tokens_per_second"] > 0 < line["ours_tokens_per_second"] for line in found)
    assert [line["conversations"] for line in found] == [24, 6, 24] * 2


def test_regenerations_benchmark_gives_the_same_answers_in_batches(tmp_path: Path) -> None:
    target, prompts = make_tiny_llama(tmp_path / "target"), tmp_path / "prompts.jsonl"
    records = [json.dumps({"prompt": f"Question {number}?" * (number + 1)}) for number in range(5)]
    prompts.write_text("\n".join(records) + "\n")
    command = [sys.executable, "benchmarks/regenerate.py", "--target", str(target), "--prompts", str(prompts)]
    command += ["--max-new-tokens", "8", "--batch-sizes", "1", "3"]
    first, alone, batched = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert first.startswith("5 prompts of ") and alone.startswith("batch 1: ") and batched.startswith("batch 3: ")
    assert alone.endswith("; 0 answers differ") and batched.endswith("; 0 answers differ")
