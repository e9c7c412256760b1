"""Pins hidden-state store v1 byte for byte: `hidden_state_store_v1/` was written once and is read and rewritten here.

A failure means that the format changed: that needs a new format version, not a new golden.
"""

from pathlib import Path

import pytest
import torch

from eagle3.data.store import StoredSample, StoreReader, StoreWriter, verify
from eagle3.files import sha256_file
from eagle3.wiring.contract import WiringContract

GOLDEN = Path(__file__).parent / "hidden_state_store_v1"
SHA256 = {
    "manifest.json": "sha256:c07ac2fe835f4a4683a08bfa9dd1996ca429bdcb4cdb14c13af4b26e75def8d5",
    "shard-00000.safetensors": "sha256:9919a01936ce7f7b895018d664c6759e96d42b582f7adc7b81e48fe216a3b22a",
    "shard-00001.safetensors": "sha256:767e0a31792363940fc1bf1fe3936ec0d5bddecea76f18dbc5a0156c846e7a38",
    "target_head.safetensors": "sha256:d5f555f6413c4f5acbb33feae4fd711862a619e4eb2e6f584a0c3d101eb6eff8",
}


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
        ),
        StoredSample(
            "zweites-Gespräch",
            torch.tensor([1]),
            torch.tensor([False]),
            aux[1:2].bfloat16(),
            last[1:2].bfloat16(),
        ),
        StoredSample(
            "third",
            torch.tensor([3, 3]),
            torch.tensor([True, True]),
            aux[1:].bfloat16(),
            last[:2].bfloat16(),
        ),
    ]


def write(folder: Path) -> None:
    contract = WiringContract(
        target_name="golden-target",
        target_family="llama",
        target_config_digest="sha256:" + "0" * 64,
        num_hidden_layers=4,
        hidden_size=4,
        vocab_size=5,
        output_indices=(-1, 2),
        last_hidden_states="post_norm",
        dtype="bfloat16",
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


@pytest.mark.parametrize("file", SHA256)
def test_writing_gives_the_golden_bytes(tmp_path: Path, file: str) -> None:
    write(tmp_path / "store")
    assert (tmp_path / "store" / file).read_bytes() == (GOLDEN / file).read_bytes()
    assert sha256_file(tmp_path / "store" / file) == SHA256[file]


def test_a_store_has_no_other_files(tmp_path: Path) -> None:
    write(tmp_path / "store")
    assert {path.name for path in (tmp_path / "store").iterdir()} == {*SHA256, "writer.lock"}


def test_the_golden_store_reads_as_it_was_written() -> None:
    assert verify(GOLDEN, deep=True) == []
    reader = StoreReader(GOLDEN)
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
        assert torch.equal(read.last_hidden_states, sample.last_hidden_states)
