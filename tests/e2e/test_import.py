"""`eagle3 data import` through the command line: dumps of the tiny Kimi-K2.5 at its real depth, in each layout.

The dumps are made from Transformers' own hidden states, not by our capture; the imported store must equal what
`eagle3 extract` writes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path

import pytest
import torch

from eagle3.cli import main
from eagle3.data.store import StoreReader, verify
from eagle3.target.engines.transformers import load_model
from eagle3.target.extract import run_extract
from eagle3.target.resolve import find_target
from eagle3.target.tiny import make_tiny_kimi
from tests.dumps import WRITERS, DumpSample, write_modelopt, write_specforge
from tests.unit.target.cases import extract_config, target_config, write_conversations

LAYERS = (2, 30, 58)
PROBED = "every slot is right"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`target`, and its states as `eagle3 extract` stores them in `store`."""
    folder = tmp_path_factory.mktemp("kimi")
    target = make_tiny_kimi(folder / "target")
    data = write_conversations(folder / "data.jsonl", 6)
    run_extract(extract_config(target, data, folder / "store", output_indices=list(LAYERS), batch_tokens=1))
    return folder


@pytest.fixture(scope="module")
def samples(folder: Path) -> list[DumpSample]:
    """The store's tokens with Transformers' own `hidden_states`, by boundary, the last one before the norm; last hidden
    states after it."""
    config = target_config(folder / "target")
    model = load_model(find_target(config), config)
    before: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: before.append(inputs[0][0].clone()))
    reader, result = StoreReader(folder / "store"), []
    for index in range(len(reader)):
        ids, mask = reader.read_tokens(index)
        with torch.inference_mode():
            output = model(input_ids=ids.long()[None], output_hidden_states=True)
        states = [boundary[0].clone() for boundary in output.hidden_states]
        result.append(DumpSample(ids.long(), mask.long(), [*states[:-1], before.pop()], states[-1]))
    return result


def with_layers(
    samples: Sequence[DumpSample], boundaries: Sequence[int] = (3, 31, 59), last: int | None = None
) -> list[DumpSample]:
    """These boundaries as aux states; as the last one boundary `last`, else what is after the norm."""
    return [
        replace(
            sample,
            aux=[sample.aux[boundary] for boundary in boundaries],
            last=sample.last if last is None else sample.aux[last],
        )
        for sample in samples
    ]


@dataclass(frozen=True)
class Result:
    exit_code: int
    stdout: str
    stderr: str


def imported(folder: Path, source: Path, output: Path, *words: str) -> Result:
    settings = {
        "source": source,
        "output": output,
        "target.path": folder / "target",
        "target.dtype": "float32",
        "target.device": "cpu",
        "layers": list(LAYERS),
        "numbering": "output_index",
        "last_hidden_states": "post_norm",
        "free_disk_fraction": 0,
    }
    command = [f"{key}={value}" for key, value in settings.items()]
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as stop:
        main(["data", "import", *command, *words])
    return Result(int(stop.value.code or 0), out.getvalue(), err.getvalue())


def assert_same_states(folder: Path, output: Path) -> None:
    ours, theirs = StoreReader(output), StoreReader(folder / "store")
    assert ours.contract == theirs.contract
    assert all(torch.equal(tensor, theirs.target_head()[name]) for name, tensor in ours.target_head().items())
    assert len(ours) == len(theirs)
    for index in range(len(ours)):
        mine, extracted = ours.read(index), theirs.read(index)
        assert torch.equal(mine.input_ids, extracted.input_ids) and torch.equal(mine.loss_mask, extracted.loss_mask)
        assert torch.equal(mine.aux_hidden_states, extracted.aux_hidden_states)
        assert torch.equal(mine.last_hidden_states, extracted.last_hidden_states)
    assert verify(output, deep=True) == []


@pytest.mark.parametrize("name", WRITERS)
def test_a_dump_becomes_the_store_that_extraction_makes(
    folder: Path, samples: list[DumpSample], tmp_path: Path, name: str
) -> None:
    source = WRITERS[name](tmp_path / "dump", with_layers(samples))
    masks = [f"loss_mask={tmp_path / 'dump' / 'data'}"] if name == "speculators" else []

    result = imported(folder, source, tmp_path / "store", *masks)

    assert result.exit_code == 0, result.stderr
    assert PROBED in result.stdout and "6 samples imported" in result.stdout
    assert_same_states(folder, tmp_path / "store")


@pytest.mark.parametrize(
    "words",
    [
        ["layers=[3,31,59]", "numbering=boundary"],
        ["layers=[2,30,58]", "numbering=sglang", "sglang_version=0.5.12.post1"],
        ["layers=[3,31,59]", "numbering=sglang", "sglang_version=0.5.23"],
        ["layers=[59,3,31]", "numbering=sglang", "sglang_version=0.5.23"],
    ],
)
def test_the_same_layers_by_other_numbers(
    folder: Path, samples: list[DumpSample], tmp_path: Path, words: list[str]
) -> None:
    source = write_specforge(tmp_path / "dump", with_layers(samples))

    result = imported(folder, source, tmp_path / "store", *words, "probe=false")

    assert result.exit_code == 0, result.stderr
    assert StoreReader(tmp_path / "store").contract.output_indices == LAYERS


@pytest.mark.parametrize("words", [[], ["layers=[2,30,58]", "numbering=sglang", "sglang_version=0.5.12.post1"]])
def test_layers_that_are_one_off_are_refused_and_the_true_ones_named(
    folder: Path, samples: list[DumpSample], tmp_path: Path, words: list[str]
) -> None:
    """The numbers 2, 30, 58 of an SGLang that reads them as boundaries."""
    source, output = write_specforge(tmp_path / "dump", with_layers(samples, (2, 30, 58))), tmp_path / "store"

    result = imported(folder, source, output, *words)

    assert result.exit_code == 2
    assert "[probe.one_early]" in result.stderr
    assert "hold the outputs of layers 1, 29, 57, expected the outputs of layers 2, 30, 58" in result.stderr
    assert "pass 'layers=[1, 29, 57]' numbering=output_index" in result.stderr
    assert not output.exists()

    result = imported(folder, source, output, "layers=[1, 29, 57]", "numbering=output_index")
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize(
    ("boundaries", "kind"), [((4, 32, 60), "one_late"), ((0, 3, 31), "embedding"), ((31, 3, 59), "permuted")]
)
def test_other_layers_are_refused(
    folder: Path, samples: list[DumpSample], tmp_path: Path, boundaries: tuple[int, ...], kind: str
) -> None:
    result = imported(folder, write_modelopt(tmp_path / "dump", with_layers(samples, boundaries)), tmp_path / "store")

    assert result.exit_code == 2
    assert f"[probe.{kind}]" in result.stderr
    assert not (tmp_path / "store").exists()


def test_the_norm_of_the_last_hidden_states_is_told(folder: Path, samples: list[DumpSample], tmp_path: Path) -> None:
    pre = write_modelopt(tmp_path / "pre", with_layers(samples, last=61))
    post = write_modelopt(tmp_path / "post", with_layers(samples))

    wrong = imported(folder, pre, tmp_path / "store")
    assert wrong.exit_code == 2 and "[probe.pre_norm]" in wrong.stderr
    assert "pass last_hidden_states=pre_norm" in wrong.stderr
    wrong = imported(folder, post, tmp_path / "store", "last_hidden_states=pre_norm")
    assert wrong.exit_code == 2 and "[probe.post_norm]" in wrong.stderr
    assert not (tmp_path / "store").exists()

    right = imported(folder, pre, tmp_path / "store", "last_hidden_states=pre_norm")
    assert right.exit_code == 0 and PROBED in right.stdout


def test_another_target_is_refused(folder: Path, samples: list[DumpSample], tmp_path: Path) -> None:
    other = make_tiny_kimi(tmp_path / "other", seed=1)
    source = write_specforge(tmp_path / "dump", with_layers(samples))

    result = imported(folder, source, tmp_path / "store", f"target.path={other}")

    assert result.exit_code == 2
    assert "[probe.other_target]" in result.stderr or "[probe.other_weights]" in result.stderr
    assert not (tmp_path / "store").exists()


def test_without_all_weights_it_says_that_nothing_was_probed(
    folder: Path, samples: list[DumpSample], tmp_path: Path
) -> None:
    target = tmp_path / "target"
    shutil.copytree(folder / "target", target)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    source = write_specforge(tmp_path / "dump", with_layers(samples, (2, 30, 58)))
    shutil.copy(folder / "target" / "model.safetensors", target)

    result = imported(folder, source, tmp_path / "store", f"target.path={target}")

    assert result.exit_code == 0, result.stderr
    assert "not probed" in result.stdout
    manifest = json.loads((tmp_path / "store" / "manifest.json").read_text())
    assert manifest["provenance"]["probed"]["right"] is False
