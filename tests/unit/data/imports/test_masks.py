"""Where loss masks come from, and every way in which they can be another dump's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from eagle3.data.imports.masks import open_masks
from eagle3.data.imports.sample import RawSample
from eagle3.errors import ProblemsError
from tests.dumps import DumpSample, random_dump_sample, write_speculators

SAMPLES = [random_dump_sample(tokens=6 + seed, seed=seed) for seed in range(3)]


def raw(sample: DumpSample) -> RawSample:
    return RawSample(sample.ids, None, torch.zeros(0), torch.zeros(0))


def kind(source: str, name: str, sample: DumpSample) -> str:
    with pytest.raises(ProblemsError) as caught:
        open_masks(source).mask("where", name, raw(sample))
    return caught.value.problems[0].kind


def test_masks_of_the_file() -> None:
    sample = SAMPLES[0]

    assert open_masks("file").mask("", "", replace(raw(sample), loss_mask=sample.mask)) is sample.mask
    assert kind("file", "hs_0.safetensors", sample) == "import.no_mask"


def test_all_tokens_supervised() -> None:
    assert open_masks("all").mask("", "", raw(SAMPLES[2])).tolist() == [True] * 8


def test_masks_of_a_prepared_dataset_are_held_against_the_token_ids(tmp_path: Path) -> None:
    write_speculators(tmp_path, SAMPLES)
    source = str(tmp_path / "data")

    for number, sample in enumerate(SAMPLES):
        assert torch.equal(open_masks(source).mask("", f"x9/hs_{number}.safetensors", raw(sample)), sample.mask)
    assert kind(source, "hs_1.safetensors", SAMPLES[0]) == "import.other_ids"
    assert kind(source, "hs_3.safetensors", SAMPLES[0]) == "import.no_mask"
    assert kind(source, "hs_x.safetensors", SAMPLES[0]) == "import.no_mask"


def test_a_row_that_was_cut_when_it_was_dumped_is_cut_too(tmp_path: Path) -> None:
    write_speculators(tmp_path, SAMPLES)

    mask = open_masks(str(tmp_path / "data")).mask("", "hs_2.safetensors", raw(SAMPLES[2].cut(ids=5)))

    assert torch.equal(mask, SAMPLES[2].mask[:5])


def test_rows_of_another_form_are_named(tmp_path: Path) -> None:
    rows = {"input_ids": [[1, 2], None, [1, 2]], "loss_mask": [[0.5, 1.0], [0, 1], None]}
    Dataset.from_dict(rows).save_to_disk(str(tmp_path / "data"))

    for number in range(3):
        sample = replace(SAMPLES[0], ids=torch.tensor([1, 2]))
        assert kind(str(tmp_path / "data"), f"hs_{number}.safetensors", sample) == "import.no_mask"


def test_masks_of_lines(tmp_path: Path) -> None:
    path = tmp_path / "masks.jsonl"
    lines = [{"id": "a/x", "loss_mask": [0, 1]}, {"id": "y.z.pt", "loss_mask": [True, False]}]
    path.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    masks = open_masks(str(path))

    assert masks.mask("", "y.z.pt", raw(SAMPLES[0])).tolist() == [True, False]
    assert masks.mask("", "a/x.pt", raw(SAMPLES[0])).tolist() == [0, 1]
    assert kind(str(path), "x.pt", SAMPLES[0]) == "import.no_mask"


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "{}",
        '{"id": 1, "loss_mask": [0]}',
        '{"id": "a", "loss_mask": 1}',
        '{"id": "a", "loss_mask": ["1"]}',
        '{"id": "a", "loss_mask": [2]}',
        '{"id": "a", "loss_mask": {"0": 1}}',
    ],
)
def test_lines_of_another_form_are_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "masks.jsonl"
    path.write_text(line)

    with pytest.raises(ProblemsError) as caught:
        open_masks(str(path))
    assert caught.value.problems[0].kind == "import.masks"


def test_a_source_that_is_none_is_refused(tmp_path: Path) -> None:
    for source in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(ProblemsError) as caught:
            open_masks(str(source))
        assert caught.value.problems[0].kind == "import.masks"
