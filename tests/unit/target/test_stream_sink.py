"""What a walk hands out lands in its shards, whatever pieces it comes in, and no failure stays in the thread."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
import torch

from eagle3.data.chat import TokenSample
from eagle3.data.shard_file import ShardFile, StateKey
from eagle3.data.store_fingerprint import fingerprint_place, make_fingerprint
from eagle3.data.store_format import shard_name
from eagle3.data.store_layout import StoreLayout
from eagle3.data.target_argmax import make_target_head
from eagle3.draft.loss import TargetHead
from eagle3.errors import ProblemsError, problem_error
from eagle3.target import stream_sink
from eagle3.target.stream_sink import FingerprintRows, Part, ShardSink, Staged, blocks_waiting, stager
from tests.unit.data.cases import HIDDEN, contract, layout, sample, target_head, writer

OF = layout()
STAGE = stager(torch.device("cpu"))


def head() -> TargetHead:
    return make_target_head(target_head(), {"rms_norm_eps": 1e-6}, "post_norm")


SAMPLES = [sample(f"s{number}", tokens=5 + number, start=number) for number in range(4)]
ENDS = (11, 26)
KEYS: tuple[StateKey, ...] = (1, 3, 4, "last")


def plain(first: int, last: int) -> list[TokenSample]:
    return [TokenSample(s.id, s.input_ids.tolist(), s.loss_mask.tolist()) for s in SAMPLES[first:last]]


def parts(folder: Path, of: StoreLayout = OF) -> list[Part]:
    """Two samples a shard: rows 0 to 11 and 11 to 26."""
    folder.mkdir(exist_ok=True)
    files = [ShardFile(folder / shard_name(at), plain(2 * at, 2 * at + 2), of) for at in range(2)]
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


@pytest.mark.parametrize("block_bytes", [1, 3 * 2 * HIDDEN, 64 << 20])
@pytest.mark.parametrize("step", [1, 4, 11, 26])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_pieces_land_in_the_shards_that_they_belong_to(
    tmp_path: Path, dtype: str, step: int, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large pieces go in blocks, which several threads write."""
    monkeypatch.setattr(stream_sink, "_BLOCK_BYTES", block_bytes)
    of = layout(dtype=dtype)
    cut = parts(tmp_path, of)
    with ShardSink(cut, of, STAGE, head) as sink:
        assert sink.keys == {1, 3, 4, "last"}
        walk(sink, step)
    for part in cut:
        part.file.close()
    with writer(tmp_path / "store", contract=of.contract) as store:
        store.write_shard(SAMPLES[:2])
        store.write_shard(SAMPLES[2:])
    for name in ("shard-00000.safetensors", "shard-00001.safetensors"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "store" / name).read_bytes()


def test_rows_of_shards_that_are_there_already_are_let_pass(tmp_path: Path) -> None:
    whole, cut = parts(tmp_path / "whole"), parts(tmp_path / "cut")[1:]
    for some in (whole, cut):
        with ShardSink(some, OF, STAGE, head) as sink:
            walk(sink, 4)
        for part in some:
            part.file.close()
    assert cut[0].file.path.read_bytes() == whole[1].file.path.read_bytes()


@pytest.mark.parametrize("step", [1, 4, 26])
def test_the_fingerprint_is_that_of_its_shard_with_neighbours_from_the_same_walk(tmp_path: Path, step: int) -> None:
    cut = parts(tmp_path)
    place = fingerprint_place(plain(0, 2), OF)
    assert place.sample == "s1"
    rows = FingerprintRows(place, len(SAMPLES[0].input_ids), contract())
    with ShardSink(cut, OF, STAGE, head, rows) as sink:
        assert sink.keys == {-1, 0, 1, 2, 3, 4, 5, "last"}
        walk(sink, step, (-1, 0, 1, 2, 3, 4, 5, "last"))

    def others(ids: object) -> dict[int, torch.Tensor]:
        return {index: torch.full((6, HIDDEN), float(index)) for index in (-1, 0, 2, 5)}

    assert rows.fingerprint() == make_fingerprint(SAMPLES[:2], OF, others)


class Failing:
    """A shard whose disk fails at the second piece."""

    samples = ()

    def __init__(self, call: str) -> None:
        self.call = call

    def claim(self, key: StateKey, begin: int, count: int) -> bool:
        return begin == 1

    def write(self, key: StateKey, begin: int, rows: torch.Tensor, numbers: None) -> None:
        self.fail("write", begin == 1)

    def sync(self) -> None:
        time.sleep(0.05)
        self.fail("sync", True)

    def fail(self, call: str, now: bool) -> None:
        if now and call == self.call:
            raise problem_error("disk", "disk.full", "cannot write: No space left on device", "free space")


def failing_sink(call: str = "write") -> ShardSink:
    return ShardSink([Part(0, ENDS[1], Failing(call))], OF, STAGE, head)  # type: ignore[arg-type]


@pytest.mark.parametrize("pieces", [3, 20])
def test_a_failure_in_the_thread_stops_the_walk_with_that_error(pieces: int) -> None:
    with pytest.raises(ProblemsError, match="No space left"), failing_sink() as sink:
        for begin in range(pieces):
            sink.put(1, begin, torch.zeros(1, HIDDEN))


@pytest.mark.parametrize("call", ["write", "sync"])
def test_a_failure_of_the_last_piece_is_raised_at_the_end(call: str) -> None:
    sink = failing_sink(call)
    with pytest.raises(ProblemsError, match="No space left"), sink:
        sink.put(1, 0, torch.zeros(1, HIDDEN))
        sink.put(1, 1, torch.zeros(1, HIDDEN))


@pytest.mark.parametrize("call", ["write", "sync"])
def test_a_failure_is_seen_between_pieces(call: str) -> None:
    with pytest.raises(ProblemsError, match="No space left"), failing_sink(call) as sink:
        sink.put(1, 0, torch.zeros(1, HIDDEN))
        sink.put(1, 1, torch.zeros(1, HIDDEN))
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            sink.check()
        pytest.fail("the failure stayed in the thread")


@pytest.mark.parametrize("most", [1, 2, 5])
def test_no_more_blocks_wait_for_the_disk_than_may(most: int) -> None:
    taken: list[int] = []
    given_back: list[int] = []

    def slow(rows: torch.Tensor, scales: None) -> Staged:
        taken.append(len(rows))
        return Staged(lambda: (time.sleep(0.005), (rows, None))[1], lambda: given_back.append(1))

    class Memory:
        done = 0
        samples = ()

        def claim(self, key: StateKey, begin: int, count: int) -> bool:
            return False

        def write(self, key: StateKey, begin: int, rows: torch.Tensor, numbers: None) -> None:
            self.done += len(rows)

    file = Memory()
    with ShardSink([Part(0, 50, file)], OF, slow, head, most_waiting=most) as sink:  # type: ignore[arg-type]
        for begin in range(50):
            sink.put(1, begin, torch.zeros(1, HIDDEN))
            assert len(taken) - len(given_back) <= most
    assert file.done == len(given_back) == 50


def test_what_may_wait_is_a_small_share_of_memory() -> None:
    assert 2 <= blocks_waiting() <= max(psutil.virtual_memory().total // 16, 128 << 20) >> 26
    assert blocks_waiting() << 26 <= 8 << 30
