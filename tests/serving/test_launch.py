"""`serve launch` and `serve wait` on the real SGLang: started, waited for without a token, ended; and one that dies."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from eagle3.config import LaunchConfig
from eagle3.errors import ProblemsError
from eagle3.serve.launch import LaunchCommand, build_command, free_port, start_server
from eagle3.serve.launch.ports import port_fault
from eagle3.serve.wait import Graphs, Progress, wait_until_ready
from eagle3.serve.wait.endpoints import Endpoints
from eagle3.target.tiny import make_tiny_llama
from eagle3.wiring import LayerWiring
from tests.serving.constructed import make_export, make_target
from tests.serving.sglang_venv import HERE, SERVED_VERSION, VENV, environment

WARM_UP_TOKENS = 8
"""What SGLang generates for itself (`sglang/srt/entrypoints/http_server.py`, `_execute_server_warmup`)."""
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> LaunchCommand:
    folder, wiring = tmp_path_factory.mktemp("launch"), LayerWiring((2, 4, 6), 10)
    target = make_target(folder / "target", make_tiny_llama, wiring, hidden_size=128)
    draft = make_export(folder / "export", target, wiring, SERVED_VERSION)
    ours = {name: value for name, value in environment().items() if os.environ.get(name) != value}
    return build_command(
        LaunchConfig(
            target=str(target),
            checkpoint=str(draft),
            steps=2,
            dtype="float32",
            port=free_port(),
            python=str(VENV / "bin" / "python"),
            launcher=[str(HERE / "scripts" / "server.py")],  # the CPU's launcher, which adds --device and the like
            env=ours,
        )
    )


def counted(url: str, name: str) -> float:
    """A counter of the server's, over all its labels."""
    metrics = httpx.get(f"{url}/metrics", follow_redirects=True).text
    return sum(float(value) for value in re.findall(rf"^sglang:{name}{{[^}}]*}} (\S+)$", metrics, re.MULTILINE))


def test_a_real_server_is_started_waited_for_and_ended_without_a_token_of_ours(
    command: LaunchCommand, tmp_path: Path
) -> None:
    seen: list[Progress] = []
    with start_server(command, tmp_path / "serve.log") as server:
        ready = wait_until_ready(command.url, process=server, on_progress=seen.append, poll_seconds=0.2)

        assert (ready.how, ready.served, ready.version) == ("/ready", command.target, SERVED_VERSION)
        phases = list(dict.fromkeys(progress.phase for progress in seen))
        assert phases[0] in ("unknown", "starting") and len(phases) > 1
        assert {"starting", "weights"} <= set(ready.phases)
        assert ready.graphs == Graphs() and not ready.warnings, "there are no CUDA graphs on a CPU"
        for _ in range(3):
            assert wait_until_ready(command.url, version=SERVED_VERSION).how == "/ready"
        old = Endpoints(command.url, "0.5.19", passive_health=True)
        assert [old.ask().how, old.ask().state] == ["/health", "ready"], "which our command made passive"
        old.close()
        assert counted(command.url, "num_requests_total") == 1, "its own warm-up"
        assert counted(command.url, "generation_tokens_total") == WARM_UP_TOKENS
        log = (tmp_path / "serve.log").read_text(encoding="utf-8")
        assert log.count("Prefill batch") == 1

    assert server.poll() is not None
    assert port_fault(command.host, command.port) is None
    followed = wait_until_ready(None, log=tmp_path / "serve.log")
    assert followed.how == "log" and followed.phases == ready.phases | {"warm_up": followed.phases["warm_up"]}


def test_a_real_server_that_dies_is_told_with_its_cause(command: LaunchCommand, tmp_path: Path) -> None:
    """A drafter with a shorter context than the target's, which the checks of `build_command` would refuse."""
    draft = command.argv[command.argv.index("--speculative-draft-model-path") + 1]
    short = tmp_path / "draft"
    shutil.copytree(draft, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 256}))
    dying = replace(command, argv=tuple(str(short) if item == draft else item for item in command.argv))

    with start_server(dying, tmp_path / "serve.log") as server, pytest.raises(ProblemsError) as caught:
        wait_until_ready(dying.url, process=server)

    (problem,) = caught.value.problems
    assert problem.kind == "start.context"
    assert "(2048) is greater than the derived context_length (256)" in problem.message
    assert port_fault(command.host, command.port) is None
