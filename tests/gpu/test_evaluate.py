"""Offline acceptance on a GPU: the same figures as on the CPU, and its speed at Kimi's width."""

from __future__ import annotations

import sys
from pathlib import Path
from runpy import run_path

import pytest
import torch

from eagle3.evaluate.acceptance import acceptance
from eagle3.evaluate.sampling import Sampling
from tests.unit.evaluate.test_acceptance import VOCABULARY, make_model, make_reader
from tests.unit.evaluate.test_sampling import sampling_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ROOT = Path(__file__).parents[2]


def test_a_gpu_accepts_what_a_cpu_accepts(tmp_path: Path) -> None:
    model = make_model()
    reader = make_reader(tmp_path, model)
    sampling = sampling_of(reader, 0.8)
    on_cpu = acceptance(model, reader, VOCABULARY, 4, sampling=sampling)
    moved = Sampling(sampling.head.to("cuda"), 0.8)
    on_gpu = acceptance(model.cuda(), reader, VOCABULARY.to("cuda"), 4, sampling=moved)
    assert on_gpu.by_steps == on_cpu.by_steps
    assert on_gpu.sampling is not None and on_cpu.sampling is not None
    assert on_gpu.sampling.lengths == pytest.approx(on_cpu.sampling.lengths, rel=1e-5)
    assert on_gpu.sampling.of_text == pytest.approx(on_cpu.sampling.of_text, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [None, 1.0])
def test_twenty_thousand_tokens_a_second_at_kimis_width(
    monkeypatch: pytest.MonkeyPatch, temperature: float | None
) -> None:
    """On an H200, ten drafts a round, 40% of the tokens supervised."""
    if "H200" not in torch.cuda.get_device_name():
        pytest.skip("the bound is an H200's")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    measure = run_path(str(ROOT / "benchmarks/evaluate.py"))["measure"]
    found = measure("kimi", 64, 2048, 0.4, 10, temperature, 8192, "cuda")
    print(found, file=sys.stderr)
    assert found["tokens_per_second"] >= 20_000 and found["peak_gib"] < 40
