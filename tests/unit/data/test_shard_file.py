"""A shard filled slot by slot is the shard that is written at once, and nothing incomplete gets its name."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle3.data.chat import TokenSample
from eagle3.data.shard_file import ShardFile, StateKey, shard_entry
from eagle3.data.store import StoredSample
from eagle3.data.store_layout import LastRows, StoreLayout
from eagle3.data.store_sample import shard_bytes
from eagle3.errors import ProblemsError
from tests.disks import small_disk

from .cases import HIDDEN, VOCAB, kinds, layout, sample, writer

NAME = "shard-00000.safetensors"
SAMPLES = [sample(f"s{number}", tokens=3 + 2 * number, start=number) for number in range(3)]
TOKENS = 15


def tokens_of(stored: StoredSample) -> TokenSample:
    return TokenSample(stored.id, stored.input_ids.tolist(), stored.loss_mask.tolist())


def opened(folder: Path, of: StoreLayout | None = None) -> ShardFile:
    return ShardFile(folder / NAME, [tokens_of(item) for item in SAMPLES], of or layout())


def states(dtype: torch.dtype = torch.bfloat16) -> dict[StateKey, torch.Tensor]:
    """All rows of each slot, in the order in which a walk gives them."""
    slots = torch.cat([item.aux_hidden_states for item in SAMPLES]).to(dtype).split(HIDDEN, dim=1)
    return {
        **dict(zip((1, 3, 4), slots, strict=True)),
        "last": torch.cat([s.last_hidden_states for s in SAMPLES]).to(dtype),
    }


def fill(shard: ShardFile, step: int, dtype: torch.dtype = torch.bfloat16) -> None:
    for key, rows in states(dtype).items():
        for begin in range(0, TOKENS, step):
            shard.put(key, begin, rows[begin : begin + step])
    for number, item in enumerate(SAMPLES):
        assert item.target_argmax is not None
        shard.write_argmax(number, item.target_argmax[shard.last_places(number)])


@pytest.mark.parametrize("step", [1, 4, TOKENS])
@pytest.mark.parametrize("vocab_size", [VOCAB, 2**16 + 1])
@pytest.mark.parametrize("last_rows", ["supervised", "all"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn"])
def test_it_is_byte_for_byte_the_shard_that_is_written_at_once(
    tmp_path: Path, dtype: str, last_rows: LastRows, vocab_size: int, step: int
) -> None:
    of = layout(last_rows, dtype=dtype, vocab_size=vocab_size)
    kind = of.value_dtype
    shard = opened(tmp_path, of)
    fill(shard, step, kind)
    shard.close()

    def converted(item: StoredSample) -> StoredSample:
        aux, last = item.aux_hidden_states.to(kind), item.last_hidden_states.to(kind)
        return replace(item, aux_hidden_states=aux, last_hidden_states=last)

    head = {"embed_tokens.weight": torch.ones(vocab_size, HIDDEN), "norm.weight": torch.ones(HIDDEN)}
    with writer(tmp_path / "store", contract=of.contract, last_rows=last_rows, target_head=head) as store:
        store.write_shard([converted(item) for item in SAMPLES])
        listed = store._manifest.shards[0]
    assert (tmp_path / NAME).read_bytes() == (tmp_path / "store" / NAME).read_bytes()
    assert shard_entry(shard.path, shard.samples) == listed
    assert not (tmp_path / f"{NAME}.tmp").exists()


def test_it_has_its_whole_size_from_the_start_and_no_final_name_before_the_end(tmp_path: Path) -> None:
    shard = opened(tmp_path)
    size = (tmp_path / f"{NAME}.tmp").stat().st_size
    fill(shard, 4)
    assert not (tmp_path / NAME).exists()
    shard.close()
    assert (tmp_path / NAME).stat().st_size == size


def test_rows_that_did_not_come_are_named_and_nothing_is_left(tmp_path: Path) -> None:
    shard = opened(tmp_path)
    for key, rows in states().items():
        if key != 4:
            shard.put(key, 0, rows[: -1 if key == "last" else None])
    with pytest.raises(ProblemsError, match="output index 4 has 0, last hidden states has 14 rows") as error:
        shard.close()
    assert kinds(error.value) == ["capture.rows"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("begin", "count"), [(5, 2), (0, 4), (3, 2), (4, 12)])
def test_rows_out_of_order_are_refused(tmp_path: Path, begin: int, count: int) -> None:
    shard = opened(tmp_path)
    rows = torch.zeros(count, HIDDEN, dtype=torch.bfloat16)
    shard.put(3, 0, rows[:4].new_zeros(4, HIDDEN))
    with pytest.raises(ProblemsError, match="of output index 3 came, row 4 was next") as error:
        shard.put(3, begin, rows)
    assert kinds(error.value) == ["capture.rows"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("row", "name"), [(2, "s0"), (3, "s1"), (14, "s2")])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_states_that_are_not_finite_are_refused_by_the_samples_name(
    tmp_path: Path, dtype: str, value: float, row: int, name: str
) -> None:
    rows = states()["last"].clone()
    rows[row, 1] = value
    shard = opened(tmp_path, layout(dtype=dtype))
    shard.put("last", 0, rows[:2])
    with pytest.raises(ProblemsError, match=rf"{name!r}: has NaN or infinity in its last hidden states") as error:
        shard.put("last", 2, rows[2:])
    assert kinds(error.value) == ["store.non_finite"]


def test_large_states_whose_sum_is_not_finite_are_kept(tmp_path: Path) -> None:
    shard = opened(tmp_path, layout(dtype="float32"))
    large = torch.full((TOKENS, HIDDEN), 3e38)
    assert not torch.isfinite(large.sum())
    shard.put(1, 0, large)
    assert torch.equal(shard._slot(1)[0], large)


def test_samples_that_do_not_fit_are_named_before_a_file_is_made(tmp_path: Path) -> None:
    wrong = [TokenSample("big", [1, VOCAB], [True, True]), TokenSample("", [1], [True]), TokenSample("none", [], [])]
    with pytest.raises(ProblemsError) as error:
        ShardFile(tmp_path / NAME, wrong, layout())
    assert kinds(error.value) == ["store.ids_out_of_range", "store.sample_id", "store.sample_shape"]
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_error_before_the_walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ProblemsError, match="No space left on device") as error:
        opened(tmp_path)
    assert kinds(error.value) == ["disk.full"]
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        with pytest.raises(ProblemsError) as error:
            ShardFile(disk / NAME, [tokens_of(sample("s", tokens=5000))], layout())
        assert kinds(error.value) == ["disk.full"]
        assert list(disk.iterdir()) == []


def test_a_disk_that_fails_during_the_walk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a file system does not keep what it promised, the sync says so."""

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    shard = opened(tmp_path)
    monkeypatch.setattr(os, "fsync", full)
    fill(shard, 4)
    with pytest.raises(ProblemsError, match="No space left on device") as error:
        shard.close()
    assert kinds(error.value) == ["disk.full"]
    shard.discard()
    assert list(tmp_path.iterdir()) == []


def test_greedy_tokens_that_did_not_come_are_named_and_nothing_is_left(tmp_path: Path) -> None:
    shard = opened(tmp_path)
    for key, rows in states().items():
        shard.put(key, 0, rows)
    shard.write_argmax(0, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ProblemsError, match="no greedy tokens of 2 of its 3 samples, 's1' first") as error:
        shard.close()
    assert kinds(error.value) == ["capture.rows"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argmax", "kind"),
    [
        (torch.tensor([0, VOCAB]), "store.ids_out_of_range"),
        (torch.tensor([-1, 0]), "store.ids_out_of_range"),
        (torch.tensor([0, 1, 2]), "store.sample_shape"),
        (torch.tensor([0.0, 1.0]), "store.sample_shape"),
    ],
)
def test_greedy_tokens_that_cannot_be_are_refused_by_the_samples_name(
    tmp_path: Path, argmax: torch.Tensor, kind: str
) -> None:
    shard = opened(tmp_path)
    with pytest.raises(ProblemsError, match=r"'s1'.*target_argmax") as error:
        shard.write_argmax(1, argmax)
    assert kinds(error.value) == [kind]


def test_a_shard_of_version_2_takes_none(tmp_path: Path) -> None:
    of = replace(layout(), version=2)
    shard = opened(tmp_path, of)
    for key, rows in states().items():
        shard.put(key, 0, rows)
    shard.close()
    assert (tmp_path / NAME).stat().st_size == shard_bytes([item.info for item in SAMPLES], of)
