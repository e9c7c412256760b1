"""A real model through both engines. It is here because only these tests have SmolLM2 at hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3.data.store import StoreReader
from eagle3.target.extract import run_extract
from eagle3.target.probe import probe_dataset
from eagle3.wiring.layers import default_output_indices
from tests.e2e.test_engines import assert_equal
from tests.serving.sglang_venv import smollm2
from tests.unit.target.cases import extract_config, write_conversations


@pytest.mark.parametrize(("dtype", "allowed"), [("float32", 1e-5), ("bfloat16", 0.05)])
def test_both_engines_give_the_same_store_of_smollm2(tmp_path: Path, dtype: str, allowed: float) -> None:
    target = smollm2()
    data = write_conversations(tmp_path / "data.jsonl", 12, answer_words=60)
    layers = list(default_output_indices(30))
    for engine in ("transformers", "streamed"):
        cfg = extract_config(
            target,
            data,
            tmp_path / engine,
            output_indices=layers,
            engine=engine,
            store_dtype=dtype,
            target={"dtype": dtype},
        )
        run_extract(cfg)

    assert_equal(StoreReader(tmp_path / "transformers"), StoreReader(tmp_path / "streamed"), allowed)
    for store, engine in (("transformers", "streamed"), ("streamed", "transformers")):
        assert probe_dataset(tmp_path / store, str(target), engine=engine, device="cpu").problems == []
