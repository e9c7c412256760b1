"""What the scripts have in common that kill processes at random moments, and the tests that run them."""

from __future__ import annotations

import argparse
import builtins
import faulthandler
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
CALLS = ("replace", "fsync", "unlink", "rmdir", "mkdir", "open", "preadv", "utime", "scandir", "listdir")


class Deadly:
    """Kills this process as it enters a call to the file system."""

    def __init__(self, call: int) -> None:
        self._left = call

    def install(self) -> None:
        """In this process, for good."""
        for name in CALLS:
            setattr(os, name, self._counted(getattr(os, name)))
        os.fsync = self._counted(lambda descriptor: None)  # a killed process, unlike a machine, loses no page
        real = io.open
        io.open = builtins.open = lambda *args, **kwargs: _File(real(*args, **kwargs), self)  # type: ignore[assignment]

    def call(self, before: Callable[[], object] = lambda: None) -> None:
        self._left -= 1
        if self._left == 0:
            before()
            os.kill(os.getpid(), signal.SIGKILL)

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.call()
            return function(*args, **kwargs)

        return counted


class _File:
    """A file of which a write may be its process's last."""

    def __init__(self, handle: Any, deadly: Deadly) -> None:
        self._handle, self._deadly = handle, deadly

    def write(self, data: Any) -> int:
        self._deadly.call(lambda: (self._handle.write(data[: len(data) // 2]), self._handle.flush()))
        return self._handle.write(data)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.close()

    def __iter__(self) -> Any:
        return iter(self._handle)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


def quietly(log: Path, deadly: Deadly, work: Callable[[], None]) -> None:
    """Does the work of a child; what it says goes to a file."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    faulthandler.register(signal.SIGUSR2)
    deadly.install()
    try:
        work()
    except BaseException:  # whatever it is, the process ends with it
        traceback.print_exc()
        raise


def run_cases(
    about: str | None,
    check: Callable[[int, int, Path], Counter[str]],
    runs_of_a_case: int,
    default: int,
    begun: Mapping[str, int] | None = None,
) -> int:
    """A script's `--runs` and `--seed`; prints what was done as JSON, or which case went wrong, and how.

    Args:
        about: the script's docstring.
        check: runs the case of a seed and a number in a folder; raises AssertionError.
        default: runs.
        begun: counts that are printed even if they stay so.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--runs", type=int, default=default, help=f"rounded up to whole cases, of {runs_of_a_case} runs each"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    done, cases = Counter(begun or {}), -(-args.runs // runs_of_a_case)
    for number in range(cases):
        with tempfile.TemporaryDirectory() as folder:
            try:
                done.update(check(args.seed, number, Path(folder)))
            except AssertionError as error:
                print(f"case {number} of seed {args.seed}: {error}", file=sys.stderr)
                return 1
    print(json.dumps({"runs": cases * runs_of_a_case, **done}))
    return 0


def done_by(script: str, runs: int, seconds: int) -> dict[str, Any]:
    """What a script of `tests` prints, in a process of its own, that trains nothing itself: it forks those that do."""
    command = [sys.executable, "-m", f"tests.{script}", "--runs", str(runs)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
    assert ended.returncode == 0, ended.stderr
    done: dict[str, Any] = json.loads(ended.stdout)
    assert done["runs"] >= runs
    return done
