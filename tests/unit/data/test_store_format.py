import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle3.data import store_format
from eagle3.data.store import StoreReader, verify
from eagle3.data.store_format import load_manifest
from eagle3.data.store_layout import StoreLayout
from eagle3.errors import ProblemsError

from .cases import contract, kinds, make_store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_store(tmp_path / "store", samples=4)


def test_a_manifest_survives_reading_and_writing(folder: Path) -> None:
    manifest = load_manifest(folder)
    written = json.loads((folder / "manifest.json").read_text())
    assert written.pop("seal").startswith("sha256:") and manifest.to_dict() == written
    assert manifest.contract == contract()


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("", "file.not_json"),
        ('{"format": "eagle3-hidden-states",', "file.not_json"),
        ("\x00\x01", "file.not_json"),
        ("[]", "store.format"),
        ("null", "store.format"),
        ("{}", "store.format"),
        ('{"format": "parquet"}', "store.format"),
        ('{"format": "eagle3-hidden-states"}', "store.format_version"),
        ('{"format": "eagle3-hidden-states", "format_version": 4}', "store.format_version"),
        ('{"format": "eagle3-hidden-states", "format_version": true}', "store.format_version"),
        ('{"format": "eagle3-hidden-states", "format_version": "1"}', "store.format_version"),
    ],
)
def test_a_manifest_that_is_none(folder: Path, text: str, kind: str) -> None:
    (folder / "manifest.json").write_text(text)
    with pytest.raises(ProblemsError) as error:
        StoreReader(folder)
    assert kinds(error.value) == [kind]
    assert str(folder / "manifest.json") in str(error.value)
    assert [problem.kind for problem in verify(folder)] == [kind]


def test_a_folder_without_a_manifest(tmp_path: Path) -> None:
    with pytest.raises(ProblemsError) as error:
        StoreReader(tmp_path)
    assert kinds(error.value) == ["file.missing"]


def first(manifest: dict[str, Any]) -> dict[str, Any]:
    shard: dict[str, Any] = manifest["shards"][0]
    return shard


@pytest.mark.parametrize(
    ("edit", "kind", "said"),
    [
        (lambda m: m.pop("settings"), "store.manifest_key", "settings is missing"),
        (lambda m: m.pop("last_hidden_rows"), "store.manifest_key", "last_hidden_rows is missing"),
        (lambda m: m.update(last_hidden_rows=1), "store.manifest_type", "last_hidden_rows is a int"),
        (lambda m: m.update(last_hidden_rows="some"), "store.manifest_value", "last_hidden_rows is 'some'"),
        (
            lambda m: [m.update(format_version=1), m.pop("seal")],
            "store.manifest_key",
            "last_hidden_rows is not part of the format",
        ),
        (lambda m: m.pop("seal"), "store.manifest_key", "seal is missing"),
        (lambda m: m["settings"].update(data="b.jsonl"), "file.seal", "its seal is another"),
        (lambda m: m.update(comment="hi"), "store.manifest_key", "comment is not part of the format"),
        (lambda m: m.update(shards={}), "store.manifest_type", "shards is a dict, expected list"),
        (lambda m: m.update(contract=None), "store.manifest_type", "contract is a NoneType"),
        (lambda m: m["contract"].pop("hidden_size"), "contract.missing", "hidden_size"),
        (lambda m: m["contract"].update(output_indices=[4, 3, 1]), "layers.unsorted", ""),
        (lambda m: m.update(target_head="x"), "store.manifest_type", "target_head is a str"),
        (lambda m: m["target_head"].update(file="../head"), "store.manifest_value", "target_head.file is '../head'"),
        (lambda m: m["shards"].append(7), "store.manifest_type", "shards[2] is a int"),
        (lambda m: first(m).pop("sha256"), "store.manifest_key", "shards[0].sha256 is missing"),
        (lambda m: first(m).update(bytes="9"), "store.manifest_type", "shards[0].bytes is a str"),
        (lambda m: first(m).update(bytes=True), "store.manifest_type", "shards[0].bytes is a bool"),
        (lambda m: first(m).update(bytes=0), "store.manifest_value", "shards[0].bytes is 0"),
        (lambda m: first(m).update(sha256="md5:0"), "store.manifest_value", "shards[0].sha256 is 'md5:0'"),
        (lambda m: first(m).update(file="/etc/passwd"), "store.manifest_value", "'/etc/passwd'"),
        (lambda m: first(m).update(file="../shard-00000.safetensors"), "store.manifest_value", "shards[0].file"),
        (lambda m: first(m).update(samples=[]), "store.manifest_value", "shards[0].samples is empty"),
        (lambda m: first(m).update(tokens=8), "store.token_count", "shards[0] (shard-00000.safetensors) says 8"),
        (lambda m: first(m)["samples"][1].update(tokens=0), "store.token_count", "(s1) has 2 supervised of 0"),
        (
            lambda m: first(m)["samples"][1].update(tokens=0, supervised=0),
            "store.token_count",
            "(s1) has 0 supervised of 0",
        ),
        (lambda m: first(m)["samples"][1].update(supervised=5), "store.token_count", "(s1) has 5 supervised of 4"),
        (lambda m: first(m)["samples"][1].update(supervised=-1), "store.token_count", "(s1) has -1"),
        (lambda m: first(m)["samples"][1].update(tokens=4.0), "store.manifest_type", "samples[1].tokens is a float"),
        (lambda m: first(m)["samples"][1].update(id=1), "store.manifest_type", "samples[1].id is a int"),
        (lambda m: first(m)["samples"][1].update(source=1), "store.manifest_type", "samples[1].source is a int"),
        (lambda m: first(m)["samples"][1].update(source=None), "store.manifest_type", "samples[1].source is a None"),
        (lambda m: first(m).update(file="shard-00001.safetensors"), "store.duplicate_shard", "listed 2 times"),
    ],
)
def test_a_manifest_that_breaks_the_format(folder: Path, edit: Callable[..., object], kind: str, said: str) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    edit(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(ProblemsError) as error:
        StoreReader(folder)
    assert kinds(error.value) == [kind]
    assert said in str(error.value) and str(path) in str(error.value)


def test_every_fault_of_a_manifest_is_listed(folder: Path) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["provenance"]
    manifest["contract"]["dtype"] = "int4"
    manifest["shards"][1]["samples"][0]["supervised"] = 99
    path.write_text(json.dumps(manifest))
    with pytest.raises(ProblemsError) as error:
        StoreReader(folder)
    assert kinds(error.value) == ["store.manifest_key", "contract.value", "store.token_count"]


@pytest.mark.parametrize("value", [None, "unknown", ""])
def test_fault_05_a_store_that_does_not_say_pre_or_post_norm_is_refused(folder: Path, value: str | None) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["contract"]["last_hidden_states"] = value
    if value is None:
        del manifest["contract"]["last_hidden_states"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(ProblemsError, match="last_hidden_states"):
        StoreReader(folder)


@pytest.mark.parametrize("kind", ["pre_norm", "post_norm"])
def test_fault_05_a_store_says_pre_or_post_norm(tmp_path: Path, kind: str) -> None:
    folder = make_store(tmp_path / "store", contract=contract(last_hidden_states=kind))
    assert StoreReader(folder).contract.last_hidden_states == kind


@pytest.mark.parametrize("vocab_size", [2**16, 2**16 + 1])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn"])
def test_every_tensor_begins_at_a_multiple_of_its_element_size(dtype: str, vocab_size: int) -> None:
    bits = {"I32": 4, "F32": 4, "BF16": 2, "F16": 2, "U16": 2, "U8": 1, "F8_E4M3": 1}
    position = 0
    layout = StoreLayout(contract(dtype=dtype, hidden_size=3, vocab_size=vocab_size))
    assert ("U16" in {code for code, _ in layout.tensors(7, 5).values()}) == (vocab_size == 2**16)
    for code, shape in layout.tensors(7, 5).values():
        assert position % bits[code] == 0
        size = bits[code]
        for length in shape:
            size *= length
        position += size
    assert position == layout.tensor_bytes(7, 5)


def test_an_fp8_store_of_kimis_width_takes_at_most_43_percent_of_bfloat16_with_all_last_states() -> None:
    kimi: dict[str, Any] = {"hidden_size": 7168, "vocab_size": 163840}
    full = StoreLayout(contract(**kimi), "all").tensor_bytes(1000, 400)
    small = StoreLayout(contract(**kimi, dtype="float8_e4m3fn")).tensor_bytes(1000, 400)
    assert full == 1000 * (4 * 7168 * 2 + 5 + 4)
    assert small == 1000 * (3 * 7168 + 3 * 4 + 5) + 400 * (7168 + 4 + 4)
    assert small <= 0.43 * full


def test_a_listed_sample_takes_little_memory() -> None:
    """A million of them are in memory when a store is opened."""
    listed = [
        {"id": f"c{number:07d}", "tokens": 1000, "supervised": 500, "source": f"w{'eb' * 9}"} for number in range(500)
    ]
    value = {"file": "shard-00000.safetensors", "bytes": 1, "sha256": "", "samples": json.loads(json.dumps(listed))}
    tracemalloc.start()
    shard = store_format._shard(value)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert [sample.to_dict() for sample in shard.samples] == listed and used < 100 * len(listed)
