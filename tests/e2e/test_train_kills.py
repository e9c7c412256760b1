"""Runs that are killed or asked to stop at random moments; EAGLE3_TRAIN_KILLS says how many, by default a few."""

from __future__ import annotations

import os

from tests.kills import done_by

RUNS = int(os.environ.get("EAGLE3_TRAIN_KILLS", "4"))


def test_runs_that_are_disturbed_at_random_are_those_of_undisturbed_ones() -> None:
    done = done_by("train_kills", RUNS, 120 + 30 * RUNS)
    assert done["runs of 1"] >= RUNS // 2 <= done["runs of 2"]
    # How many of each depends on the machine's speed; stops have tests of their own.
    assert sum(count for what, count in done.items() if what.startswith("killed by")) > 0, done
