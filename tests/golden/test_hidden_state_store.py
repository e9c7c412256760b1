"""Pins the hidden-state store byte for byte: the folders here were written once. Those of version 3 are read and
rewritten, those of versions 1 and 2 are read.

A failure means that the format changed: that needs a new format version, not a new golden.
"""

import shutil
from pathlib import Path

import pytest
import torch

from eagle3.data.store import StoredSample, StoreReader, StoreWriter, verify
from eagle3.data.store_merge import merge
from eagle3.data.store_split import split_parts
from eagle3.errors import ProblemsError
from eagle3.files import sha256_file
from eagle3.wiring.contract import WiringContract

FOLDER = Path(__file__).parent
V1 = FOLDER / "hidden_state_store_v1"
V2 = FOLDER / "hidden_state_store_v2"
OLD = {V1.name: 1, V2.name: 2, "hidden_state_store_v2_fp8": 2}
STORES = {"hidden_state_store_v3": "bfloat16", "hidden_state_store_v3_fp8": "float8_e4m3fn"}
DIGESTS = {
    "hidden_state_store_v1": ["c07ac2fe835f4a46", "9919a01936ce7f7b", "767e0a3179236394", "d5f555f6413c4f5a"],
    "hidden_state_store_v2": ["358922e52cfcd2c9", "6bbb43b827df2e5b", "b261de82c52b87d8", "d5f555f6413c4f5a"],
    "hidden_state_store_v2_fp8": ["adbbb61d78f7dbaa", "e8a0b287c5328135", "7bc19ec775ec74e0", "d5f555f6413c4f5a"],
    "hidden_state_store_v3": ["2e87755afefd8427", "fcecb9cb09db2b4d", "faa560b0ae1fcd75", "d5f555f6413c4f5a"],
    "hidden_state_store_v3_fp8": ["e48240ac314e2032", "048ffc8685f608bc", "1067ae1c188a81b2", "d5f555f6413c4f5a"],
}
FILES = ("manifest.json", "shard-00000.safetensors", "shard-00001.safetensors", "target_head.safetensors")


def samples() -> list[StoredSample]:
    aux = torch.tensor([[0.5, -1, 2, 0, 1, -0.25, 3, 8], [1, 1, 1, 1, 0, 0, 0, 0], [-2, 4, -8, 16, 0.125, 0, 0, 1]])
    last = torch.tensor([[1, 2, 3, 4], [-1, -2, -3, -4], [0.5, 0.25, 0.125, 0.0625]])
    return [
        StoredSample(
            "first",
            torch.tensor([4, 0, 2]),
            torch.tensor([False, True, True]),
            aux.bfloat16(),
            last.bfloat16(),
            torch.tensor([0, 4, 0]),
        ),
        StoredSample(
            "zweites-Gespräch",
            torch.tensor([1]),
            torch.tensor([False]),
            aux[1:2].bfloat16(),
            last[1:2].bfloat16(),
            torch.tensor([4]),
        ),
        StoredSample(
            "third",
            torch.tensor([3, 3]),
            torch.tensor([True, True]),
            aux[1:].bfloat16(),
            last[:2].bfloat16(),
            torch.tensor([0, 4]),
        ),
    ]


def write(folder: Path, dtype: str) -> None:
    contract = WiringContract(
        target_name="golden-target",
        target_family="llama",
        target_config_digest="sha256:" + "0" * 64,
        num_hidden_layers=4,
        hidden_size=4,
        vocab_size=5,
        output_indices=(-1, 2),
        last_hidden_states="post_norm",
        dtype=dtype,
        tokenizer_digest="sha256:" + "1" * 64,
        chat_template_digest="sha256:" + "2" * 64,
    )
    head = {
        "embed_tokens.weight": torch.arange(20).reshape(5, 4).bfloat16(),
        "norm.weight": torch.tensor([1, 0.5, 2, 1]).bfloat16(),
        "lm_head.weight": -torch.arange(20).reshape(5, 4).bfloat16(),
    }
    with StoreWriter(
        folder,
        contract,
        settings={"max_length": 3, "keep_ids": [0]},
        target_config={"model_type": "llama", "rms_norm_eps": 1e-6},
        target_head=head,
        provenance={"command": "eagle3 extract"},
    ) as store:
        store.write_shard(samples()[:2])
        store.write_shard(samples()[2:])


@pytest.mark.parametrize("name", STORES)
def test_writing_gives_the_golden_bytes_and_no_other_files(tmp_path: Path, name: str) -> None:
    write(tmp_path / "store", STORES[name])
    for file in FILES:
        assert (tmp_path / "store" / file).read_bytes() == (FOLDER / name / file).read_bytes(), file
    assert {path.name for path in (tmp_path / "store").iterdir()} == {*FILES, "writer.lock"}


def test_the_golden_bytes_are_those_that_were_written_once() -> None:
    assert {name: [sha256_file(FOLDER / name / file)[7:23] for file in FILES] for name in (*OLD, *STORES)} == DIGESTS


@pytest.mark.parametrize("name", [*OLD, *STORES])
def test_the_golden_store_reads_as_it_was_written(name: str) -> None:
    """The states are such that eight bits hold them."""
    assert verify(FOLDER / name, deep=True) == []
    reader = StoreReader(FOLDER / name)
    assert [(info.id, info.tokens, info.supervised) for info in reader.samples] == [
        ("first", 3, 2),
        ("zweites-Gespräch", 1, 0),
        ("third", 2, 2),
    ]
    for index, sample in enumerate(samples()):
        read = reader.read(index)
        assert read.input_ids.tolist() == sample.input_ids.tolist()
        assert torch.equal(read.loss_mask, sample.loss_mask)
        assert torch.equal(read.aux_hidden_states, sample.aux_hidden_states)
        whole = name == V1.name
        assert torch.equal(read.last_hidden_states, sample.last_hidden_states if whole else sample.supervised_last)
        found = None if read.target_argmax is None else read.target_argmax.tolist()
        assert sample.supervised_argmax is not None
        assert found == (None if name in OLD else sample.supervised_argmax.tolist())
    assert (reader.layout.version, reader.layout.last_rows) == (OLD.get(name, 3), "all" if whole else "supervised")


@pytest.mark.parametrize("name", [V1.name, V2.name])
def test_a_store_of_an_older_version_is_not_gone_on_with(tmp_path: Path, name: str) -> None:
    shutil.copytree(FOLDER / name, tmp_path / "store")
    said = f"begun in format version {OLD[name]}, this eagle3 writes version 3"
    with pytest.raises(ProblemsError, match=said) as error:
        write(tmp_path / "store", "bfloat16")
    assert [problem.kind for problem in error.value.problems] == ["store.other_version"]
    assert verify(tmp_path / "store", deep=True) == []


@pytest.mark.parametrize("name", [*OLD, *STORES])
def test_stores_are_merged_and_split_as_they_are(tmp_path: Path, name: str) -> None:
    first, second = (report.folder for report in split_parts(FOLDER / name, tmp_path / "parts", 2))
    whole = merge(tmp_path / "whole", [first, second], allow_different_data=True).folder
    for folder in (first, second, whole):
        assert verify(folder, deep=True) == [] and StoreReader(folder).layout.version == OLD.get(name, 3)


@pytest.mark.parametrize("name", [V1.name, V2.name])
def test_stores_of_several_versions_are_not_merged(tmp_path: Path, name: str) -> None:
    with pytest.raises(ProblemsError, match="of format version 3") as error:
        merge(tmp_path / "mixed", [FOLDER / name, FOLDER / "hidden_state_store_v3"], allow_different_data=True)
    assert "merge.version" in [problem.kind for problem in error.value.problems]
