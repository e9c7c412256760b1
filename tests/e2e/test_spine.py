"""The main job end to end through the command line, with the shipped configs of the tiny Kimi at its real depth."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle3.cli import main
from eagle3.data.store import StoreReader
from eagle3.wiring import assert_wiring, check_checkpoint

CONFIGS = Path(__file__).parents[2] / "configs" / "tiny-kimi"
STATES, CHECKPOINT = "datasets/tiny-kimi/states", "checkpoints/tiny-kimi"


def eagle3(*args: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(args)
    return int(caught.value.code or 0)


def test_shipped_configs_run_from_answers_to_a_checked_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    assert eagle3("tiny-kimi", "--output", "datasets/tiny-kimi") == 0
    shorter = ["max_new_tokens=24", "data.limit=12"]
    assert eagle3("regenerate", "--config", str(CONFIGS / "regenerate.yaml"), *shorter) == 0
    assert eagle3("extract", "--config", str(CONFIGS / "extract.yaml")) == 0
    assert eagle3("train", "--config", str(CONFIGS / "train.yaml"), "max_steps=20", "epochs=5") == 0
    assert eagle3("export", "--config", str(CONFIGS / "serve.yaml")) == 0
    check = ["wiring", "check", CHECKPOINT, "--dataset", STATES, "--target", "datasets/tiny-kimi/target"]
    assert eagle3(*check, "--engine-version", "0.5.23") == 0
    assert eagle3("evaluate", "--checkpoint", CHECKPOINT, "--dataset", STATES) == 0

    assert_wiring(CHECKPOINT, dataset=STATES)
    reader = StoreReader(Path(STATES))
    assert reader.contract.output_indices == (2, 30, 58)
    config = json.loads(Path(CHECKPOINT, "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [3, 31, 59]
    assert config["eagle_aux_hidden_state_layer_ids"] == [3, 31, 59]
    capsys.readouterr()

    assert eagle3(*check, "--engine-version", "0.5.12") == 2
    out, _ = capsys.readouterr()
    assert "one too late" in out and "[2, 30, 58]" in out
    assert [p.kind for p in check_checkpoint(CHECKPOINT, engine_version="0.5.9")] == ["engine.unsupported"]
