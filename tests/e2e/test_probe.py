"""`eagle3 wiring probe` on a store of the tiny Kimi-K2.5 at its real depth, through the command line.

The planted faults are in the tensors; contract, manifest and checksums say that all is well, and `data verify` agrees.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from eagle3.cli import app
from eagle3.data.store import StoredSample, StoreReader, StoreWriter, verify
from eagle3.data.target_argmax import make_target_head, with_argmax
from eagle3.target.engines.transformers import TransformersEngine
from eagle3.target.extract import run_extract
from eagle3.target.tiny import make_tiny_kimi
from eagle3.wiring.layers import LayerWiring
from tests.unit.target.cases import extract_config, make_engine, write_conversations

LAYERS = (2, 30, 58)
HIDDEN = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`target` and `store`."""
    folder = tmp_path_factory.mktemp("kimi")
    target = make_tiny_kimi(folder / "target")
    data = write_conversations(folder / "data.jsonl", 6)
    run_extract(extract_config(target, data, folder / "store", output_indices=list(LAYERS)))
    return folder


@pytest.fixture(scope="module")
def engines(folder: Path) -> Callable[[tuple[int, ...]], TransformersEngine]:
    first = make_engine(folder / "target", LAYERS)

    def engine(layers: tuple[int, ...]) -> TransformersEngine:
        return TransformersEngine(first.model, first.spec, LayerWiring(layers, 61), "post_norm")

    return engine


def copy_store(folder: Path, copy: Path, change: Callable[[StoredSample], StoredSample]) -> Path:
    """A store with the same contract whose samples were changed before they were written."""
    reader = StoreReader(folder / "store")
    head = {name: tensor.contiguous() for name, tensor in reader.target_head().items()}
    with StoreWriter(copy, reader.contract, reader.settings, reader.target_config, head) as writer:
        writer.write_shard([change(reader.read(index)) for index in range(len(reader))])
    assert verify(copy, deep=True) == []
    return copy


def probe(store: Path, folder: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["wiring", "probe", str(store), "--target", str(folder / "target"), *options])


@pytest.mark.parametrize("engine", ["auto", "streamed"])
def test_an_extracted_store_is_right(folder: Path, engine: str) -> None:
    result = probe(folder / "store", folder, "--engine", engine)

    assert result.exit_code == 0, result.output
    assert "every slot is right" in result.stdout
    assert "slot 1              layer 30   layer 30" in result.stdout


def permuted(sample: StoredSample) -> torch.Tensor:
    first, second, third = sample.aux_hidden_states.split(HIDDEN, dim=-1)
    return torch.cat([third, second, first], dim=-1)


def shifted(sample: StoredSample) -> torch.Tensor:
    return sample.aux_hidden_states.roll(-1, 0)


def test_permuted_slots_are_named(folder: Path, tmp_path: Path) -> None:
    store = copy_store(folder, tmp_path / "s", lambda item: replace(item, aux_hidden_states=permuted(item)))

    result = probe(store, folder)

    assert result.exit_code == 2
    assert "[probe.permuted]" in result.stdout and result.stdout.startswith("1 problem")
    assert "slot 0 and slot 2 hold the outputs of layers 58, 2, expected the outputs of layers 2, 58" in result.stdout


def test_states_that_are_one_token_late_are_named(folder: Path, tmp_path: Path) -> None:
    store = copy_store(folder, tmp_path / "s", lambda item: replace(item, aux_hidden_states=shifted(item)))

    result = probe(store, folder)

    assert result.exit_code == 2
    assert "[probe.misaligned]" in result.stdout and "of token t+1" in result.stdout


@pytest.mark.parametrize(
    ("layers", "kinds"),
    [
        ((1, 29, 57), {"probe.one_early"}),
        ((3, 31, 59), {"probe.one_late"}),
        ((-1, 2, 30), {"probe.embedding", "probe.other_layer"}),
    ],
)
def test_other_layers_under_the_right_label_are_named(
    folder: Path,
    tmp_path: Path,
    engines: Callable[[tuple[int, ...]], TransformersEngine],
    layers: tuple[int, ...],
    kinds: set[str],
) -> None:
    engine = engines(layers)

    def other(sample: StoredSample) -> StoredSample:
        [capture] = engine.capture([sample.input_ids.tolist()])
        return replace(sample, aux_hidden_states=capture.aux_hidden_states)

    result = probe(copy_store(folder, tmp_path / "s", other), folder, "--json")

    assert result.exit_code == 2
    report = json.loads(result.stdout)
    assert {problem["kind"] for problem in report["problems"]} == kinds
    found = {verdict["slot"]: verdict["found"] for verdict in report["verdicts"]}
    assert [found[f"slot {slot}"] for slot in range(3)] == [layer + 1 for layer in layers]


def test_pre_norm_states_under_a_post_norm_label_are_named(
    folder: Path, tmp_path: Path, engines: Callable[[tuple[int, ...]], TransformersEngine]
) -> None:
    engine = engines((60,))

    def pre_norm(sample: StoredSample) -> StoredSample:
        [capture] = engine.capture([sample.input_ids.tolist()])
        changed = replace(sample, last_hidden_states=capture.aux_hidden_states, target_argmax=None)
        return with_argmax(changed, reader.layout, head)  # or the writer would notice

    reader = StoreReader(folder / "store")
    head = make_target_head(reader.target_head(), reader.target_config, "post_norm")
    result = probe(copy_store(folder, tmp_path / "s", pre_norm), folder)

    assert result.exit_code == 2
    assert "[probe.pre_norm]" in result.stdout and result.stdout.startswith("1 problem")


def test_neither_or_both_of_target_and_server_is_refused(folder: Path) -> None:
    store = str(folder / "store")
    for options in ([], ["--target", "t", "--server", "s"]):
        result = CliRunner().invoke(app, ["wiring", "probe", store, *options])
        assert "needs either --target or --server" in str(result.exception)
