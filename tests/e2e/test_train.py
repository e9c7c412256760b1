"""`train.py` as people start it, plainly and under `accelerate launch`, on a tiny Kimi-K2.5."""

import subprocess
import sys
from pathlib import Path

import pytest

from eagle3.config import TrainConfig, build_config, dump_config
from eagle3.target.extract import run_extract
from eagle3.target.tiny import make_tiny_kimi
from eagle3.train.tracking import read_log
from tests.unit.target.cases import extract_config, write_conversations

ROOT = Path(__file__).parents[2]
PYTHON = [sys.executable, "train.py"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
OUTPUT_INDICES = [2, 30, 58]
FSDP = "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 2\nnum_machines: 1\nuse_cpu: true\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a store of a tiny target of the real depth, and `train.yaml`."""
    folder = tmp_path_factory.mktemp("kimi")
    target = make_tiny_kimi(folder / "target")
    data = write_conversations(folder / "data.jsonl", 24)
    run_extract(extract_config(target, data, folder / "store", output_indices=OUTPUT_INDICES))
    values = {
        "dataset": str(folder / "store"),
        "output": str(folder / "run"),
        "output_indices": OUTPUT_INDICES,
        "target": {"path": str(target)},
        "mixed_precision": "no",
        "eval_fraction": 0.1,
        "epochs": 4,
        "max_steps": 20,
        "draft": {"draft_vocab_size": 128, "rope": {"rope_theta": 50000.0}},
        "optim": {"learning_rate": 2e-3},
        "tracking": {"log_every": 1},
    }
    (folder / "train.yaml").write_text(dump_config(build_config(TrainConfig, values, "test")))
    return folder


def train(command: list[str], folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    arguments = [*command, "--config", str(folder / "train.yaml"), *overrides]
    return subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=120)


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in read_log(run / "log.jsonl") if record["kind"] == "train"]


def test_twenty_steps_are_the_same_plainly_and_on_two_ranks_of_accelerate_launch(folder: Path) -> None:
    ddp = [*ACCELERATE, "--config_file", "configs/accelerate/ddp.yaml", "train.py"]
    launches = {"plain": (PYTHON, "batch_size=4"), "ddp": (ddp, "batch_size=2")}
    engines = {"plain": "single process (NO), 1 process(es)", "ddp": "DDP (MULTI_CPU), 2 process(es)"}
    for name, (command, batch_size) in launches.items():
        done = train(command, folder, f"output={folder / name}", batch_size)
        assert done.returncode == 0, done.stderr
        assert f"engine: {engines[name]}, device cpu, float32" in done.stderr
        assert done.stdout.count("best checkpoint") == 1
    plain, two = losses(folder / "plain"), losses(folder / "ddp")
    assert len(plain) == 20
    assert plain[-1] < plain[0]
    assert two == pytest.approx(plain, abs=1e-5)


def test_what_accelerate_drops_in_silence_on_a_cpu_is_refused(folder: Path) -> None:
    (folder / "fsdp.yaml").write_text(FSDP)
    command = [*ACCELERATE, "--cpu", "--config_file", str(folder / "fsdp.yaml"), "train.py"]
    done = train(command, folder, f"output={folder / 'refused'}")
    assert done.returncode != 0
    assert "[train.engine] accelerate launch: asks for FSDP" in done.stderr
    assert "[train.processes] accelerate launch: 2 processes were asked for" in done.stderr
    assert not (folder / "refused").exists()


def test_the_store_benchmark_still_runs() -> None:
    command = [sys.executable, "benchmarks/store.py", "--shape", "small", "--repeats", "2", "--threads", "2"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)

    assert found.returncode == 0, found.stderr
    passes = ("plain", "plain into memory", "batches", "batches by processes")
    shares = ("batches as a share of plain", "batches by processes as a share of plain into memory")
    for what in (*passes, *shares, "open"):
        assert f'{{"what": "{what}",' in found.stdout
