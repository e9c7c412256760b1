import json
import threading
from collections import Counter
from contextlib import closing
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch

from eagle3.data import loader, row_reader
from eagle3.data.batch_plan import BatchPlan
from eagle3.data.dealing import Window
from eagle3.data.loader import Ahead, begin_windows, collate, empty_batch, load_windows
from eagle3.data.store import StoredSample, StoreReader
from eagle3.data.store_layout import LastRows
from eagle3.draft.config import TTTSettings
from eagle3.draft.planned import plan_batch
from eagle3.errors import ProblemsError
from tests.old_stores import as_version_2

from .cases import AUX, HIDDEN, VOCAB, contract, kinds, make_store, sample, writer


def plan(count: int, lengths: list[int] | None = None, **options: object) -> BatchPlan:
    return BatchPlan(seed=3, lengths=lengths or [4] * count, max_length=16, **options)  # type: ignore[arg-type]


def samples_of(window: Window) -> list[int]:
    return sorted(index for micro_batch in window for rows in micro_batch for row in rows for index in row)


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize(("batch_size", "accumulate", "world_size"), [(1, 1, 1), (2, 3, 1), (1, 2, 4), (3, 1, 2)])
def test_every_sample_exactly_once_an_epoch(pack: bool, batch_size: int, accumulate: int, world_size: int) -> None:
    batches = plan(
        0, [1 + i * 7 % 20 for i in range(23)],
        batch_size=batch_size, accumulate=accumulate, world_size=world_size, pack=pack,
    )  # fmt: skip
    for number in range(3):
        epoch = batches.epoch(number)
        assert len(epoch) == batches.steps_per_epoch
        assert sorted(index for window in epoch for index in samples_of(window)) == list(range(23))
        for window in epoch:
            assert 1 <= len(window) <= accumulate
            assert all(len(micro_batch) == world_size for micro_batch in window)
            assert all(len(rows) <= batch_size for micro_batch in window for rows in micro_batch)
            assert all(row for micro_batch in window for rows in micro_batch for row in rows)


def test_the_order_comes_from_seed_and_epoch_alone() -> None:
    batches = plan(30, batch_size=2)
    assert batches.epoch(1) == plan(30, batch_size=2).epoch(1)
    assert batches.epoch(1) != batches.epoch(2)
    assert batches.epoch(1) != BatchPlan(seed=4, lengths=[4] * 30, max_length=16, batch_size=2).epoch(1)


def test_the_order_of_a_seed_does_not_change_between_versions() -> None:
    assert [samples_of(window) for window in plan(6).epoch(0)] == [[4], [5], [3], [0], [2], [1]]


@pytest.mark.parametrize("packing", [{}, {"pack": True}, {"pack": True, "row_tokens": 40}])
def test_an_optimiser_step_sees_the_same_samples_however_the_work_is_split(packing: dict[str, object]) -> None:
    lengths = [1 + i * 5 % 15 for i in range(29)]

    def steps(batch_size: int, accumulate: int, world_size: int) -> list[list[int]]:
        batches = plan(0, lengths, batch_size=batch_size, accumulate=accumulate, world_size=world_size, **packing)
        return [samples_of(window) for epoch in range(2) for window in batches.epoch(epoch)]

    assert steps(1, 4, 1) == steps(1, 2, 2) == steps(1, 1, 4) == steps(2, 2, 1) == steps(2, 1, 2) == steps(4, 1, 1)


def test_micro_batches_are_the_same_on_one_rank_accumulating_two_and_on_two_ranks() -> None:
    one, two = plan(8, batch_size=2, accumulate=2), plan(8, batch_size=2, world_size=2)
    for window_one, window_two in zip(one.epoch(0), two.epoch(0), strict=True):
        assert [micro_batch[0] for micro_batch in window_one] == window_two[0]


def test_fault_13_a_short_last_window_is_kept() -> None:
    """5 micro-batches, window 2: 3 optimiser steps, no sample lost; 4 epochs are 12 steps."""
    batches = plan(5, accumulate=2)
    epoch = batches.epoch(0)
    assert [len(window) for window in epoch] == [2, 2, 1]
    assert Counter(index for window in epoch for index in samples_of(window)) == Counter(range(5))
    assert batches.steps_per_epoch == 3
    assert sum(len(batches.epoch(number)) for number in range(4)) == 12


def test_ranks_without_rows_get_an_empty_share() -> None:
    [*_, last] = plan(5, world_size=4).epoch(0)
    assert [len(rows) for rows in last[0]] == [1, 0, 0, 0]
    [window] = plan(1, accumulate=2, world_size=2).epoch(0)
    assert len(window) == 1


def test_a_row_of_many_tokens_holds_whole_samples_each_cut_to_its_own_length() -> None:
    lengths = [1 + i * 7 % 20 for i in range(40)]
    batches = plan(0, lengths, pack=True, row_tokens=50)
    rows = [row for window in batches.epoch(0) for row in window[0][0]]
    tokens = [sum(min(lengths[index], 16) for index in row) for row in rows]
    assert sorted(index for row in rows for index in row) == list(range(40))
    assert max(tokens) <= 50 and sum(tokens) > 45 * (len(rows) - 1)


def test_packing_puts_several_samples_in_a_row_and_cuts_long_ones() -> None:
    batches = plan(0, [4, 40, 12, 8, 8], pack=True)
    rows = [row for window in batches.epoch(0) for row in window[0][0]]
    assert sorted(map(sorted, rows)) == [[0, 2], [1], [3, 4]]
    assert batches.steps_per_epoch == 3


def test_collate_pads_right_and_numbers_documents_and_positions() -> None:
    batch = collate([[sample("a", 3), sample("b", 2, start=5)], [sample("c", 4, start=9)]], max_length=8)
    assert batch.input_ids.tolist() == [[0, 1, 2, 5, 6], [9, 10, 11, 12, 0]]
    assert batch.loss_mask.int().tolist() == [[0, 1, 1, 1, 1], [0, 0, 1, 1, 0]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 0, -1]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]
    assert batch.sample_ids == ["a", "b", "c"]
    assert batch.input_ids.dtype == batch.document_ids.dtype == torch.int64
    assert batch.aux.shape == (2, 5, AUX * HIDDEN)
    assert batch.aux.dtype == torch.bfloat16
    assert torch.equal(batch.aux[0, 3:], sample("b", 2, start=5).aux_hidden_states)
    answers = [sample("a", 3), sample("b", 2, start=5), sample("c", 4, start=9)]
    assert torch.equal(batch.last_hidden, torch.cat([item.last_hidden_states[-2:] for item in answers]))
    assert not batch.aux[1, 4].any()


def test_collate_cuts_at_max_length() -> None:
    batch = collate([[sample("a", 9)], [sample("b", 3)]], max_length=6)
    assert batch.input_ids.shape == (2, 6)
    assert batch.loss_mask.sum() == 2, "the cut sample's answer was its last two tokens"
    assert torch.equal(batch.aux[0], sample("a", 9).aux_hidden_states[:6])


def test_an_empty_batch_is_one_unsupervised_token() -> None:
    batch = empty_batch(AUX * HIDDEN, HIDDEN, torch.float32)
    assert batch.input_ids.shape == (1, 1) and not batch.loss_mask.any()
    assert batch.aux.shape == (1, 1, AUX * HIDDEN) and batch.last_hidden.shape == (0, HIDDEN)


@pytest.fixture
def reader(tmp_path: Path) -> StoreReader:
    return StoreReader(make_store(tmp_path / "store", samples=7))


def test_loading_gives_each_ranks_micro_batches_in_the_plans_order(reader: StoreReader) -> None:
    indices = [6, 5, 4, 3, 2]
    batches = BatchPlan(0, [reader.samples[i].tokens for i in indices], 64, accumulate=2, world_size=2)
    windows = batches.epoch(0)
    seen: Counter[str] = Counter()
    for rank in range(2):
        loaded = list(load_windows(reader, windows, indices, 64, rank))
        assert [len(micro_batches) for micro_batches in loaded] == [len(window) for window in windows]
        for micro_batches, window in zip(loaded, windows, strict=True):
            for batch, micro_batch in zip(micro_batches, window, strict=True):
                assert batch.sample_ids == [f"s{indices[i]}" for row in micro_batch[rank] for i in row]
                assert batch.aux.dtype == torch.bfloat16
                seen.update(batch.sample_ids)
    assert seen == Counter(f"s{index}" for index in indices)


def test_loading_reads_one_window_ahead_and_stops_with_its_consumer(
    reader: StoreReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    real = reader.read_tokens

    def spy(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        read.append(index)
        return real(index)

    monkeypatch.setattr(reader, "read_tokens", spy)
    windows = plan(7).epoch(0)
    batches = load_windows(reader, windows, range(7), 64)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert len(read) == 2
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read_rows")]


def test_what_is_still_to_be_planned_is_dropped_with_the_consumer(
    reader: StoreReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[int] = []
    began, go_on = threading.Event(), threading.Event()

    def slowly(*_: object) -> None:
        planned.append(1)
        began.set()
        go_on.wait(10)

    monkeypatch.setattr(loader, "plan_batch", slowly)
    windows = BatchPlan(0, [4] * 7, 64, batch_size=1, accumulate=7).epoch(0)
    begun = begin_windows(reader, windows, range(7), 64, ttt=TTTSettings(3))
    next(begun)
    assert began.wait(10)
    timer = threading.Timer(0.2, go_on.set)
    timer.start()
    begun.close()
    assert planned == [1]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("plan")]


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
@pytest.mark.parametrize("max_length", [64, 5])
@pytest.mark.parametrize(
    ("dtype", "last_rows"), [("bfloat16", "supervised"), ("bfloat16", "all"), ("float8_e4m3fn", "supervised")]
)
def test_what_is_loaded_is_what_collating_the_samples_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int, max_length: int, dtype: str, last_rows: LastRows
) -> None:
    with writer(tmp_path / "store", contract=contract(dtype=dtype), last_rows=last_rows) as store:
        for number in range(7):
            item = sample(f"s{number}", tokens=3 + number, start=number)
            mask = torch.arange(3 + number) % 3 != 1  # several answers
            store.write_shard([replace(item, loss_mask=mask)])
    reader = StoreReader(tmp_path / "store")
    monkeypatch.setattr(row_reader, "_JOB_BYTES", piece)
    lengths = [min(sample.tokens, max_length) for sample in reader.samples]
    windows = BatchPlan(0, lengths, 2 * max_length, batch_size=2, pack=True).epoch(0)
    for window, [batch] in zip(windows, load_windows(reader, windows, range(7), max_length), strict=True):
        [[rows]] = window
        expected = collate([[reader.read(index) for index in row] for row in rows], max_length)
        assert batch.sample_ids == expected.sample_ids
        for name in ("input_ids", "loss_mask", "document_ids", "position_ids"):
            assert torch.equal(getattr(batch, name), getattr(expected, name)), name
        places = torch.arange(batch.input_ids.numel())
        assert torch.equal(batch.aux_rows(places), expected.aux_rows(places))
        assert torch.equal(batch.last_rows(places), expected.last_rows(places))
        assert batch.target_argmax is not None and batch.target_argmax.dtype == torch.int64
        assert torch.equal(batch.target_argmax, expected.target_argmax) and batch.target_argmax.any()
        assert batch.last_rows(places).any() and batch.aux.dtype == reader.layout.dtype


def test_a_shard_that_shrinks_while_it_is_in_use_is_named_with_the_sample(reader: StoreReader) -> None:
    path = next(reader.folder.glob("shard-*"))
    batches = load_windows(reader, plan(7).epoch(0), range(7), 64)
    next(batches)
    with open(path, "r+b") as handle:
        handle.truncate(path.stat().st_size // 2)
    with pytest.raises(ProblemsError) as error:
        list(batches)
    [problem] = error.value.problems
    assert problem.kind in ("store.shard_truncated", "store.loss_mask") and "sample 's" in problem.where


def test_resuming_in_the_middle_of_an_epoch_gives_its_rest(reader: StoreReader) -> None:
    windows = plan(7, batch_size=2).epoch(1)
    ids = [batch.sample_ids for [batch] in load_windows(reader, windows, range(7), 64)]
    assert [batch.sample_ids for [batch] in load_windows(reader, windows[2:], range(7), 64)] == ids[2:]


def test_fault_03_a_sample_without_supervised_tokens_may_be_stored_and_batched(tmp_path: Path) -> None:
    bare = StoredSample(**{**vars(sample("bare", 4)), "loss_mask": torch.zeros(4, dtype=torch.bool)})
    with writer(tmp_path / "store") as store:
        store.write_shard([bare])
    [[batch]] = load_windows(StoreReader(tmp_path / "store"), plan(1).epoch(0), [0], 64)
    assert batch.loss_mask.sum() == 0


def test_windows_are_planned_as_they_are_read(reader: StoreReader) -> None:
    windows, settings = plan(7).epoch(0), TTTSettings(3)
    with closing(begin_windows(reader, windows, range(7), 64, ttt=settings)) as begun:
        ahead = Ahead(begun)
        for window in windows:
            for batch in ahead.take():
                expected = plan_batch(batch.loss_mask, batch.document_ids, settings)
                assert batch.planned is not None and torch.equal(batch.planned.active, expected.active)
            assert window is windows[-1] or ahead._next is None
            ahead.begin()
            assert (ahead._next is None) == (window is windows[-1])


@pytest.mark.parametrize(("name", "tokens"), [("store", None), ("long", 3)])
def test_greedy_tokens_outside_the_vocabulary_are_named_with_the_sample(
    tmp_path: Path, name: str, tokens: int | None
) -> None:
    """They would fail far from here, on a GPU; but what is cut off is not looked at."""
    folder = make_store(tmp_path / name)
    path = folder / "shard-00001.safetensors"
    raw = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    begin = start + json.loads(raw[8:start])["target_argmax"]["data_offsets"][0]
    raw[begin + 6 : begin + 8] = (VOCAB).to_bytes(2, "little")  # the last of s3
    path.write_bytes(raw)
    reader = StoreReader(folder)
    assert reader.read(2).id == "s2"
    with pytest.raises(ProblemsError, match="'s3': has token ids outside 0 to 19 in its target_argmax") as error:
        reader.read(3)
    assert kinds(error.value) == ["store.ids_out_of_range"]
    windows = plan(6, batch_size=6).epoch(0)
    if tokens is not None:
        assert len(list(load_windows(reader, windows, range(6), tokens))) == 1
        return
    with pytest.raises(ProblemsError, match="'s3': has token ids outside 0 to 19 in its target_argmax"):
        list(load_windows(reader, windows, range(6), 64))


@pytest.mark.parametrize("last_rows", ["supervised", "all"])
def test_batches_of_an_older_store_have_no_greedy_tokens(tmp_path: Path, last_rows: LastRows) -> None:
    old = as_version_2(make_store(tmp_path / "new", last_rows=last_rows), tmp_path / "old")
    readers = [StoreReader(folder) for folder in (tmp_path / "new", old)]
    windows = plan(6, batch_size=2, world_size=4).epoch(0)
    new, without = (
        [[batch for [batch] in load_windows(reader, windows, range(6), 64, rank)] for rank in range(4)]
        for reader in readers
    )
    for mine, theirs in zip(chain.from_iterable(new), chain.from_iterable(without), strict=True):
        assert theirs.target_argmax is None
        assert mine.target_argmax is not None and len(mine.target_argmax) == len(mine.last_hidden)
        assert torch.equal(mine.last_hidden, theirs.last_hidden)
    assert not new[3][0].sample_ids, "a rank without rows has a batch of the same kind"
    read = readers[1].read(0)
    assert collate([[read]], 64).target_argmax is None
