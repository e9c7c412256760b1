"""Arguments that a user adds by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3.serve.launch import build_command
from tests.unit.serve.launch.cases import launch_config, refused

Models = tuple[Path, Path]


@pytest.mark.parametrize(
    "extra",
    [
        ["--tp-size", "4"],
        ["--tp=4"],
        ["--tensor-parallel-size", "4"],
        ["--speculative-num-steps=7"],
        ["--speculative-num-s", "7"],
        ["--speculative_num_steps", "7"],
        ["--model", "x"],
        ["--disable-cuda-graph"],
        ["--cuda-graph-backend-decode=disabled"],
        ["--cuda-graph-backend-decode", "disabled"],
        ["--random-seed", "1", "--random-seed", "2"],
        ["--cuda-graph-max-bs", "8"],
        ["nonsense"],
    ],
)
def test_what_contradicts_the_command_is_refused(models: Models, extra: list[str]) -> None:
    assert refused(launch_config(*models, extra_args=extra)) == ["launch.extra_args"]


@pytest.mark.parametrize(
    "extra",
    [
        ["--random-seed", "1", "--schedule-conservativeness=0.3"],
        ["--cuda-graph-backend-decode=full"],
        ["--attention-backend", "triton"],
        ["--json-model-override-args", '{"a": 1}'],
        ["--enable-return-hidden-states"],
    ],
)
def test_anything_else_is_passed_on_as_it_is(models: Models, extra: list[str]) -> None:
    assert build_command(launch_config(*models, extra_args=extra)).argv[-len(extra) :] == tuple(extra)


def test_an_argument_that_only_another_release_takes_is_refused(models: Models) -> None:
    extra = ["--cuda-graph-max-bs", "8"]

    assert refused(launch_config(models[0], None, steps=0, extra_args=extra)) == ["launch.extra_args"]
    old = launch_config(models[0], None, steps=0, extra_args=extra, engine_version="0.5.12.post1")
    assert build_command(old).argv[-2:] == ("--cuda-graph-max-bs", "8")


def test_graphs_may_be_off_where_the_config_says_so(models: Models) -> None:
    cfg = launch_config(*models, cuda_graphs=False, extra_args=["--cuda-graph-backend-decode", "disabled"])

    assert build_command(cfg).argv[-1] == "disabled"
