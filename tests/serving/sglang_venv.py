"""Runs the real SGLang on a CPU: scripts and an HTTP server, in the venv that `make test-serving` makes.

SGLang and this project need different versions of Transformers, so they never share a process: a script of `scripts/`
gets a request as JSON and writes its reply as JSON. `eagle3.wiring` and `eagle3.draft`, which need torch at most, can
be imported there too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from filelock import FileLock

from eagle3.target.packaged import packaged_smollm2
from tests.ports import free_port

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
VENV = ROOT / os.environ.get("SERVING_VENV", ".venv-sglang")
SERVED_VERSION = "0.5.23"
LOG_TAIL = 4000


def environment() -> dict[str, str]:
    """Environment variables of every process that runs SGLang."""
    paths = [str(HERE / "shim"), str(ROOT)]
    fixed = {
        "PYTHONPATH": os.pathsep.join(paths),
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(min(2, os.cpu_count() or 1)),
    }
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**inherited, **fixed}


def smollm2() -> Path:
    """SmolLM2 as a checkpoint folder, made once and kept between runs, whichever process is first."""
    with FileLock(VENV / "smollm2.lock"):
        return packaged_smollm2(VENV / "smollm2-135m-instruct")


def run_script(script: str, request: Any, folder: Path, timeout: float = 240) -> Any:
    """Runs a script of `scripts/` under SGLang and returns its reply.

    Args:
        script: its name, without `.py`.
        request: anything JSON can hold (paths as strings).
        folder: where request, reply and log go.
        timeout: seconds after which it is killed.
    """
    request_file, reply_file, log_file = (folder / f"{script}.{kind}" for kind in ("request.json", "json", "log"))
    request_file.write_text(json.dumps(request, default=str), encoding="utf-8")
    reply_file.unlink(missing_ok=True)
    with _process([f"{script}.py", str(request_file), str(reply_file)], log_file) as process:
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{script} took over {timeout:.0f} s\n{_tail(log_file)}") from None
    assert code == 0, f"{script} ended with {code}\n{_tail(log_file)}"
    return json.loads(reply_file.read_text(encoding="utf-8"))


@contextmanager
def running_server(arguments: Sequence[str], log_file: Path, timeout: float = 240) -> Iterator[str]:
    """The URL of a real SGLang HTTP server on a free port, killed on leaving.

    Args:
        arguments: as for `python -m sglang.launch_server`, without host, port, device and attention backend.
        log_file: gets its output.
        timeout: seconds until it must be ready.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with _process(["server.py", "--host", "127.0.0.1", "--port", str(port), *arguments], log_file) as process:
        _wait_until_ready(url, process, log_file, time.monotonic() + timeout)
        yield url


@contextmanager
def _process(command: Sequence[str], log_file: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A Python of the venv that runs `scripts/<command>`; its whole process group is killed on leaving.

    SIGKILL at once: SGLang takes five seconds to look whether it was sent a SIGTERM. Its sockets are removed with their
    folder, whose path is short, as those of sockets must be.
    """
    python = VENV / "bin" / "python"
    assert python.exists(), f"{python} is missing: `make test-serving` makes it"
    with log_file.open("wb") as log, TemporaryDirectory(prefix="sglang", ignore_cleanup_errors=True) as sockets:
        process = subprocess.Popen(
            [str(python), str(HERE / "scripts" / command[0]), *command[1:]],
            env={**environment(), "TMPDIR": sockets},
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log_file: Path, deadline: float) -> None:
    """Polls `/ready`, which sends no traffic through the model."""
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server ended with {process.returncode}\n{_tail(log_file)}"
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
    raise AssertionError(f"the server was not ready in time\n{_tail(log_file)}")


def _tail(log_file: Path) -> str:
    return log_file.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:]
