import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle3.data import store_writer, tensor_file
from eagle3.data.store import StoredSample, StoreReader, verify
from eagle3.data.store_layout import LastRows
from eagle3.errors import ProblemsError, problem_error
from tests.children import in_a_child, killed
from tests.disks import small_disk

from .cases import AUX, HIDDEN, VOCAB, contract, greedy, kinds, make_store, sample, target_head, write_missing, writer


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def assert_same(read: StoredSample, written: StoredSample) -> None:
    assert read.id == written.id
    assert read.input_ids.dtype == torch.int32
    assert read.loss_mask.dtype == torch.bool
    for name in ("input_ids", "loss_mask", "aux_hidden_states", "supervised_last", "supervised_argmax"):
        assert torch.equal(getattr(read, name).long(), getattr(written, name).long()), name


@pytest.mark.parametrize("last_rows", ["supervised", "all"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_is_written_is_read_back(tmp_path: Path, dtype: str, last_rows: LastRows) -> None:
    kind = getattr(torch, dtype)
    written = [sample(f"s{number}", tokens=number + 1, start=number, dtype=kind) for number in range(5)]
    with writer(tmp_path / "store", contract=contract(dtype=dtype), last_rows=last_rows) as store:
        store.write_shard(written[:2])
        store.write_shard(written[2:])
    reader = StoreReader(tmp_path / "store", contract(dtype=dtype))
    assert [info.id for info in reader.samples] == ["s0", "s1", "s2", "s3", "s4"]
    assert [(info.tokens, info.supervised) for info in reader.samples] == [(1, 1), (2, 2), (3, 2), (4, 2), (5, 2)]
    for index, item in enumerate(written):
        assert_same(reader.read(index), item)
        assert reader.read(index).aux_hidden_states.dtype == kind
        rows = item.input_ids.numel() if last_rows == "all" else min(item.input_ids.numel(), 2)
        argmax = reader.read(index).target_argmax
        assert argmax is not None and argmax.dtype == torch.int32
        assert len(reader.read(index).last_hidden_states) == len(argmax) == rows
        ids, mask = reader.read_tokens(index)
        assert torch.equal(ids, item.input_ids.int()) and torch.equal(mask, item.loss_mask)


def test_an_fp8_store_gives_back_what_is_nearest_in_eight_bits(tmp_path: Path) -> None:
    """Scales are powers of two: the values read are exactly value times scale, in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    aux = torch.randn(5, AUX * HIDDEN, generator=generator) * torch.tensor([1e-20, 1, 3, 1e9, 0])[:, None]
    last = torch.randn(5, HIDDEN, generator=generator)
    states = {"aux_hidden_states": aux.bfloat16(), "last_hidden_states": last.bfloat16()}
    written = replace(sample("s"), **states, target_argmax=greedy(last.bfloat16(), target_head()))
    with writer(tmp_path / "store", contract=contract(dtype="float8_e4m3fn")) as store:
        store.write_shard([written, replace(written, id="t", loss_mask=torch.zeros(5, dtype=torch.bool))])
    reader = StoreReader(tmp_path / "store")
    assert verify(tmp_path / "store", deep=True) == []
    raw = load_file(tmp_path / "store" / "shard-00000.safetensors")
    assert raw["aux_hidden_states"].dtype == torch.float8_e4m3fn and raw["input_ids"].dtype == torch.uint16
    assert raw["last_hidden_states"].shape == (2, HIDDEN) and raw["last_scales"].shape == (2,)
    wide = raw["aux_hidden_states"].float().view(10, AUX, HIDDEN) * raw["aux_scales"][:, :, None]
    read = reader.read(0)
    assert read.aux_hidden_states.dtype == torch.bfloat16
    assert torch.equal(read.aux_hidden_states.float(), wide[:5].flatten(1))
    largest = written.aux_hidden_states.float().view(5, AUX, HIDDEN).abs().amax(-1, keepdim=True)
    error = (wide[:5] - written.aux_hidden_states.float().view(5, AUX, HIDDEN)).abs()
    bound = (written.aux_hidden_states.float().view(5, AUX, HIDDEN).abs() / 16).maximum(largest * 2**-16)
    assert (error <= bound).all()
    torch.testing.assert_close(read.last_hidden_states, written.supervised_last, rtol=1 / 16, atol=0)
    assert reader.read(1).last_hidden_states.shape == (0, HIDDEN)


def test_a_mask_that_is_not_the_manifests_is_never_paired_with_other_states(tmp_path: Path) -> None:
    folder = make_store(tmp_path / "store")
    path = folder / "shard-00001.safetensors"
    raw = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    raw[start + json.loads(raw[8:start])["loss_mask"]["data_offsets"][0]] ^= 1
    path.write_bytes(raw)
    reader = StoreReader(folder)
    for read in (reader.read, reader.read_tokens):
        with pytest.raises(ProblemsError, match="'s2': has 3 in its loss mask, the manifest lists 2") as error:
            read(2)
        assert kinds(error.value) == ["store.loss_mask"]


def test_the_target_head_comes_back_and_a_tied_one_uses_the_embedding(tmp_path: Path) -> None:
    head = StoreReader(make_store(tmp_path / "untied")).target_head()
    assert all(torch.equal(head[name], value) for name, value in target_head().items())
    tied = {name: value for name, value in target_head().items() if name != "lm_head.weight"}
    head = StoreReader(make_store(tmp_path / "tied", target_head=tied)).target_head()
    assert torch.equal(head["lm_head.weight"], tied["embed_tokens.weight"])


def test_reading_a_sample_reads_no_other_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with writer(tmp_path / "store") as store:
        store.write_shard([sample("a", 20_000), sample("b", 20_000)])
    reader, real, counts = StoreReader(tmp_path / "store"), os.preadv, []

    def counted(*args: Any) -> int:
        counts.append(real(*args))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", counted)
    reader.read(1)

    assert sum(counts) == reader.layout.tensor_bytes(20_000, 2)


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        ({"aux_hidden_states": torch.zeros(5, 11, dtype=torch.bfloat16)}, "store.sample_shape", "[5, 12]"),
        ({"last_hidden_states": torch.zeros(3, HIDDEN, dtype=torch.bfloat16)}, "store.sample_shape", "[2, 4]"),
        ({"last_hidden_states": torch.zeros(5, HIDDEN)}, "store.sample_shape", "torch.bfloat16"),
        ({"loss_mask": torch.zeros(4, dtype=torch.bool)}, "store.sample_shape", "loss_mask"),
        ({"loss_mask": torch.zeros(5, dtype=torch.uint8)}, "store.sample_shape", "torch.bool"),
        ({"input_ids": torch.zeros(5)}, "store.sample_shape", "input_ids"),
        ({"input_ids": torch.full((5,), VOCAB)}, "store.ids_out_of_range", "0 to 19"),
        ({"input_ids": torch.full((5,), -1)}, "store.ids_out_of_range", "0 to 19"),
        ({"id": ""}, "store.sample_id", "empty"),
        ({"target_argmax": None}, "store.sample_shape", "target_argmax is absent, expected integers [2] or [5]"),
        ({"target_argmax": torch.zeros(3, dtype=torch.int32)}, "store.sample_shape", "torch.int32 [3]"),
        ({"target_argmax": torch.zeros(2)}, "store.sample_shape", "target_argmax is torch.float32 [2]"),
        ({"target_argmax": torch.tensor([0, VOCAB])}, "store.ids_out_of_range", "ids 0 to 20 in its target_argmax"),
        ({"target_argmax": torch.tensor([-1, 0])}, "store.ids_out_of_range", "in its target_argmax"),
    ],
)
def test_a_wrong_sample_is_refused_by_name_before_anything_is_written(
    tmp_path: Path, change: dict[str, object], kind: str, said: str
) -> None:
    wrong = StoredSample(**{**vars(sample("wrong")), **change})  # type: ignore[arg-type]
    with writer(tmp_path / "store") as store:
        with pytest.raises(ProblemsError, match=r"wrong|''") as error:
            store.write_shard([sample("good"), wrong])
        assert kinds(error.value) == [kind]
        assert said in str(error.value)
        assert names(tmp_path / "store") == ["manifest.json", "target_head.safetensors", "writer.lock"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["aux_hidden_states", "last_hidden_states"])
def test_non_finite_states_are_refused_by_name(tmp_path: Path, name: str, value: float) -> None:
    wrong = sample("wrong")
    getattr(wrong, name)[3, 2] = value
    with writer(tmp_path / "store") as store, pytest.raises(ProblemsError, match=f"'wrong'.*{name}"):
        store.write_shard([wrong])


@pytest.mark.parametrize("name", ["aux_hidden_states", "last_hidden_states"])
def test_states_that_eight_bits_cannot_hold_are_refused_by_name(tmp_path: Path, name: str) -> None:
    wrong = sample("wrong")
    getattr(wrong, name)[3, 2] = 3.3e38  # finite in bfloat16
    made = writer(tmp_path / "store", contract=contract(dtype="float8_e4m3fn"))
    with made as store, pytest.raises(ProblemsError, match=f"'wrong'.*{name}.*too large for float8_e4m3fn"):
        store.write_shard([wrong])


def test_a_flip_in_the_mask_of_an_fp8_store_is_named(tmp_path: Path) -> None:
    """The fingerprint's last row is then looked for behind the end of the file."""
    folder = tmp_path / "store"
    with writer(folder, contract=contract(dtype="float8_e4m3fn")) as store:
        store.write_shard([sample("a")])
    path = folder / "shard-00000.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[:-3] + b"\1" + raw[-2:])
    assert "store.loss_mask" in {problem.kind for problem in verify(folder, deep=True)}


def test_a_sample_is_refused_twice_in_one_shard_and_in_the_store(tmp_path: Path) -> None:
    with writer(tmp_path / "store") as store:
        store.write_shard([sample("a")])
        for again in (["a"], ["b", "b"]):
            with pytest.raises(ProblemsError, match="already in the store, or given twice") as error:
                store.write_shard([sample(sample_id) for sample_id in again])
            assert set(kinds(error.value)) == {"store.duplicate_sample"}
    assert [info.id for info in StoreReader(tmp_path / "store").samples] == ["a"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"norm.weight": None}, "norm.weight is absent"),
        ({"norm.weight": torch.ones(5)}, "norm.weight is (5,), expected (4,)"),
        ({"bias": torch.ones(5)}, "bias is (5,), expected absent"),
        ({"lm_head.weight": torch.full((VOCAB, HIDDEN), torch.nan)}, "lm_head.weight has NaN"),
        ({"embed_tokens.weight": torch.ones(VOCAB, HIDDEN, dtype=torch.int32)}, "embed_tokens.weight"),
    ],
)
def test_a_wrong_target_head_is_refused(tmp_path: Path, change: dict[str, torch.Tensor | None], said: str) -> None:
    head = {name: value for name, value in {**target_head(), **change}.items() if value is not None}
    with pytest.raises(ProblemsError) as error:
        writer(tmp_path / "store", target_head=head)
    assert said in str(error.value)


def test_resuming_goes_on_where_the_last_run_stopped(tmp_path: Path) -> None:
    folder = make_store(tmp_path / "store", samples=3)
    first = (folder / "shard-00000.safetensors").read_bytes()
    with writer(folder) as store:
        assert store.completed == {"s0", "s1", "s2"}
        assert store.redone == []
        store.write_shard([sample("s3")])
    assert [info.id for info in StoreReader(folder).samples] == ["s0", "s1", "s2", "s3"]
    assert (folder / "shard-00000.safetensors").read_bytes() == first


def test_resuming_with_other_settings_lists_every_difference(tmp_path: Path) -> None:
    folder = make_store(tmp_path / "store")
    before = (folder / "manifest.json").read_bytes()
    settings = {"data": {"max_length": 32, "path": "a.jsonl", "limit": 5}}
    with pytest.raises(ProblemsError) as error:
        writer(folder, settings=settings, contract=contract(output_indices=(1, 2, 4), dtype="float16"))
    text = str(error.value)
    assert "settings.data.max_length: it was begun with 64, this run has 32" in text
    assert "settings.data.limit: it was begun with nothing, this run has 5" in text
    assert "settings.store_dtype: it was begun with 'bfloat16', this run has nothing" in text
    assert {"contract.output_indices", "contract.dtype"} <= set(kinds(error.value))
    assert "a.jsonl" not in text
    assert (folder / "manifest.json").read_bytes() == before


def test_resuming_with_other_weights_of_the_target_is_refused(tmp_path: Path) -> None:
    folder = make_store(tmp_path / "store")
    with pytest.raises(ProblemsError) as error:
        writer(folder, target_head=target_head(scale=2.0))
    assert kinds(error.value) == ["store.other_target"]


def test_resuming_with_other_rows_of_the_last_hidden_states_is_refused(tmp_path: Path) -> None:
    folder = make_store(tmp_path / "store")
    with pytest.raises(ProblemsError, match="begun with 'supervised', this run has 'all'") as error:
        writer(folder, last_rows="all")
    assert kinds(error.value) == ["store.other_settings"]


def test_tuples_in_settings_are_the_lists_they_become(tmp_path: Path) -> None:
    make_store(tmp_path / "store", settings={"output_indices": (1, 3, 4)})
    with writer(tmp_path / "store", settings={"output_indices": [1, 3, 4]}) as store:
        assert len(store.completed) == 6


def test_a_damaged_target_head_is_written_again(tmp_path: Path) -> None:
    folder = make_store(tmp_path / "store")
    path = folder / "target_head.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with writer(folder) as store:
        assert [problem.kind for problem in store.redone] == ["store.target_head_truncated"]
    assert torch.equal(StoreReader(folder).target_head()["lm_head.weight"], target_head()["lm_head.weight"])


def test_shards_without_a_manifest_are_not_overwritten(tmp_path: Path) -> None:
    folder = make_store(tmp_path / "store")
    (folder / "manifest.json").unlink()
    with pytest.raises(ProblemsError) as error:
        writer(folder)
    assert kinds(error.value) == ["store.manifest_missing"]
    assert len(list(folder.glob("shard-*"))) == 3


def test_fault_08_a_half_copied_shard_is_redone_not_skipped(tmp_path: Path) -> None:
    folder = make_store(tmp_path / "store")
    path = folder / "shard-00001.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 9 // 10])
    with writer(folder) as store:
        assert store.completed == {"s0", "s1", "s4", "s5"}
        assert [problem.kind for problem in store.redone] == ["store.shard_truncated"]
        assert not path.exists()
        write_missing(store, 6)
    assert path.read_bytes() == whole
    assert [info.id for info in StoreReader(folder).samples] == ["s0", "s1", "s2", "s3", "s4", "s5"]


def test_fault_08_a_missing_shard_is_redone(tmp_path: Path) -> None:
    folder = make_store(tmp_path / "store")
    (folder / "shard-00000.safetensors").unlink()
    with writer(folder) as store:
        assert store.completed == {"s2", "s3", "s4", "s5"}


def test_fault_08_leftovers_of_a_killed_writer_do_not_count_as_data(tmp_path: Path) -> None:
    folder = make_store(tmp_path / "store")
    (folder / "shard-00003.safetensors.tmp").write_bytes(b"half")
    assert len(StoreReader(folder)) == 6
    (folder / "shard-00003.safetensors").write_bytes((folder / "shard-00000.safetensors").read_bytes())
    with pytest.raises(ProblemsError, match="shard-00003") as error:
        StoreReader(folder)
    assert kinds(error.value) == ["store.shard_unlisted"]
    writer(folder).close()
    assert len(StoreReader(folder)) == 6
    assert not list(folder.glob("*.tmp")) and not list(folder.glob("shard-00003*"))


def test_fault_08_no_space_on_the_third_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, calls = tmp_path / "store", []
    real = tensor_file.write_tensor_file

    def full_on_the_third_shard(path: Path, *args: object) -> str:
        calls.append(path.name)
        if path.name.startswith("shard-00002"):
            path.write_bytes(b"a part of it")
            raise OSError(28, os.strerror(28))
        return real(path, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(tensor_file, "write_tensor_file", full_on_the_third_shard)
    with pytest.raises(ProblemsError, match="No space left on device") as error:
        make_store(folder)
    assert kinds(error.value) == ["disk.full"]
    assert [info.id for info in StoreReader(folder).samples] == ["s0", "s1", "s2", "s3"]
    assert not list(folder.glob("*.tmp")) and not list(folder.glob("shard-00002*"))
    monkeypatch.undo()
    with writer(folder) as store:
        assert store.completed == {"s0", "s1", "s2", "s3"}
        write_missing(store, 6)
    assert len(StoreReader(folder)) == 6


def test_fault_08_no_space_for_the_manifest_leaves_no_unlisted_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_store(tmp_path / "store", samples=4)
    real = store_writer.save_manifest

    def full(path: Path, value: object) -> None:
        raise problem_error(str(path), "disk.full", "cannot write: No space left on device", "free space there")

    with writer(folder) as store:
        monkeypatch.setattr(store_writer, "save_manifest", full)
        with pytest.raises(ProblemsError, match="No space left"):
            write_missing(store, 6)
        assert len(StoreReader(folder)) == 4
        monkeypatch.setattr(store_writer, "save_manifest", real)
        write_missing(store, 6)
    assert [info.id for info in StoreReader(folder).samples] == ["s0", "s1", "s2", "s3", "s4", "s5"]


def test_fault_08_a_disk_that_is_really_full(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "256k") as disk:
        with pytest.raises(ProblemsError) as error, writer(disk / "store") as store:
            for number in range(4):
                store.write_shard([sample(f"s{number}", tokens=2000)])
        assert kinds(error.value) == ["disk.full"]
        assert [info.id for info in StoreReader(disk / "store").samples] == ["s0", "s1", "s2"]
        assert not list((disk / "store").glob("*.tmp"))


# Files are written in this order: head, manifest, then four times a shard and the manifest that lists it. Each is
# synced, renamed, and its folder synced.
@pytest.mark.parametrize(("function", "calls"), [("replace", 10), ("fsync", 20)])
def test_fault_08_a_kill_at_any_write_leaves_a_store_that_can_be_finished(
    tmp_path: Path, function: str, calls: int
) -> None:
    whole = make_store(tmp_path / "whole", samples=8)
    assert not killed(lambda: make_store(tmp_path / "unharmed", samples=8), function, calls + 1)
    for call in range(1, calls + 1):
        folder = tmp_path / f"store{call}"
        assert killed(lambda: make_store(folder, samples=8), function, call)  # noqa: B023
        with writer(folder) as store:
            assert store.redone == []
            if function == "replace":
                assert len(store.completed) == max(0, call - 3) // 2 * 2
            write_missing(store, 8)
        assert names(folder) == names(whole)
        for path in whole.iterdir():
            assert (folder / path.name).read_bytes() == path.read_bytes(), path.name


def test_fault_08_a_kill_in_the_middle_of_a_shards_bytes(tmp_path: Path) -> None:
    folder = make_store(tmp_path / "store", samples=4)

    def write_much() -> None:
        with writer(folder) as store:
            store.write_shard([sample(f"big{number}", tokens=1000) for number in range(2_000)])

    child = in_a_child(write_much)
    temporary = folder / "shard-00002.safetensors.tmp"
    while not temporary.exists() or temporary.stat().st_size < 100_000:
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the writer ended before it could be killed"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert temporary.exists()
    assert len(StoreReader(folder)) == 4
    with writer(folder) as store:
        assert store.completed == {"s0", "s1", "s2", "s3"} and store.redone == []
        assert not temporary.exists()


def test_a_second_writer_is_refused_and_a_dead_one_leaves_no_lock(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    script = (
        "import sys, time; from pathlib import Path; from tests.unit.data.cases import writer\n"
        "store = writer(Path(sys.argv[1])); print('open', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script, folder], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"open\n"
        try:
            with pytest.raises(ProblemsError) as error:
                writer(folder)
            assert kinds(error.value) == ["store.locked"]
        finally:
            other.kill()
    first = writer(folder)
    with pytest.raises(ProblemsError, match="another writer"):
        writer(folder)
    first.close()
    writer(folder).close()


def test_an_error_in_the_block_gives_the_lock_back(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), writer(tmp_path / "store") as store:
        store.write_shard([sample("a")])
        raise KeyboardInterrupt
    with writer(tmp_path / "store") as store:
        assert store.completed == {"a"}


def test_a_folder_that_is_no_store_is_left_alone(tmp_path: Path) -> None:
    for name in ("config.json", "thesis.tmp"):
        (tmp_path / name).write_text("mine")
    with pytest.raises(ProblemsError, match=r"holds config\.json, thesis\.tmp") as error:
        writer(tmp_path)
    assert kinds(error.value) == ["store.not_a_store"]
    assert {path.name for path in tmp_path.iterdir()} - {"writer.lock"} == {"config.json", "thesis.tmp"}


def test_what_a_killed_start_leaves_is_no_foreign_folder(tmp_path: Path) -> None:
    for name in ("writer.lock", "target_head.safetensors", "manifest.json.tmp"):
        (tmp_path / name).write_bytes(b"half")
    writer(tmp_path).close()
    assert names(tmp_path) == ["manifest.json", "target_head.safetensors", "writer.lock"]


@pytest.mark.parametrize("value", [VOCAB, -1])
def test_an_id_outside_the_vocabulary_is_refused_when_it_is_read(tmp_path: Path, value: int) -> None:
    folder = make_store(tmp_path / "store")
    path = folder / "shard-00000.safetensors"
    data = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    data[begin : begin + 4] = value.to_bytes(4, "little", signed=True)
    path.write_bytes(data)
    reader = StoreReader(folder)
    for read in (reader.read, reader.read_tokens):
        with pytest.raises(ProblemsError, match="'s0'") as error:
            read(0)
        assert kinds(error.value) == ["store.ids_out_of_range"]
