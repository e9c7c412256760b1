"""`eagle3 data repair`, and the extraction that redoes exactly what it dropped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle3.cli import main
from eagle3.data.store import verify
from eagle3.target.extract import run_extract
from eagle3.target.tiny import make_tiny_llama
from tests.unit.target.cases import extract_config, write_conversations


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".lock"}


def eagle3(*args: object) -> int:
    with pytest.raises(SystemExit) as stop:
        main([str(item) for item in args])
    return int(stop.value.code or 0)


@pytest.mark.parametrize("engine", ["transformers", "streamed"])
@pytest.mark.parametrize("bad", [[0, 2], [3]])
def test_extraction_redoes_exactly_what_repair_dropped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: str, bad: list[int]
) -> None:
    data, target = write_conversations(tmp_path / "data.jsonl", 10), make_tiny_llama(tmp_path / "target")
    cfg = extract_config(target, data, tmp_path / "store", output_indices=[1, 2], shard_max_samples=2, engine=engine)
    folder, listed = Path(cfg.output), tmp_path / "redo.jsonl"
    assert run_extract(cfg).extracted == 10
    whole = content(folder)
    for number in bad:
        shard = folder / f"shard-{number:05d}.safetensors"
        data_bytes = bytearray(shard.read_bytes())
        data_bytes[-1] ^= 1  # in the loss mask: a header and sizes say nothing of it
        shard.write_bytes(data_bytes)
    assert run_extract(cfg).extracted == 0, "only a deep verification sees this"
    capsys.readouterr()
    assert eagle3("data", "verify", folder) == 2
    assert capsys.readouterr().out.count("store.checksum") == len(bad)

    assert eagle3("data", "repair", folder) == 2
    assert eagle3("data", "repair", folder, "--yes", "--list", listed) == 0
    redo = {json.loads(line)["id"] for line in listed.read_text().splitlines()}
    kept = {path.name: path.stat().st_mtime_ns for path in folder.glob("shard-*")}
    assert len(redo) == 2 * len(bad) and len(kept) == 5 - len(bad)
    assert run_extract(cfg).extracted == len(redo)

    assert content(folder) == whole and verify(folder, deep=True) == []
    assert kept.items() <= {path.name: path.stat().st_mtime_ns for path in folder.glob("shard-*")}.items()
