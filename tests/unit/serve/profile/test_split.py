"""Traces whose split is known, split exactly."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3.errors import ProblemsError
from eagle3.serve.profile.summary import Split, split_trace
from eagle3.serve.profile.trace import read_trace

from .cases import EXPECTED, IDLE_BEFORE, NCCL, TraceBuilder


def split(builder: TraceBuilder, folder: Path) -> Split:
    return split_trace(read_trace(builder.write(folder / "x-TP-0.trace.json.gz")))


def microseconds(found: Split) -> dict[str, float]:
    return {part: round(spread.mean * 1000, 6) for part, spread in found.parts.items()}


def assert_adds_up(found: Split) -> None:
    for cycle in found.cycles:
        assert sum(cycle.parts.values()) == pytest.approx(cycle.length, abs=1e-3)
    assert sum(spread.mean for spread in found.parts.values()) == pytest.approx(found.cycle.mean)


@pytest.mark.parametrize("lead", [0.0, 900.0, 1900.0], ids=["in step", "a cycle ahead", "two cycles ahead"])
def test_ranges_and_graphs_give_the_exact_split_however_far_the_cpu_is_ahead(tmp_path: Path, lead: float) -> None:
    builder = TraceBuilder(lead)
    builder.cycles(12)

    found = split(builder, tmp_path)

    assert (found.method, found.batch, len(found.cycles)) == ("ranges", 1, 11)
    assert microseconds(found) == EXPECTED
    assert {phase: round(ms * 1000, 6) for phase, ms in found.idle_before.items()} == IDLE_BEFORE
    assert found.communication == {"verify": pytest.approx(0.1)}
    assert found.cycle.mean == found.cycle.median == pytest.approx(1.0)
    assert found.verify_ms == pytest.approx(0.67) and found.draft_ms == pytest.approx(0.17)
    assert found.left_out == {"unfinished": 1} and found.outlier_share == 0
    assert found.launches["verify", True] == 4 and found.launches["draft", False] == 1
    assert_adds_up(found)


def test_without_graphs_the_gaps_between_kernels_are_idle(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.cycles(12, graphs=False)

    found = split(builder, tmp_path)

    assert microseconds(found) == {**EXPECTED, "draft": 108, "idle": EXPECTED["idle"] + 2}
    assert ("verify", True) not in found.launches


def test_without_ranges_the_graphs_and_the_kernels_between_tell_the_phases(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.cycles(12, ranges=False)

    found = split(builder, tmp_path)

    assert found.method == "graphs" and found.batch is None
    # what follows the draft extend's graph cannot be told from the scheduler's
    assert microseconds(found) == {**EXPECTED, "draft_extend": 50, "between": 15}
    assert any("counts as between phases" in note for note in found.notes)
    assert_adds_up(found)


def test_graphs_are_seen_without_anything_of_the_cpu(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.cycles(12, ranges=False)

    found = split(builder.without("cuda_runtime"), tmp_path)

    assert microseconds(found) == {**EXPECTED, "draft_extend": 50, "between": 15}


def test_graphs_without_a_telling_kernel_are_told_by_size_and_it_says_so(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.cycles(12, ranges=False)
    for event in builder.events:
        if event["name"] in ("build_tree_efficient<int>", "VerifyTreeGreedyKernel"):
            event["name"] = "fused_kernel_7"

    found = split(builder, tmp_path)

    assert any("largest of every three" in note for note in found.notes)
    told = {"draft": 100, "sampling": 0, "draft_extend": 50, "between": 15, "unattributed": 10 + 30}
    assert microseconds(found) == {**EXPECTED, **told}
    assert found.communication == {"verify": pytest.approx(0.1)}
    assert_adds_up(found)


def test_neither_ranges_nor_graphs_is_refused(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.cycles(12, ranges=False, graphs=False)
    with pytest.raises(ProblemsError, match=r"trace\.phases"):
        split(builder, tmp_path)


def test_python_frames_tell_the_phases_where_there_are_no_ranges(tmp_path: Path) -> None:
    builder = TraceBuilder()
    worker, target = "sglang/srt/speculative/eagle_worker.py(9): ", "sglang/srt/managers/tp_worker.py(9): "
    at = 0.0
    for _ in range(4):
        start, at = at, builder.cycle(at, ranges=False)
        for begin, end, name in (
            (-6, 950, worker + "forward_batch_generation"),
            (-5, 125, worker + "draft"),
            (126, 841, worker + "verify"),
            (127, 805, target + "forward_batch_generation"),
            (845, 918, worker + "forward_draft_extend_after_decode"),
            (846, 910, target + "forward_batch_generation"),
        ):
            builder.x("python_function", name, start + begin - builder.lead, end - begin)

    found = split(builder, tmp_path)

    assert found.method == "stack" and len(found.cycles) == 3
    assert microseconds(found) == EXPECTED


@pytest.mark.parametrize("ranges", [True, False])
def test_a_prefill_in_between_leaves_its_cycle_out(tmp_path: Path, ranges: bool) -> None:
    builder = TraceBuilder()
    at = builder.prefill(0, ranges)
    for count in (5, 6):
        at = builder.prefill(builder.cycles(count, at, ranges=ranges), ranges)
    builder.cycles(4, at, ranges=ranges)

    found = split(builder, tmp_path)

    assert found.left_out == {"interrupted": 2, "unfinished": 1}
    assert len(found.cycles) == 4 + 5 + 3
    assert microseconds(found)["verify"] == EXPECTED["verify"]
    assert found.cycle.high == pytest.approx(1.0)


def test_an_outlier_is_left_out_and_counted(tmp_path: Path) -> None:
    builder = TraceBuilder()
    at = builder.cycle(builder.cycles(6), scale=3.0)
    builder.cycles(6, at)

    found = split(builder, tmp_path)

    assert found.left_out == {"outlier": 1, "unfinished": 1}
    assert found.outlier_share == pytest.approx(3 / 14)
    assert microseconds(found) == EXPECTED


def test_cycles_of_the_commonest_batch_are_used(tmp_path: Path) -> None:
    builder = TraceBuilder()
    at = builder.cycles(3, batch=1)
    builder.cycles(8, at, batch=8)

    found = split(builder, tmp_path)

    assert (found.batch, len(found.cycles), found.left_out["other batch"]) == (8, 7, 3)


def test_spread_is_over_the_cycles(tmp_path: Path) -> None:
    builder = TraceBuilder()
    at = 0.0
    for scale in (1.0, 1.1, 1.2, 1.3, 1.4, 1.0):
        at = builder.cycle(at, scale=scale)

    found = split(builder, tmp_path)

    verify = found.parts["verify"]
    assert (verify.mean, verify.median) == (pytest.approx(0.57 * 1.2), pytest.approx(0.57 * 1.2))
    assert (verify.low, verify.high) == (pytest.approx(0.57 * 1.1), pytest.approx(0.57 * 1.3))
    assert any("only 5 cycles" in note for note in found.notes)


def test_communication_behind_other_work_is_not_the_cycles_time(tmp_path: Path) -> None:
    builder = TraceBuilder()
    at = 0.0
    for _ in range(5):
        builder.launch(at + 200, (at + 200, at + 300, NCCL), stream=20)
        builder.launch(at + 795, (at + 795, at + 805, NCCL), stream=20)
        at = builder.cycle(at)

    found = split(builder, tmp_path)

    # 5 of the second one lie bare, in what was idle
    assert microseconds(found) == {**EXPECTED, "communication": 105, "idle": EXPECTED["idle"] - 5}
    assert found.overlapped == pytest.approx(0.105)
    assert_adds_up(found)


def test_work_of_two_phases_at_once_counts_once(tmp_path: Path) -> None:
    builder = TraceBuilder()
    at = 0.0
    for _ in range(5):
        builder.launch(at + 50, (at + 80, at + 145, "draft_on_another_stream"), stream=21)
        at = builder.cycle(at)

    found = split(builder, tmp_path)

    assert microseconds(found) == {**EXPECTED, "draft": 130, "idle": EXPECTED["idle"] - 20}
    assert found.overlapped == pytest.approx((20 + 10 + 15) / 1000)
    assert_adds_up(found)


def test_work_whose_launch_is_not_there_is_unattributed(tmp_path: Path) -> None:
    builder = TraceBuilder()
    at = 0.0
    for _ in range(5):
        builder.x("kernel", "lost", at + 930, 10, 7)
        builder.x("kernel", "lost too", at + 950, 10, 7, correlation=10**9 + int(at))
        builder.x("kernel", "no id", at + 970, 10, 7, correlation="7")
        at = builder.cycle(at)

    found = split(builder, tmp_path)

    assert microseconds(found) == {**EXPECTED, "unattributed": 30, "idle": EXPECTED["idle"] - 30}
    assert found.share("unattributed") == pytest.approx(0.03)


def test_launches_of_other_threads_are_not_the_workers(tmp_path: Path) -> None:
    builder = TraceBuilder()
    at = 0.0
    for _ in range(5):
        builder.x("cuda_runtime", "cudaLaunchKernel", at + 300 - builder.lead, 1, 99, correlation=10**8 + int(at))
        builder.x("kernel", "another thread's", at + 930, 10, 7, correlation=10**8 + int(at))
        at = builder.cycle(at)

    assert microseconds(split(builder, tmp_path))["unattributed"] == 10


@pytest.mark.parametrize("stage", ["VERIFY", "TARGET_VERIFY"])
def test_ranges_inside_others_are_the_outer_ones(tmp_path: Path, stage: str) -> None:
    builder = TraceBuilder()
    at = 0.0
    for _ in range(5):
        builder.span(at - 8, at + 960, "scheduler.run_batch")
        builder.span(at, at + 30, "step[DRAFT bs=1]")
        builder.span(at + 846, at + 900, f"step[{stage} bs=1]")  # a draft extend borrows the verify's mode
        at = builder.cycle(at)
    for event in builder.events:
        event["name"] = event["name"].replace("TARGET_VERIFY", stage)

    assert microseconds(split(builder, tmp_path)) == EXPECTED


def test_a_trace_without_a_gpu_is_split_by_the_cpus_ranges(tmp_path: Path) -> None:
    builder = TraceBuilder(lead=0)
    at = 0.0
    for _ in range(12):
        builder.x("cpu_op", "c10d::allreduce_", at + 300, 50)
        builder.x("user_annotation", "gloo:all_reduce", at + 340, 30)
        at = builder.cycle(at)
    builder.without("kernel", "gpu_memcpy", "cuda_runtime")

    found = split(builder, tmp_path)

    assert not found.on_gpu and len(found.cycles) == 11
    assert microseconds(found) == {
        "draft": 130,
        "verify": 805 - 125 - 70,
        "sampling": 40,
        "draft_extend": 73,
        "communication": 70,
        "between": 77,
        "idle": 0,
        "unattributed": 0,
    }
    assert any("times of the CPU" in note for note in found.notes)
    assert_adds_up(found)


def test_no_whole_cycle_is_said_with_the_reasons(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.prefill(builder.cycle(builder.prefill(0)))
    with pytest.raises(ProblemsError, match=r"trace\.no_cycle.*no whole decode cycle \(1 interrupted\)"):
        split(builder, tmp_path)


def test_work_that_reaches_into_the_next_cycle_is_cut_at_its_beginning(tmp_path: Path) -> None:
    builder = TraceBuilder()
    at = 0.0
    for _ in range(5):
        builder.launch(at + 930, (at + 960, at + 1110, "copy on another stream"), stream=22)
        at = builder.cycle(at)

    found = split(builder, tmp_path)

    assert [round(cycle.parts["between"], 3) for cycle in found.cycles] == [45, 57, 57, 57]  # 40-42 and 100-110 too
    assert [round(cycle.overlapped, 3) for cycle in found.cycles] == [0, 98, 98, 98]
    assert_adds_up(found)


def test_correlation_id_0_joins_nothing(tmp_path: Path) -> None:
    builder = TraceBuilder()
    at = 0.0
    for _ in range(5):
        builder.x("cuda_runtime", "cudaLaunchKernel", at + 300 - builder.lead, 1, correlation=0)
        builder.x("kernel", "of nobody", at + 930, 10, 7, correlation=0)
        at = builder.cycle(at)

    assert microseconds(split(builder, tmp_path))["unattributed"] == 10
