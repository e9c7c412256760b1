"""Runs that are killed or asked to stop at random moments; EAGLE3_TRAIN_KILLS says how many, by default a few.

In a process of its own, that trains nothing itself: it forks the runs' processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUNS = int(os.environ.get("EAGLE3_TRAIN_KILLS", "6"))


def test_runs_that_are_disturbed_at_random_are_those_of_undisturbed_ones() -> None:
    command = [sys.executable, "-m", "tests.train_kills", "--runs", str(RUNS)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120 + 30 * RUNS, check=False)

    assert ended.returncode == 0, ended.stderr
    done = json.loads(ended.stdout)
    assert done["runs"] >= RUNS and done["runs of 1"] >= RUNS // 2 <= done["runs of 2"]
    # How many of each depends on the machine's speed; stops have tests of their own.
    assert sum(count for what, count in done.items() if what.startswith("killed by")) > 0, done
