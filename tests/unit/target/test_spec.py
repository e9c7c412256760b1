"""A damaged config.json is a problem however the model is made: whole, or empty for streaming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.errors import ProblemsError
from eagle3.files import read_json_object, write_json_atomic
from eagle3.target.engines.transformers import load_model
from eagle3.target.resolve import find_target
from eagle3.target.tiny import make_tiny_kimi, make_tiny_llama
from tests.unit.target.cases import target_config


@pytest.mark.parametrize("maker", [make_tiny_llama, make_tiny_kimi])
@pytest.mark.parametrize("change", [{"initializer_range": "x"}, {"hidden_act": "nope"}, {"num_attention_heads": 0}])
def test_a_value_that_transformers_refuses_is_a_problem(tmp_path: Path, maker: Any, change: dict[str, Any]) -> None:
    path = maker(tmp_path / "target") / "config.json"
    config = read_json_object(path, "config")
    config.get("text_config", config).update(change)
    write_json_atomic(path, config)
    target = target_config(path.parent)
    files = find_target(target)

    for call in (lambda: files.spec.empty(path.parent, torch.float32), lambda: load_model(files, target)):
        with pytest.raises(ProblemsError, match=r"target\.cannot_load"):
            call()
