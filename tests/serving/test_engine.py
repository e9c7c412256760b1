"""That the stand-ins run the real SGLang at all, and that nothing of it is left running."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

from eagle3.target.tiny import make_tiny_llama
from tests.serving.sglang_venv import running_server


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.timeout(600)
def test_a_server_answers_and_is_gone_afterwards(tmp_path: Path) -> None:
    target = make_tiny_llama(tmp_path / "target")
    with running_server(["--model-path", str(target), "--dtype", "float32"], tmp_path / "server.log") as url:
        body = {"input_ids": [5, 6, 7], "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}}
        reply = post(f"{url}/generate", body)
        processes = psutil.Process().children(recursive=True)

    assert len(reply["output_ids"]) == 4
    assert len(processes) > 1
    _, left = psutil.wait_procs(processes, timeout=10)
    assert [process for process in left if is_alive(process)] == []
