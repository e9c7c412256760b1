"""Rings whose writer and trainer are killed at random moments; EAGLE3_RING_KILLS says how many, by default a few."""

from __future__ import annotations

import os

from tests.kills import done_by

RUNS = int(os.environ.get("EAGLE3_RING_KILLS", "6"))


def test_runs_whose_sides_are_killed_at_random_are_those_of_undisturbed_ones() -> None:
    done = done_by("ring_kills", RUNS, 120 + 20 * RUNS)
    assert min(done["writer"], done["trainer"]) > RUNS // 4, f"hardly anything was killed: {done}"
