"""Ranks, levers and the planner's point, against arithmetic done by hand."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from eagle3.config import PlanConfig
from eagle3.serve.planner import make_plan
from eagle3.serve.profile import Profile, profile_json, profile_traces, render_profile
from eagle3.serve.profile.advice import sentences, speedup
from eagle3.serve.profile.load import Measured
from eagle3.serve.profile.ranks import Waiting
from eagle3.serve.profile.result import _profile

from .cases import TraceBuilder

SCHEMA = Path(__file__).parents[4] / "docs/schemas/profile.schema.json"


def ranks(folder: Path, *nccl: float, cycles: int = 12) -> list[Path]:
    paths = []
    for rank, length in enumerate(nccl):
        builder = TraceBuilder(origin=1000.0 * rank)
        builder.cycles(cycles, nccl=length)
        paths.append(builder.write(folder / f"x-TP-{rank}.trace.json.gz"))
    return paths


def validated(profile: Profile) -> dict[str, object]:
    value = json.loads(profile_json(profile))
    jsonschema.validate(value, json.loads(SCHEMA.read_text(encoding="utf-8")))
    return value


def test_speedup_is_amdahls() -> None:
    assert speedup(0.5, 0.5) == pytest.approx(1 / 3)
    assert speedup(0.029, 0.0) == pytest.approx(0.0299, abs=1e-4)
    assert speedup(1.0, 0.0) is None and speedup(0.0, 0.0) == 0


def test_the_shortest_of_the_ranks_is_the_transfer_and_the_rest_is_waiting(tmp_path: Path) -> None:
    found = profile_traces(ranks(tmp_path, 100, 60, 90), steps=3)

    assert isinstance(found.waiting, Waiting)
    assert found.waiting.transfer == pytest.approx(0.060)
    assert found.waiting.wait == (pytest.approx(0.040), pytest.approx(0), pytest.approx(0.030))
    assert found.waiting.by_phase == {"verify": (pytest.approx(0.060), pytest.approx(0.070 / 3))}
    communication = next(lever for lever in found.levers if lever.name == "communication")
    assert "waiting for another rank is only 28%" in communication.what
    assert "100% of it is in verify" in communication.what
    validated(found)
    assert "waits for others" in render_profile(found)


def test_ranks_that_mostly_wait_are_told_so(tmp_path: Path) -> None:
    [lever] = [
        item for item in profile_traces(ranks(tmp_path, 100, 10, 100, 100)).levers if item.name == "communication"
    ]
    assert lever.what.startswith("what makes ranks late: 87% of communication is waiting")


def test_ranks_of_other_cycles_are_not_compared(tmp_path: Path) -> None:
    paths = [*ranks(tmp_path, 100, cycles=12)]
    builder = TraceBuilder()
    builder.cycles(9)
    paths.append(builder.write(tmp_path / "x-TP-1.json"))

    found = profile_traces(paths)

    assert isinstance(found.waiting, str) and found.waiting in found.notes
    validated(found)


def test_the_levers_are_sorted_and_their_bounds_are_amdahls(tmp_path: Path) -> None:
    found = profile_traces(ranks(tmp_path, 100), steps=3)

    shares = {lever.name: lever.share for lever in found.levers}
    assert shares == {
        "verify": pytest.approx(0.57),
        "drafter": pytest.approx(0.17),
        "overhead": pytest.approx(0.13),
        "communication": pytest.approx(0.1),
        "sampling": pytest.approx(0.03),
    }
    assert [lever.name for lever in found.levers] == ["verify", "drafter", "overhead", "communication", "sampling"]
    for lever in found.levers:
        assert lever.halved == pytest.approx(1 / (1 - lever.share / 2) - 1)
        assert lever.free == pytest.approx(1 / (1 - lever.share) - 1)
    lines = sentences(found.levers, found.split)
    assert lines[0].startswith("first verify: 57.0% of the cycle; at half its time decoding would be 39.9% faster")
    assert lines[-1] == (
        "verify with its communication is 67% of the cycle: a drafter that cost nothing would win at most 20.5%"
    )


def test_launching_piece_by_piece_is_answered_with_cuda_graphs(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.cycles(12, graphs=False)
    found = profile_traces([builder.write(tmp_path / "x.json")])

    what = {lever.name: lever.what for lever in found.levers}
    assert what["verify"].startswith("CUDA graphs: 4 of 4 pieces")
    assert what["overhead"].startswith("CUDA graphs for verify, draft, draft extend")
    with_graphs = {lever.name: lever.what for lever in profile_traces(ranks(tmp_path, 100)).levers}
    assert "CUDA graphs" not in with_graphs["verify"] + with_graphs["overhead"]
    assert with_graphs["overhead"].startswith("the overlap schedule") and "before draft" in with_graphs["overhead"]


def test_kernels_that_prepare_a_graph_do_not_make_it_piece_by_piece(tmp_path: Path) -> None:
    """As SGLang 0.5.16 does on an H200: 25 kernels of its own before a draft extend's graph of 26."""
    builder = TraceBuilder()
    builder.cycles(12)
    for cycle in range(12):
        for place in range(6):
            builder.launch(cycle * 1000 + 846, (cycle * 1000 + 841 + place, cycle * 1000 + 842 + place, "prepare"))
    found = profile_traces([builder.write(tmp_path / "x.json")])

    assert found.split.launches["draft_extend", False] > found.split.launches["draft_extend", True] > 0
    assert not any("CUDA graphs" in lever.what for lever in found.levers)


def test_the_point_is_taken_by_the_planner_and_gives_the_cycle_back(tmp_path: Path) -> None:
    found = profile_traces(ranks(tmp_path, 100), steps=3)

    assert found.point is not None
    assert found.point.model_dump(exclude_none=True) == {
        "steps": 3, "batch": 1, "verify_ms": 0.67, "draft_ms": 0.17, "cycle_ms": 1.0,
    }  # fmt: skip
    line = next(line for line in render_profile(found).splitlines() if line.startswith("  - {"))
    assert line == "  - {steps: 3, batch: 1, verify_ms: 0.67, draft_ms: 0.17, cycle_ms: 1.0}"
    point = {**found.point.model_dump(exclude_none=True), "acceptance_length": 2.0}
    plan = make_plan(PlanConfig(points=[point], cost={"verify_per_token_ms": 0.0}, steps=[3], draws=100), "x")
    assert plan.batches[0].best.cycle_ms == pytest.approx(1.0)
    assert plan.batches[0].best.tok_s == pytest.approx(2000)


@pytest.mark.parametrize(
    ("cycle_ms", "cycle", "stretched"), [(0.9, 0.9, True), (1.1, 1.1, False), (0.5, 1.0, True), (0.99, 0.99, False)]
)
def test_the_cycle_without_the_profiler_is_preferred_unless_it_cannot_be(
    tmp_path: Path, cycle_ms: float, cycle: float, stretched: bool
) -> None:
    splits = profile_traces(ranks(tmp_path, 100)).splits

    found = _profile(splits, 3, 4, None, None, Measured(8, 300, 120, cycle_ms), [])

    assert found.point is not None
    assert (found.point.cycle_ms, found.point.acceptance_length) == (cycle, 2.5)
    assert any("times as long as one without" in note for note in found.notes) == stretched
    idle = max(0.0, 0.125 - max(0.0, 1 - cycle_ms))
    assert found.idle == pytest.approx(idle)
    assert next(lever.share for lever in found.levers if lever.name == "verify") == pytest.approx(0.57 / (0.875 + idle))
    assert sentences(found.levers, found.split, found.idle)[-1].startswith(
        f"verify with its communication is {0.67 / (0.875 + idle):.0%} of the cycle"
    )
    value = validated(found)
    assert value["untraced"] == {
        "requests": 8, "tokens": 300, "verifies": 120, "cycle_ms": cycle_ms, "acceptance_length": 2.5,
    }  # fmt: skip


def test_no_point_without_what_it_needs_and_it_says_why(tmp_path: Path) -> None:
    paths = ranks(tmp_path, 100)
    tree = profile_traces(paths, steps=3, draft_tokens=8)
    assert tree.point is None and any("is a tree: give its acceptance_length" in note for note in tree.notes)
    unknown = profile_traces(paths)
    assert unknown.point is None and any("give --steps" in note for note in unknown.notes)
    builder = TraceBuilder()
    builder.cycles(5)
    builder.without("kernel", "gpu_memcpy")
    of_the_cpu = profile_traces([builder.write(tmp_path / "cpu.json")], steps=3)
    assert of_the_cpu.point is None and any("needs the GPU's times" in note for note in of_the_cpu.notes)
    for found in (tree, unknown, of_the_cpu):
        validated(found)
