"""`eagle3 regenerate` from a real, running SGLang gives the answers that the target gives in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle3.config import RegenerateConfig
from eagle3.errors import ProblemsError
from eagle3.target.regenerate import run_regenerate
from eagle3.target.tiny import make_tiny_llama
from tests.serving.conftest import ServerStarter
from tests.unit.target.cases import regenerate_config


@pytest.mark.timeout(600)
def test_a_llama_over_all_three_routes(server: ServerStarter, tmp_path: Path) -> None:
    target = make_tiny_llama(tmp_path / "target")
    other = make_tiny_llama(tmp_path / "other")
    prompts = tmp_path / "prompts.jsonl"
    user, old = {"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "old"}
    records: list[dict[str, Any]] = [{"id": f"p{item}", "prompt": "word " * item + "?"} for item in range(12)]
    records.append({"id": "talk", "messages": [user, old, user, old]})
    prompts.write_text("".join(json.dumps(record) + "\n" for record in records))

    def config(name: str, **values: Any) -> RegenerateConfig:
        return regenerate_config(target, prompts, tmp_path / f"{name}.jsonl", max_new_tokens=24, **values)

    here = config("here")
    assert run_regenerate(here).generated >= 13
    url = server("--model-path", target, "--dtype", "float32")
    expected = Path(here.output).read_text()

    for api in ("sglang", "completions", "chat"):
        cfg = config(api, server={"urls": [url], "api": api, "model": str(target), "backoff_seconds": 0.1})
        report = run_regenerate(cfg)
        assert report.failed == 0, report.render()
        assert Path(cfg.output).read_text() == expected, api

    with pytest.raises(ProblemsError, match=r"server\.other_target"):
        run_regenerate(config("wrong", target={"path": str(other)}, server={"urls": [url]}))
