"""Who does what: the division is the same for everybody, and nobody guesses who he is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle3.config import StreamSection
from eagle3.errors import ProblemsError
from eagle3.target.shares import Process, cut_chunks, even_chunk_tokens, local_device, this_process


def shape(lengths: list[int], chunk_tokens: int, max_bytes: int = 10**9, max_samples: int = 1000) -> list[Any]:
    chunks = cut_chunks(lengths, [10 * length for length in lengths], chunk_tokens, max_bytes, max_samples)
    return [[(shard.number, shard.samples) for shard in chunk.shards] for chunk in chunks]


def test_a_chunk_is_whole_shards_that_are_numbered_through() -> None:
    assert shape([3, 3, 3, 9, 2, 2, 2, 2], 8, max_samples=2) == [
        [(0, (0, 1))],
        [(1, (2,))],
        [(2, (3,))],
        [(3, (4, 5)), (4, (6, 7))],
    ]
    assert shape([3, 3], 8, max_bytes=40) == [[(0, (0,)), (1, (1,))]]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 100), st.integers(1, 5))
def test_every_sample_is_in_one_shard_in_order_and_chunks_keep_their_limit(
    lengths: list[int], chunk_tokens: int, most: int
) -> None:
    chunks = cut_chunks(lengths, lengths, chunk_tokens, 10**9, most)
    assert [index for chunk in chunks for index in chunk.samples] == list(range(len(lengths)))
    assert [shard.number for chunk in chunks for shard in chunk.shards] == list(
        range(sum(len(c.shards) for c in chunks))
    )
    assert [chunk.number for chunk in chunks] == list(range(len(chunks)))
    for chunk in chunks:
        assert len(chunk.samples) == 1 or sum(lengths[index] for index in chunk.samples) <= chunk_tokens
        assert all(1 <= len(shard.samples) <= most for shard in chunk.shards)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=60), st.integers(1, 200), st.integers(1, 7))
def test_evener_chunks_cost_no_process_another_pass(lengths: list[int], chunk_tokens: int, count: int) -> None:
    def rounds(size: int) -> int:
        return -(-len(cut_chunks(lengths, lengths, size, 10**9, 10**9)) // count)

    even = even_chunk_tokens(lengths, chunk_tokens, count)
    assert even <= chunk_tokens
    assert rounds(even) <= rounds(chunk_tokens)


def test_nine_chunks_for_eight_become_sixteen_equal_ones() -> None:
    even = even_chunk_tokens([10] * 900, 1000, 8)
    assert 563 <= even < 580
    assert len(cut_chunks([10] * 900, [10] * 900, even, 10**9, 10**9)) == 16


@pytest.mark.parametrize(
    ("environment", "index", "count"),
    [
        ({}, 0, 1),
        ({"RANK": "3", "WORLD_SIZE": "8"}, 3, 8),
        ({"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"}, 2, 4),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, 0, 1),
        ({"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_MIN": "5"}, 2, 4),
        (
            {
                "SLURM_ARRAY_TASK_ID": "6",
                "SLURM_ARRAY_TASK_COUNT": "4",
                "SLURM_ARRAY_TASK_MIN": "0",
                "SLURM_ARRAY_TASK_STEP": "2",
            },
            3,
            4,
        ),
        (
            {
                "SLURM_ARRAY_TASK_ID": "1",
                "SLURM_ARRAY_TASK_COUNT": "4",
                "SLURM_ARRAY_TASK_MIN": "0",
                "SLURM_PROCID": "0",
                "SLURM_STEP_NUM_TASKS": "1",
            },
            1,
            4,
        ),
        ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "9"}, 1, 2),
    ],
)
def test_a_process_knows_itself_from_its_launcher(environment: dict[str, str], index: int, count: int) -> None:
    found = this_process(StreamSection(), environment)
    assert (found.index, found.count) == (index, count)


def test_the_config_comes_first() -> None:
    section = StreamSection(process_index=2, process_count=3)
    assert this_process(section, {"RANK": "0", "WORLD_SIZE": "8"}) == Process(2, 3, "stream.process_index")


@pytest.mark.parametrize(
    ("section", "environment", "said"),
    [
        (StreamSection(process_index=3, process_count=3), {}, "process 3, counted from 0, of 3"),
        (StreamSection(process_index=0), {}, "only one of"),
        (StreamSection(process_count=2), {}, "only one of"),
        (StreamSection(), {"RANK": "one", "WORLD_SIZE": "2"}, "'one', expected a number"),
        (StreamSection(), {"RANK": "2", "WORLD_SIZE": "2"}, "process 2, counted from 0, of 2"),
        (
            StreamSection(),
            {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "2", "SLURM_ARRAY_TASK_MIN": "3"},
            "process 2, counted from 0, of 2",
        ),
        (
            StreamSection(),
            {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_MIN": "3"},
            "process -2, counted from 0, of 4",
        ),
        (StreamSection(), {"RANK": "0", "WORLD_SIZE": "1" + 30 * "0"}, "'1000000000000000000000000000000', expected"),
        (StreamSection(), {"RANK": "9" * 5000, "WORLD_SIZE": "2"}, "expected a number"),
        (StreamSection(), {"RANK": "0", "WORLD_SIZE": "100001"}, "at most 100,000 are supported"),
    ],
)
def test_a_number_that_makes_no_sense_is_refused(
    section: StreamSection, environment: dict[str, str], said: str
) -> None:
    with pytest.raises(ProblemsError, match=said) as error:
        this_process(section, environment)
    assert [problem.kind for problem in error.value.problems] == ["stream.process"]


def test_each_process_of_a_node_takes_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert local_device("auto", {"LOCAL_RANK": "1"}) == "auto"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert local_device("auto", {}) == "auto"
    assert local_device("auto", {"LOCAL_RANK": "3"}) == "cuda:3"
    assert local_device("cuda", {"SLURM_LOCALID": "2"}) == "cuda:2"
    assert local_device("cuda:1", {"LOCAL_RANK": "3"}) == "cuda:1"
    assert local_device("cpu", {"LOCAL_RANK": "3"}) == "cpu"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert local_device("auto", {"SLURM_LOCALID": "3"}) == "cuda:0"
