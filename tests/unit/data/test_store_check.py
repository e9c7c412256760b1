import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle3.data.store import StoreReader, verify
from eagle3.data.tensor_file import write_tensor_file
from eagle3.errors import Problem, ProblemsError
from eagle3.files import sha256_file
from tests.stores import rewrite_manifest

from .cases import contract, layout, make_store

SHARD = "shard-00001.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Shards of s0, s1 | s2, s3 | s4, s5."""
    return make_store(tmp_path / "store")


def edit_manifest(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    edit(manifest)
    rewrite_manifest(path, manifest)


def refused(folder: Path) -> list[Problem]:
    """What opening says; the cheap check must say the same."""
    with pytest.raises(ProblemsError) as error:
        StoreReader(folder)
    assert list(error.value.problems) == verify(folder)
    return verify(folder)


def rewrite_shard(
    folder: Path,
    change: Callable[[dict[str, torch.Tensor], dict[str, Any]], object],
    list_it: bool = True,
) -> None:
    """Writes the middle shard again with other tensors or another sample list, with size and checksum made to match."""
    path = folder / SHARD
    tensors = load_file(path)
    listed = next(s for s in json.loads((folder / "manifest.json").read_text())["shards"] if s["file"] == SHARD)
    samples = [{"id": item["id"], "tokens": item["tokens"]} for item in listed["samples"]]
    header: dict[str, Any] = {"format": "eagle3-hidden-states", "format_version": 3, "samples": samples}
    tensors = {name: tensors[name].clone() for name in layout().tensors(0, 0)}
    change(tensors, header)
    text = json.dumps(header, sort_keys=True, separators=(",", ":"))
    write_tensor_file(path, {name: [tensor] for name, tensor in tensors.items()}, {"eagle3": text})

    def match(manifest: dict[str, Any]) -> None:
        manifest["shards"][1].update(bytes=path.stat().st_size, sha256=sha256_file(path))

    if list_it:
        edit_manifest(folder, match)


def test_a_whole_store_has_no_problem(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(folder) == []
    assert capsys.readouterr().err == ""
    assert verify(folder, deep=True) == []
    assert "verify" in capsys.readouterr().err, "deep verification shows its progress"


def test_fault_07_a_truncated_shard_is_refused_by_name_on_opening(folder: Path) -> None:
    path = folder / SHARD
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-40])
    [problem] = refused(folder)
    assert problem.kind == "store.shard_truncated"
    assert problem.where == str(path)
    assert f"{size - 40} bytes" in problem.message and f"{size}" in problem.message
    assert "s2, s3" in problem.message


def test_fault_07_extra_bytes_at_the_end(folder: Path) -> None:
    path = folder / SHARD
    path.write_bytes(path.read_bytes() + b"\0" * 8)
    [problem] = refused(folder)
    assert (problem.kind, problem.where) == ("store.shard_extra_bytes", str(path))


def test_fault_07_a_short_shard_is_found_even_if_the_manifest_was_made_to_match(folder: Path) -> None:
    path = folder / SHARD
    path.write_bytes(path.read_bytes()[:-40])
    edit_manifest(folder, lambda manifest: manifest["shards"][1].update(bytes=path.stat().st_size))
    [problem] = refused(folder)
    assert problem.kind == "safetensors.truncated"
    assert problem.where == str(path) and "s2, s3" in problem.message


def test_fault_07_a_missing_shard(folder: Path) -> None:
    (folder / SHARD).unlink()
    [problem] = refused(folder)
    assert (problem.kind, problem.where) == ("store.shard_missing", str(folder / SHARD))
    assert "s2, s3" in problem.message


def test_fault_07_a_shard_holds_a_sample_that_the_manifest_lacks(folder: Path) -> None:
    rewrite_shard(folder, lambda _, header: header["samples"].append({"id": "stowaway", "tokens": 1}))
    [problem] = refused(folder)
    assert problem.kind == "store.sample_unlisted"
    assert "'stowaway'" in problem.message and problem.where == str(folder / SHARD)


def test_fault_07_the_manifest_lists_a_sample_that_the_shard_lacks(folder: Path) -> None:
    rewrite_shard(folder, lambda _, header: header["samples"].pop())
    [problem] = refused(folder)
    assert problem.kind == "store.sample_missing" and "'s3'" in problem.message


def test_fault_07_the_same_sample_in_two_shards(folder: Path) -> None:
    edit_manifest(folder, lambda manifest: manifest["shards"][1]["samples"][0].update(id="s0"))
    [problem] = refused(folder)
    assert problem.kind == "store.duplicate_sample"
    for said in ("'s0'", "2 times", "shard-00000.safetensors", SHARD):
        assert said in problem.message


def test_fault_07_the_same_sample_twice_in_a_shards_own_list(folder: Path) -> None:
    rewrite_shard(folder, lambda _, header: header["samples"][1].update(id="s2"))
    found = {problem.kind: problem.message for problem in refused(folder)}
    assert found.keys() == {"store.duplicate_sample", "store.sample_missing"}
    assert "'s2' 2 times" in found["store.duplicate_sample"] and "'s3'" in found["store.sample_missing"]


def test_fault_07_two_shards_in_each_others_place(folder: Path) -> None:
    with_s0, with_s2 = folder / "shard-00000.safetensors", folder / SHARD
    shutil.copy(with_s2, with_s0)
    edit_manifest(folder, lambda manifest: manifest["shards"][0].update(bytes=with_s0.stat().st_size))
    kinds = [problem.kind for problem in refused(folder)]
    assert kinds.count("store.sample_unlisted") == 2 and kinds.count("store.sample_missing") == 2
    assert all(problem.where == str(with_s0) for problem in refused(folder))


def test_fault_07_every_problem_of_every_shard_is_listed(folder: Path) -> None:
    (folder / "shard-00000.safetensors").unlink()
    path = folder / SHARD
    path.write_bytes(path.read_bytes()[:-1])
    (folder / "shard-00007.safetensors").write_bytes(b"?")
    assert [problem.kind for problem in refused(folder)] == [
        "store.shard_missing",
        "store.shard_truncated",
        "store.shard_unlisted",
    ]


def test_lengths_that_disagree_are_named_by_sample(folder: Path) -> None:
    def swap(_: object, header: dict[str, Any]) -> None:
        header["samples"][0]["tokens"] += 1
        header["samples"][1]["tokens"] -= 1

    rewrite_shard(folder, swap)
    assert [(problem.kind, problem.message.split("'")[1]) for problem in refused(folder)] == [
        ("store.sample_tokens", "s2"),
        ("store.sample_tokens", "s3"),
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t, _: t.pop("last_hidden_states"), "last_hidden_states is absent, expected BF16 [4, 4]"),
        (lambda t, _: t.pop("target_argmax"), "target_argmax is absent, expected U16 [4]"),
        (lambda t, _: t.update(target_argmax=t["target_argmax"].int()), "target_argmax is I32 [4], expected U16 [4]"),
        (lambda t, _: t.update(target_argmax=t["target_argmax"][:3]), "target_argmax is U16 [3], expected U16 [4]"),
        (lambda t, _: t.update(target_argmax=t["input_ids"]), "target_argmax is U16 [11], expected U16 [4]"),
        (lambda t, _: t.update(more=t["loss_mask"]), "more is U8 [11], expected absent"),
        (lambda t, _: t.update(loss_mask=t["loss_mask"].bool()), "loss_mask is BOOL [11], expected U8 [11]"),
        (lambda t, _: t.update(input_ids=t["input_ids"].long()), "input_ids is I64 [11], expected U16 [11]"),
        (lambda t, _: t.update(aux_hidden_states=t["aux_hidden_states"][:, :8].contiguous()), "BF16 [11, 8]"),
        (lambda t, _: t.update(aux_hidden_states=t["aux_hidden_states"].half()), "F16 [11, 12], expected BF16"),
    ],
)
def test_a_tensor_that_does_not_match_the_contract(folder: Path, change: Callable[..., object], said: str) -> None:
    rewrite_shard(folder, change)
    [problem] = refused(folder)
    assert problem.kind == "store.shard_mismatch"
    assert said in problem.message and "s2, s3" in problem.message


@pytest.mark.parametrize(
    "change",
    [
        lambda _, header: header.pop("samples"),
        lambda _, header: header.update(samples=7),
        lambda _, header: header["samples"].reverse(),
        lambda _, header: header.update(format_version=1),
        lambda _, header: header.update(format_version=2),
    ],
)
def test_a_sample_list_that_is_no_list_or_in_another_order(folder: Path, change: Callable[..., object]) -> None:
    rewrite_shard(folder, change)
    [problem] = refused(folder)
    assert problem.kind == "store.shard_mismatch"


def test_only_the_deep_check_finds_a_flipped_bit(folder: Path) -> None:
    path = folder / SHARD
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    assert verify(folder) == []
    problems = verify(folder, deep=True)
    assert problems[0].kind == "store.checksum" and problems[0].where == str(path)
    assert "s2, s3" in problems[0].message


def test_the_deep_check_covers_the_target_head(folder: Path) -> None:
    path = folder / "target_head.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert [(problem.kind, problem.where) for problem in verify(folder, deep=True)] == [("store.checksum", str(path))]


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        (lambda t, _: t["aux_hidden_states"][7, 3].fill_(torch.nan), "store.non_finite", "'s3' has NaN or"),
        (lambda t, _: t["last_hidden_states"][0, 0].fill_(-torch.inf), "store.non_finite", "in its last_hidden"),
        (lambda t, _: t["input_ids"][10].fill_(20), "store.ids_out_of_range", "'s3' has ids"),
        (
            lambda t, _: t["target_argmax"][3].fill_(20),
            "store.ids_out_of_range",
            "to 20 in its target_argmax, the vocabulary is 0 to 19",
        ),
        (lambda t, _: t["loss_mask"][0].fill_(1), "store.loss_mask", "'s2' has 3 supervised tokens, the manifest"),
        (lambda t, _: t["loss_mask"][5].fill_(2), "store.loss_mask", "'s3' has 2 in its loss mask"),
    ],
)
def test_the_deep_check_names_the_sample_with_wrong_values(
    folder: Path, change: Callable[..., object], kind: str, said: str
) -> None:
    rewrite_shard(folder, change)
    assert verify(folder) == []
    [problem] = verify(folder, deep=True)
    assert problem.kind == kind and said in problem.message and problem.where == str(folder / SHARD)


def test_a_store_without_samples_is_refused(tmp_path: Path) -> None:
    folder = make_store(tmp_path / "store", samples=0)
    assert [problem.kind for problem in refused(folder)] == ["store.empty"]


def test_a_store_of_another_contract_is_refused_with_every_difference(folder: Path) -> None:
    expected = contract(output_indices=(0, 2, 3), vocab_size=21, last_hidden_states="pre_norm")
    with pytest.raises(ProblemsError) as error:
        StoreReader(folder, expected)
    assert [problem.kind for problem in error.value.problems] == [
        "contract.vocab_size",
        "contract.output_indices",
        "contract.last_hidden_states",
    ]
    assert list(error.value.problems) == verify(folder, expected=expected)


def test_a_target_head_of_another_size_is_refused(folder: Path) -> None:
    edit_manifest(folder, lambda manifest: manifest["contract"].update(vocab_size=30))
    assert [problem.kind for problem in refused(folder)] == ["store.target_head"]


def test_a_store_says_how_many_samples_it_lacks(folder: Path) -> None:
    edit_manifest(folder, lambda manifest: manifest["settings"].update(sample_count=7))

    assert [(problem.kind, problem.message) for problem in verify(folder)] == [
        ("store.incomplete", "holds 6 of 7 samples: its extraction has not ended")
    ]
    with pytest.raises(ProblemsError, match="holds 6 of 7 samples"):
        StoreReader(folder)
    assert len(StoreReader(folder, allow_incomplete=True)) == 6
