"""The same store whichever engine ran the target, and the probe finds each one right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.data.store import StoreReader, verify
from eagle3.target.extract import run_extract
from eagle3.target.probe import probe_dataset
from eagle3.target.tiny import make_tiny_kimi
from tests.unit.target.cases import extract_config, relative, write_conversations
from tests.unit.target.streaming.checkpoints import plain_copy, to_int4

ROOT = Path(__file__).parents[2]
LAYERS = [2, 30, 58]


def extract(checkpoint: Path, output: Path, engine: str, **values: Any) -> StoreReader:
    data = write_conversations(output.parent / "data.jsonl", 24)
    run_extract(extract_config(checkpoint, data, output, output_indices=LAYERS, engine=engine, **values))
    assert verify(output, deep=True) == []
    return StoreReader(output)


def assert_equal(one: StoreReader, other: StoreReader, allowed: float) -> None:
    assert one.contract == other.contract and one.samples == other.samples
    greedy = []
    for number in range(len(one)):
        mine, theirs = one.read(number), other.read(number)
        assert mine.input_ids.equal(theirs.input_ids) and mine.loss_mask.equal(theirs.loss_mask)
        assert relative(mine.aux_hidden_states.float(), theirs.aux_hidden_states.float()) <= allowed
        assert relative(mine.last_hidden_states.float(), theirs.last_hidden_states.float()) <= allowed
        assert mine.target_argmax is not None and theirs.target_argmax is not None
        greedy.append(mine.target_argmax == theirs.target_argmax)
    same = torch.cat(greedy).float().mean()
    assert same == 1 if allowed < 1e-4 else same > 0.9, "rounding decides between tokens that are about as likely"


@pytest.mark.parametrize(
    ("last", "dtype", "allowed"),
    [("post_norm", "float32", 1e-5), ("pre_norm", "float32", 1e-5), ("post_norm", "float8_e4m3fn", 1e-3)],
)
def test_both_engines_give_the_same_store_of_the_tiny_kimi(
    tmp_path: Path, last: str, dtype: str, allowed: float
) -> None:
    target = make_tiny_kimi(tmp_path / "target")
    values: dict[str, Any] = {"last_hidden_states": last, "store_dtype": dtype}
    whole = extract(target, tmp_path / "whole", "transformers", **values)
    layers = extract(
        target, tmp_path / "layers", "streamed", **values, stream={"chunk_tokens": 300, "micro_tokens": 64}
    )

    assert_equal(whole, layers, allowed)
    for store, engine in (("whole", "streamed"), ("layers", "transformers")):
        assert probe_dataset(tmp_path / store, str(target), engine=engine, device="cpu").problems == []


def test_an_int4_kimi_is_streamed_and_found_right(tmp_path: Path) -> None:
    target = make_tiny_kimi(tmp_path / "target")
    plain = plain_copy(make_tiny_kimi, tmp_path / "plain", to_int4(target))
    packed = extract(target, tmp_path / "packed", "auto")
    whole = extract(plain, tmp_path / "whole", "transformers", target={"name": "target"})

    assert packed.settings["engine"] == "streamed"
    for number in range(len(packed)):
        assert relative(packed.read(number).aux_hidden_states, whole.read(number).aux_hidden_states) <= 1e-5
    assert probe_dataset(tmp_path / "packed", str(target), device="cpu").problems == []


def test_the_benchmark_still_runs() -> None:
    command = [sys.executable, "benchmarks/extract.py", "--shape", "small", "--repeats", "1", "--device", "cpu"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)

    assert found.returncode == 0, found.stderr
    for what in ("walk", "moe", "moe transformers", "offload"):
        assert f'{{"what": "{what}",' in found.stdout
