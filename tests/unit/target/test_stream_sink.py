"""What a walk hands out lands in its shards, whatever pieces it comes in, and no failure stays in the thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eagle3.data.chat import TokenSample
from eagle3.data.shard_file import ShardFile, StateKey
from eagle3.data.store_fingerprint import fingerprint_place, make_fingerprint
from eagle3.data.store_format import shard_name
from eagle3.errors import ProblemsError, problem_error
from eagle3.target.stream_sink import FingerprintRows, Part, ShardSink, copier
from tests.unit.data.cases import HIDDEN, contract, sample, writer

COPY = copier(torch.device("cpu"))
SAMPLES = [sample(f"s{number}", tokens=5 + number, start=number) for number in range(4)]
ENDS = (11, 26)
KEYS: tuple[StateKey, ...] = (1, 3, 4, "last")


def plain(first: int, last: int) -> list[TokenSample]:
    return [TokenSample(s.id, s.input_ids.tolist(), s.loss_mask.tolist()) for s in SAMPLES[first:last]]


def parts(folder: Path) -> list[Part]:
    """Two samples a shard: rows 0 to 11 and 11 to 26."""
    files = [ShardFile(folder / shard_name(at), plain(2 * at, 2 * at + 2), contract()) for at in range(2)]
    return [Part(0, ENDS[0], files[0]), Part(ENDS[0], ENDS[1], files[1])]


def states(key: StateKey) -> torch.Tensor:
    if key == "last":
        return torch.cat([item.last_hidden_states for item in SAMPLES])
    slot = contract().output_indices.index(int(key))
    return torch.cat([item.aux_hidden_states for item in SAMPLES]).split(HIDDEN, dim=1)[slot]


def walk(sink: ShardSink, step: int, keys: tuple[StateKey, ...] = KEYS) -> None:
    """Gives pieces that are overwritten as soon as they are taken, like an engine's."""
    for key in keys:
        rows = states(key) if key in KEYS else torch.full((ENDS[1], HIDDEN), float(key)).bfloat16()
        for begin in range(0, len(rows), step):
            piece = rows[begin : begin + step].clone()
            sink.put(key, begin, piece)
            piece.fill_(float("nan"))


@pytest.mark.parametrize("step", [1, 4, 11, 26])
def test_pieces_land_in_the_shards_that_they_belong_to(tmp_path: Path, step: int) -> None:
    cut = parts(tmp_path)
    with ShardSink(cut, contract(), COPY) as sink:
        assert sink.keys == {1, 3, 4, "last"}
        walk(sink, step)
    for part in cut:
        part.file.close()
    with writer(tmp_path / "store") as store:
        store.write_shard(SAMPLES[:2])
        store.write_shard(SAMPLES[2:])
    for name in ("shard-00000.safetensors", "shard-00001.safetensors"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "store" / name).read_bytes()


def test_rows_of_shards_that_are_there_already_are_let_pass(tmp_path: Path) -> None:
    cut = parts(tmp_path)[1:]
    with ShardSink(cut, contract(), COPY) as sink:
        walk(sink, 4)
    cut[0].file.close()


@pytest.mark.parametrize("step", [1, 4, 26])
def test_the_fingerprint_is_that_of_its_shard_with_neighbours_from_the_same_walk(tmp_path: Path, step: int) -> None:
    cut = parts(tmp_path)
    place = fingerprint_place([(item.id, item.input_ids) for item in plain(0, 2)], contract())
    assert place.sample == "s1"
    rows = FingerprintRows(place, len(SAMPLES[0].input_ids), contract())
    with ShardSink(cut, contract(), COPY, rows) as sink:
        assert sink.keys == {-1, 0, 1, 2, 3, 4, 5, "last"}
        walk(sink, step, (-1, 0, 1, 2, 3, 4, 5, "last"))

    def others(ids: object) -> dict[int, torch.Tensor]:
        return {index: torch.full((6, HIDDEN), float(index)) for index in (-1, 0, 2, 5)}

    assert rows.fingerprint() == make_fingerprint(SAMPLES[:2], contract(), others)


class Failing:
    """A shard whose disk fails at the second piece."""

    def __init__(self) -> None:
        self.pieces = 0

    def put(self, key: StateKey, begin: int, rows: torch.Tensor) -> None:
        self.pieces += 1
        if self.pieces == 2:
            raise problem_error("disk", "disk.full", "cannot write: No space left on device", "free space")


def failing_sink() -> ShardSink:
    return ShardSink([Part(0, ENDS[1], Failing())], contract(), COPY)  # type: ignore[arg-type]


@pytest.mark.parametrize("pieces", [3, 20])
def test_a_failure_in_the_thread_stops_the_walk_with_that_error(pieces: int) -> None:
    with pytest.raises(ProblemsError, match="No space left"), failing_sink() as sink:
        for begin in range(pieces):
            sink.put(1, begin, torch.zeros(1, HIDDEN))


def test_a_failure_of_the_last_piece_is_raised_at_the_end() -> None:
    sink = failing_sink()
    with pytest.raises(ProblemsError, match="No space left"), sink:
        sink.put(1, 0, torch.zeros(1, HIDDEN))
        sink.put(1, 1, torch.zeros(1, HIDDEN))


def test_a_failure_is_seen_between_pieces(tmp_path: Path) -> None:
    with pytest.raises(ProblemsError, match="No space left"), failing_sink() as sink:
        sink.put(1, 0, torch.zeros(1, HIDDEN))
        sink.put(1, 1, torch.zeros(1, HIDDEN))
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            sink.check()
        pytest.fail("the failure stayed in the thread")


def test_at_most_two_pieces_wait_for_the_disk() -> None:
    waiting: list[Callable[[], torch.Tensor]] = []

    def slow(rows: torch.Tensor) -> Callable[[], torch.Tensor]:
        waiting.append(lambda: rows)
        return lambda: (time.sleep(0.01), rows)[1]

    class Counting:
        done = 0

        def put(self, key: StateKey, begin: int, rows: torch.Tensor) -> None:
            assert begin == self.done
            self.done += 1

    file = Counting()
    with ShardSink([Part(0, 50, file)], contract(), slow) as sink:  # type: ignore[arg-type]
        for begin in range(50):
            sink.put(1, begin, torch.zeros(1, HIDDEN))
            assert len(waiting) - file.done <= 3  # two that wait, and the one that is just taken
    assert file.done == 50
