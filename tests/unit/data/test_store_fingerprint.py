from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.data.store import StoredSample, StoreReader, StoreWriter, verify
from eagle3.data.store_fingerprint import make_fingerprint
from eagle3.data.store_format import load_manifest
from eagle3.data.store_layout import LastRows, StoreLayout
from eagle3.errors import ProblemsError
from eagle3.wiring import WiringContract, check_dataset
from eagle3.wiring.fingerprint_check import _float8, check_stored_fingerprint
from tests.stores import (
    HIDDEN,
    INDICES,
    TARGET_CONFIG,
    VOCAB,
    random_contract,
    random_sample,
    rewrite_manifest,
    write_random_store,
)

CHANNELS_OF_64 = [2, 13, 16, 19, 22, 25, 26, 30, 31, 32, 37, 48, 49, 50, 53, 56]


def sample(name: str, tokens: int, seed: int = 0) -> StoredSample:
    made = random_sample(name, tokens, (1, tokens), seed)
    return replace(made, target_argmax=torch.zeros(tokens, dtype=torch.int32))


def contract(dtype: str = "float32") -> WiringContract:
    return replace(random_contract(), dtype=dtype)


def layout(dtype: str = "float32", last_rows: LastRows = "all") -> StoreLayout:
    return StoreLayout(contract(dtype), last_rows)


def test_the_shortest_sample_that_is_long_enough_is_taken_and_cut() -> None:
    samples = [sample("long", 90), sample("short", 10), sample("first", 70, 1), sample("second", 70, 2)]

    fingerprint = make_fingerprint(samples, layout())

    assert fingerprint.sample == "first"
    assert fingerprint.token_ids == tuple(samples[2].input_ids[:64].tolist())
    assert fingerprint.positions == (0, 13, 25, 38, 50, 63)


def test_without_a_long_one_the_longest_is_taken_whole() -> None:
    fingerprint = make_fingerprint([sample("a", 5), sample("b", 7, 1), sample("c", 7, 2)], layout())

    assert fingerprint.sample == "b"
    assert len(fingerprint.token_ids) == 7 and fingerprint.positions == (0, 1, 2, 4, 5, 6)
    assert make_fingerprint([sample("one", 1)], layout()).positions == (0,)


def test_the_numbers_are_the_stored_ones() -> None:
    stored = sample("a", 64)
    fingerprint = make_fingerprint([stored], layout())

    slots = stored.aux_hidden_states.view(64, len(INDICES), HIDDEN)
    rows, columns = list(fingerprint.positions), list(fingerprint.channels)
    for slot, index in enumerate(INDICES):
        assert torch.equal(torch.tensor(fingerprint.states[index]), slots[:, slot][rows][:, columns])
    assert torch.equal(torch.tensor(fingerprint.last), stored.last_hidden_states[rows][:, columns])


def test_the_channels_are_the_same_everywhere() -> None:
    wide = replace(random_contract(), hidden_size=64)
    states = torch.zeros(3, 64)
    stored = replace(sample("a", 3), aux_hidden_states=states.repeat(1, 3), last_hidden_states=states)

    assert list(make_fingerprint([stored], StoreLayout(wide, "all")).channels) == CHANNELS_OF_64


def test_other_layers_are_added_rounded_like_the_stored_ones() -> None:
    stored = sample("a", 64)
    asked: list[list[int]] = []

    def other_states(ids: Any) -> dict[int, torch.Tensor]:
        asked.append(list(ids))
        return {-1: torch.full((64, HIDDEN), 1.001)}

    fingerprint = make_fingerprint([stored], layout("bfloat16"), other_states)

    assert asked == [stored.input_ids.tolist()]
    assert list(fingerprint.states) == [-1, *INDICES]
    assert {value for row in fingerprint.states[-1] for value in row} == {1.0}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
def test_a_stores_fingerprint_equals_its_shard_in_every_type(tmp_path: Path, dtype: str) -> None:
    folder = write_random_store(tmp_path / "s", contract=contract(dtype), change=cast_to(dtype))

    assert StoreReader(folder).fingerprint is not None
    assert verify(folder, deep=True) == [] and check_dataset(folder) == []


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    rewrite_manifest(path, manifest)
    return manifest


def spoil(folder: Path, tensor: str, row: int, column: int) -> None:
    """Changes one number in the first shard, and nothing else."""
    path = folder / "shard-00000.safetensors"
    raw = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    info = header[tensor]
    if tensor.startswith("last"):  # only supervised tokens have a row
        mask = start + header["loss_mask"]["data_offsets"][0]
        row = sum(raw[mask : mask + row])
    begin, end = info["data_offsets"]
    size, width = (end - begin) // math.prod(info["shape"]), (info["shape"] + [1])[1]
    place = start + begin + size * (row * width + column)
    number = {4: struct.pack("<f", 7), 2: struct.pack("<f", 7)[2:], 1: b"\x4e"}[size]
    raw[place : place + size] = bytes([raw[place] ^ 1, 0]) if tensor == "input_ids" else number
    path.write_bytes(raw)


def cast_to(dtype: str) -> Callable[[StoredSample], StoredSample]:
    kind = getattr(torch, dtype)

    def cast(item: StoredSample) -> StoredSample:
        aux, last = item.aux_hidden_states * 0.37, item.last_hidden_states * 0.37
        kept = torch.bfloat16 if dtype == "float8_e4m3fn" else kind
        return replace(item, aux_hidden_states=aux.to(kept), last_hidden_states=last.to(kept))

    return cast


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
@pytest.mark.parametrize(
    ("tensor", "column", "said"),
    [
        ("aux_hidden_states", 0, "output index 0"),
        ("aux_hidden_states", 2 * HIDDEN, "output index 5"),
        ("last_hidden_states", 0, "the last hidden states"),
        ("input_ids", 0, "its token ids"),
    ],
)
def test_a_fingerprint_that_disagrees_with_its_shard_is_a_named_problem(
    tmp_path: Path, tensor: str, column: int, said: str, dtype: str
) -> None:
    folder = write_random_store(tmp_path / "s", contract=contract(dtype), change=cast_to(dtype))
    fingerprint = StoreReader(folder).fingerprint
    assert fingerprint is not None
    first = sum(item.tokens for item in StoreReader(folder).samples[: int(fingerprint.sample[1:])])
    spoil(folder, tensor, first + fingerprint.positions[2], column)

    for problems in (verify(folder), check_dataset(folder)):
        [problem] = problems
        assert problem.kind == "fingerprint.states"
        assert problem.message == f"differs from sample {fingerprint.sample!r} in shard-00000.safetensors: {said}"
    with pytest.raises(ProblemsError):
        StoreReader(folder)


def test_a_missing_or_foreign_fingerprint_is_named(tmp_path: Path) -> None:
    folder = write_random_store(tmp_path / "s")
    kept = json.loads((folder / "manifest.json").read_text())["fingerprint"]

    edit_manifest(folder, lambda manifest: manifest.update(fingerprint=None))
    assert [item.kind for item in verify(folder)] == ["fingerprint.missing"]
    assert [item.kind for item in check_dataset(folder)] == ["fingerprint.missing"]

    other = write_random_store(tmp_path / "o", seed=5, answers=[(20, (2, 9))])
    foreign = json.loads((other / "manifest.json").read_text())["fingerprint"]
    edit_manifest(folder, lambda manifest: manifest.update(fingerprint=foreign))
    assert [item.kind for item in verify(folder)] == ["fingerprint.states"]

    edit_manifest(folder, lambda manifest: manifest.update(fingerprint={**kept, "sample": "s99"}))
    assert [item.kind for item in verify(folder)] == ["fingerprint.digest"]
    assert [item.kind for item in check_dataset(folder)] == ["fingerprint.digest"]

    edit_manifest(folder, lambda manifest: manifest.pop("fingerprint"))
    assert [item.kind for item in verify(folder)] == ["store.manifest_key"]
    assert check_dataset(folder) == [], "another tool's manifest need not have one"


@pytest.mark.parametrize(
    "change",
    [
        lambda folder, manifest: (folder / "shard-00000.safetensors").write_bytes(b"short"),
        lambda folder, manifest: (folder / "shard-00000.safetensors").unlink(),
        lambda folder, manifest: save_file({"x": torch.ones(1)}, folder / "shard-00000.safetensors"),
        lambda folder, manifest: manifest["shards"][0]["samples"].insert(0, {"id": "more", "tokens": 1000}),
    ],
)
def test_a_shard_that_cannot_be_read_is_left_to_other_checks(
    tmp_path: Path, change: Callable[[Path, dict[str, Any]], object]
) -> None:
    folder = write_random_store(tmp_path / "s")
    manifest = json.loads((folder / "manifest.json").read_text())
    change(folder, manifest)

    assert check_stored_fingerprint(folder, manifest, contract()) == []


@pytest.mark.parametrize("shards", [3, [3], [{}], [{"samples": 3}], [{"samples": [{}]}]])
def test_a_list_of_shards_that_is_none_holds_no_sample(tmp_path: Path, shards: object) -> None:
    folder = write_random_store(tmp_path / "s")
    manifest = json.loads((folder / "manifest.json").read_text()) | {"shards": shards}

    assert [item.kind for item in check_stored_fingerprint(folder, manifest, contract())] == ["fingerprint.sample"]


def test_a_sample_shorter_than_its_fingerprint_is_named(tmp_path: Path) -> None:
    folder = write_random_store(tmp_path / "s")
    manifest = json.loads((folder / "manifest.json").read_text())
    for listed in manifest["shards"][0]["samples"]:
        listed["tokens"] -= 1

    [problem] = check_stored_fingerprint(folder, manifest, contract())

    assert "its token ids" in problem.message


def test_a_sample_that_is_not_in_the_store_is_named(tmp_path: Path) -> None:
    folder = write_random_store(tmp_path / "s")
    fingerprint = make_fingerprint([sample("elsewhere", 9)], layout()).to_dict()
    manifest = edit_manifest(folder, lambda value: value.update(fingerprint=fingerprint))

    assert [item.kind for item in check_stored_fingerprint(folder, manifest, contract())] == ["fingerprint.sample"]


def test_an_empty_store_has_none_yet(tmp_path: Path) -> None:
    with writer(tmp_path / "s"):
        pass
    manifest = json.loads((tmp_path / "s/manifest.json").read_text())

    assert manifest["fingerprint"] is None
    assert check_stored_fingerprint(tmp_path / "s", manifest, contract()) == []


def writer(folder: Path) -> StoreWriter:
    head = {
        "embed_tokens.weight": torch.ones(VOCAB, HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": torch.ones(VOCAB, HIDDEN),
    }
    return StoreWriter(folder, contract(), {}, TARGET_CONFIG, head)


def test_a_resumed_store_keeps_its_fingerprint_unless_its_shard_is_redone(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    shards = [[sample("a", 70), sample("b", 80)], [sample("c", 65)]]
    with writer(folder) as store:
        store.write_shard(shards[0])
        store.write_shard(shards[1])
    before = (folder / "manifest.json").read_bytes()
    assert json.loads(before)["fingerprint"]["sample"] == "a", "of the first shard, though c is shorter"

    (folder / "shard-00001.safetensors").write_bytes(b"")
    with writer(folder) as store:
        store.write_shard(shards[1])
    assert (folder / "manifest.json").read_bytes() == before

    tensors = load_file(folder / "shard-00000.safetensors")
    save_file(tensors, folder / "shard-00000.safetensors")
    with writer(folder) as store:
        assert load_manifest(folder).fingerprint is None
        store.write_shard(shards[0])
    assert (folder / "manifest.json").read_bytes() == before


def test_eight_bit_numbers_are_read_as_torch_reads_them() -> None:
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    found = torch.tensor([_float8(bytes([bits])) for bits in range(256)])
    assert torch.equal(found.nan_to_num(nan=1e9), expected.nan_to_num(nan=1e9)) and found.isnan().sum() == 2
