"""Rings whose writer and trainer are killed at random moments; EAGLE3_RING_KILLS says how many runs, by default a few.

In a process of its own, that trains nothing itself: it forks both sides.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUNS = int(os.environ.get("EAGLE3_RING_KILLS", "18"))


def test_runs_whose_sides_are_killed_at_random_are_those_of_undisturbed_ones() -> None:
    command = [sys.executable, "-m", "tests.ring_kills", "--runs", str(RUNS)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60 + 10 * RUNS, check=False)

    assert ended.returncode == 0, ended.stderr
    done = json.loads(ended.stdout)
    assert done["runs"] >= RUNS
    assert min(done["writer"], done["trainer"]) > RUNS // 4, f"hardly anything was killed: {done}"
