"""Merged stores and parts of one, as the target itself sees them: `eagle3 wiring probe` computes them again."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3.cli import main
from eagle3.data.store import StoreReader
from eagle3.target.extract import run_extract
from eagle3.target.tiny import make_tiny_llama
from tests.unit.target.cases import extract_config, write_conversations


def eagle3(*args: object) -> int:
    with pytest.raises(SystemExit) as stop:
        main([str(item) for item in args])
    return int(stop.value.code or 0)


def test_the_target_recognises_a_merged_store_and_its_parts(tmp_path: Path) -> None:
    data, target = write_conversations(tmp_path / "data.jsonl", 12), make_tiny_llama(tmp_path / "target")
    lines = data.read_text().splitlines(keepends=True)
    stores = []
    for number in range(2):
        part = tmp_path / f"data{number}.jsonl"
        part.write_text("".join(lines[6 * number : 6 * number + 6]))
        store = tmp_path / f"store{number}"
        cfg = extract_config(target, part, store, output_indices=[1, 3], shard_max_samples=2, engine="transformers")
        assert run_extract(cfg).extracted == 6
        stores.append(store)

    assert eagle3("data", "merge", tmp_path / "both", *stores) == 2, "the conversations differ"
    assert eagle3("data", "merge", tmp_path / "both", *stores, "--allow-different-data") == 0
    assert [sample.id for sample in StoreReader(tmp_path / "both").samples] == [f"c{number}" for number in range(12)]
    assert eagle3("data", "split", tmp_path / "both", tmp_path / "cut", "--fraction", 0.3, "--seed", 1) == 0

    for folder in (tmp_path / "both", tmp_path / "cut" / "part-00000", tmp_path / "cut" / "part-00001"):
        assert eagle3("data", "verify", folder) == 0
        assert eagle3("wiring", "probe", folder, "--target", target, "--samples", 2) == 0
    assert len(StoreReader(tmp_path / "cut" / "part-00000")) == 4
