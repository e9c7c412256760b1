"""The plan of a walk: what it chooses, what it needs, what it refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.config import StreamSection
from eagle3.errors import ProblemsError
from eagle3.target.streaming import memory
from eagle3.target.streaming.memory import MemoryPlan, explained_memory, plan_memory
from eagle3.target.streaming.skeleton import Skeleton
from eagle3.target.tiny import make_tiny_kimi
from tests.unit.target.streaming.checkpoints import files_of

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def skeleton(tmp_path_factory: pytest.TempPathFactory) -> Skeleton:
    folder = make_tiny_kimi(tmp_path_factory.mktemp("kimi") / "kimi", num_hidden_layers=3)
    return Skeleton(files_of(folder), torch.float32, 3)


def plan(skeleton: Skeleton, tmp_path: Path, longest: int = 100, **values: Any) -> MemoryPlan:
    return plan_memory(skeleton, StreamSection(**values), longest, CPU, tmp_path)


def test_a_plan_stays_under_its_limit(skeleton: Skeleton, tmp_path: Path) -> None:
    found = plan(skeleton, tmp_path, device_memory_gib=0.25)

    assert found.device_bytes <= found.device_limit == 2**28
    assert found.sizes.micro_tokens >= 1024


def test_less_memory_means_smaller_sizes(skeleton: Skeleton, tmp_path: Path) -> None:
    found = [plan(skeleton, tmp_path, device_memory_gib=size).sizes for size in (4.0, 0.25, 0.01)]

    tokens = [(sizes.chunk_tokens, sizes.micro_tokens) for sizes in found]
    assert tokens == sorted(tokens, reverse=True) and len(set(tokens)) == 3


def test_a_residual_stream_that_does_not_fit_goes_to_a_file(
    skeleton: Skeleton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"chunk_tokens": 500_000, "micro_tokens": 8_192}
    assert plan(skeleton, tmp_path, **sizes, device_memory_gib=1.0).sizes.residual == "device"
    assert plan(skeleton, tmp_path, **sizes, device_memory_gib=0.1).sizes.residual == "file"

    monkeypatch.setattr(memory.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(ProblemsError) as error:
        plan(skeleton, tmp_path, **sizes, device_memory_gib=0.1)
    assert [problem.kind for problem in error.value.problems] == ["stream.disk"]


def test_what_the_config_says_is_kept(skeleton: Skeleton, tmp_path: Path) -> None:
    found = plan(skeleton, tmp_path, chunk_tokens=5000, micro_tokens=300, residual="file", expert_group=2)

    assert vars(found.sizes) == {"chunk_tokens": 5000, "micro_tokens": 300, "residual": "file", "expert_group": 2}
    assert found.scratch_bytes == 5000 * 64 * 4


def test_a_long_sample_counts_whole(skeleton: Skeleton, tmp_path: Path) -> None:
    short, long = (
        plan(skeleton, tmp_path, longest=longest, chunk_tokens=5000, micro_tokens=300) for longest in (300, 3000)
    )

    assert long.device_bytes > short.device_bytes


def test_what_cannot_fit_is_refused_with_what_it_needs(skeleton: Skeleton, tmp_path: Path) -> None:
    with pytest.raises(ProblemsError) as error:
        plan(skeleton, tmp_path, device_memory_gib=0.0005)

    [problem] = error.value.problems
    assert problem.kind == "stream.memory" and ", 0.51 MiB may be used" in problem.message
    assert re.match(r"needs [1-9]\d*\.\d\d MiB for", problem.message) and "micro_tokens" in problem.fix


def test_a_scratch_file_that_the_disk_cannot_hold_is_refused(
    skeleton: Skeleton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})())

    with pytest.raises(ProblemsError) as error:
        plan(skeleton, tmp_path / "not" / "there", chunk_tokens=5000, residual="file")

    assert [problem.kind for problem in error.value.problems] == ["stream.disk"]


def test_groups_of_experts_need_less(skeleton: Skeleton, tmp_path: Path) -> None:
    whole, grouped = (
        plan(skeleton, tmp_path, chunk_tokens=100, micro_tokens=100, **values) for values in ({}, {"expert_group": 1})
    )

    assert whole.device_bytes > grouped.device_bytes


def test_a_scratch_folder_that_cannot_be_written_is_refused_beforehand(skeleton: Skeleton, tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(ProblemsError) as error:
        plan(skeleton, tmp_path / "file" / "below", chunk_tokens=5000, residual="file")

    [problem] = error.value.problems
    assert problem.kind == "stream.disk" and f"{tmp_path / 'file'} is no folder" in problem.message


@pytest.mark.parametrize(
    "raised",
    [MemoryError(), torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("x: can't allocate memory: you tried")],
)
def test_an_allocation_that_fails_is_named(raised: Exception) -> None:
    with pytest.raises(ProblemsError, match=r"stream\.memory"), explained_memory():
        raise raised


def test_another_failure_is_not_taken_for_memory() -> None:
    with pytest.raises(RuntimeError, match="illegal"), explained_memory():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_the_targets_head_is_planned_for_and_may_take_the_place_of_a_micro_batch(tmp_path: Path) -> None:
    """It is on the device after the last layer only."""
    folder = make_tiny_kimi(tmp_path / "kimi", num_hidden_layers=3)
    skeleton = Skeleton(files_of(folder), torch.float32, 3)

    def planned(micro: int, greedy: bool) -> int:
        section = StreamSection(chunk_tokens=5000, micro_tokens=micro)
        return plan_memory(skeleton, section, 10, CPU, tmp_path, greedy=greedy).device_bytes

    head, logits = 512 * 64 * 4, 1024 * 512 * 4
    assert planned(10, True) - planned(10, False) > logits
    assert memory._greedy_bytes(skeleton, 0) == head + 2 * logits
    assert planned(10_000, True) == planned(10_000, False)
