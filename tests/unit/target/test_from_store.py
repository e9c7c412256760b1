"""`eagle3 extract --from`: another store's samples once more, with other layers, types or weights."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.config import build_config
from eagle3.config.schema import ExtractConfig
from eagle3.data.store import StoreReader, verify
from eagle3.data.store_merge import merge
from eagle3.data.store_split import split_fraction
from eagle3.errors import ProblemsError
from eagle3.target import extract
from eagle3.target.extract import run_extract
from eagle3.target.tiny import make_tiny_llama
from tests.children import in_a_child, killed
from tests.unit.target.cases import extract_config, relative, write_conversations


@pytest.fixture
def target(tiny_target: Callable[[str], Path]) -> Path:
    return tiny_target("llama")


@pytest.fixture
def old(target: Path, tmp_path: Path) -> Path:
    data = write_conversations(tmp_path / "data.jsonl", 12)
    run_extract(extract_config(target, data, tmp_path / "old", output_indices=[1, 3, 5]))
    return tmp_path / "old"


def again(checkpoint: Path, source: Path, output: Path, **values: Any) -> ExtractConfig:
    nested = {
        "target": {"path": str(checkpoint), "dtype": "float32", "device": "cpu"},
        "from_store": str(source),
        "output": str(output),
        "store_dtype": "float32",
        "free_disk_fraction": 0.0,
        **values,
    }
    return build_config(ExtractConfig, nested, "test")


def files(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def never(*_: object) -> Any:
    raise AssertionError("the target ran")


@pytest.mark.parametrize("engine", ["transformers", "streamed"])
def test_where_prompts_come_from_goes_along_from_the_conversations_to_copies(
    target: Path, tmp_path: Path, engine: str
) -> None:
    data = write_conversations(tmp_path / "data.jsonl", 6)
    records = [json.loads(line) for line in data.read_text().splitlines()]
    for number, record in enumerate(records[:4]):
        record["source"] = ("chat", "code")[number % 2]
    data.write_text("\n".join(json.dumps(record) for record in records))
    run_extract(extract_config(target, data, tmp_path / "first", output_indices=[1, 3, 5], engine=engine))
    expected = {"c0": "chat", "c1": "code", "c2": "chat", "c3": "code", "c4": None, "c5": None}
    run_extract(again(target, tmp_path / "first", tmp_path / "copy", output_indices=[1, 5]))
    run_extract(again(target, tmp_path / "first", tmp_path / "new", output_indices=[0, 3], engine=engine))
    split_fraction(tmp_path / "copy", tmp_path / "parts", 0.5)
    merge(tmp_path / "merged", [tmp_path / "parts/part-00000", tmp_path / "parts/part-00001"], True)
    for name in ("first", "copy", "new", "merged"):
        reader = StoreReader(tmp_path / name)
        assert {sample.id: sample.source for sample in reader.samples} == expected
        assert all(reader.read(place).source == sample.source for place, sample in enumerate(reader.samples))
        assert verify(tmp_path / name, deep=True) == []


@pytest.mark.parametrize("engine", ["transformers", "streamed"])
def test_other_layers_are_those_of_an_extraction_from_the_conversations(
    target: Path, old: Path, tmp_path: Path, engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(old)
    direct = extract_config(target, tmp_path / "data.jsonl", tmp_path / "direct", output_indices=[2, 5], engine=engine)
    run_extract(direct)

    report = run_extract(again(target, old, tmp_path / "new", output_indices=[2, 5], engine=engine))

    assert report.extracted == 12 and files(old) == before
    found, expected = StoreReader(tmp_path / "new"), StoreReader(tmp_path / "direct")
    assert found.contract == expected.contract and found.samples == expected.samples
    for index in range(12):
        one, other = found.read(index), expected.read(index)
        assert torch.equal(one.input_ids, other.input_ids) and torch.equal(one.loss_mask, other.loss_mask)
        assert relative(one.aux_hidden_states, other.aux_hidden_states) < 1e-6
        assert relative(one.last_hidden_states, other.last_hidden_states) < 1e-6
    assert "layers" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_that_are_there_are_copied(
    target: Path, old: Path, tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extract, "load_model", never)
    before = files(old)

    report = run_extract(again(target, old, tmp_path / "new", output_indices=[1, 5], store_dtype=dtype))

    assert report.extracted == 12 and files(old) == before
    found, source = StoreReader(tmp_path / "new"), StoreReader(old)
    for index in range(12):
        one, other = found.read(index), source.read(index)
        first, _, third = other.aux_hidden_states.chunk(3, dim=-1)
        assert torch.equal(one.aux_hidden_states, torch.cat([first, third], -1).to(getattr(torch, dtype)))
        assert torch.equal(one.last_hidden_states, other.last_hidden_states.to(getattr(torch, dtype)))
    assert run_extract(again(target, old, tmp_path / "new", output_indices=[1, 5], store_dtype=dtype)).extracted == 0


@pytest.mark.parametrize(
    "values",
    [
        {"output_indices": [1, 4]},
        {"output_indices": [1], "last_hidden_states": "pre_norm"},
        {"output_indices": [1], "target": {"dtype": "bfloat16"}},
    ],
)
def test_what_is_not_there_runs_the_target(
    target: Path, old: Path, tmp_path: Path, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    values["target"] = {"path": str(target), "dtype": "float32", "device": "cpu", **values.get("target", {})}
    monkeypatch.setattr(extract, "load_model", never)

    with pytest.raises(AssertionError, match="the target ran"):
        run_extract(again(target, old, tmp_path / "new", **values))


def test_a_new_version_of_the_target_runs(old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = make_tiny_llama(tmp_path / "other", seed=1)
    monkeypatch.setattr(extract, "load_model", never)

    with pytest.raises(AssertionError, match="the target ran"):
        run_extract(again(other, old, tmp_path / "new", output_indices=[1]))


def test_a_narrow_type_is_not_widened(target: Path, old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_extract(again(target, old, tmp_path / "narrow", output_indices=[1, 5], store_dtype="bfloat16"))
    monkeypatch.setattr(extract, "load_model", never)

    with pytest.raises(AssertionError, match="the target ran"):
        run_extract(again(target, tmp_path / "narrow", tmp_path / "wide", output_indices=[1], store_dtype="float32"))


@pytest.mark.parametrize(("there", "wanted"), [("all", "supervised"), ("supervised", "all")])
def test_last_hidden_states_that_are_not_there_run_the_target(
    target: Path, old: Path, tmp_path: Path, there: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_extract(again(target, old, tmp_path / "first", output_indices=[1, 5], last_hidden_rows=there))
    monkeypatch.setattr(extract, "load_model", never)
    cfg = again(target, tmp_path / "first", tmp_path / "second", output_indices=[5], last_hidden_rows=wanted)
    if there == "all":
        assert run_extract(cfg).extracted == len(StoreReader(tmp_path / "second"))
        return
    with pytest.raises(AssertionError, match="the target ran"):
        run_extract(cfg)


def content(folder: Path) -> dict[str, Any]:
    """Files by name, without locks; of the manifest, all but when and how it was begun."""
    found: dict[str, Any] = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".lock"}
    found["manifest.json"] = {**json.loads(found["manifest.json"]), "provenance": None, "seal": None}
    return found


@pytest.mark.parametrize("engine", ["transformers", "streamed"])
@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_several_processes_copy_the_store_that_one_copies(
    target: Path, old: Path, tmp_path: Path, engine: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"output_indices": [1, 5], "engine": engine, "store_dtype": dtype, "shard_max_samples": 2}
    source = old
    if dtype == "float8_e4m3fn":
        source = tmp_path / "bfloat16"
        run_extract(again(target, old, source, output_indices=[1, 5], store_dtype="bfloat16"))
    run_extract(again(target, source, tmp_path / "one", **values))

    def share(index: int) -> int:
        monkeypatch.setenv("WORLD_SIZE", "3")
        monkeypatch.setenv("RANK", str(index))
        return in_a_child(lambda: run_extract(again(target, source, tmp_path / "three", **values)))

    assert [os.waitpid(child, 0)[1] for child in map(share, range(3))] == [0, 0, 0]

    assert len(list((tmp_path / "one").glob("shard-*"))) == 6
    assert content(tmp_path / "three") == content(tmp_path / "one")
    assert verify(tmp_path / "three", deep=True) == []


def test_a_process_says_what_the_others_have_yet_to_copy_and_goes_on_after_a_kill(
    target: Path, old: Path, tmp_path: Path
) -> None:
    def share(index: int, output: str = "two") -> ExtractConfig:
        process = {"process_index": index, "process_count": 2}
        return again(target, old, tmp_path / output, output_indices=[1, 5], shard_max_samples=2, stream=process)

    run_extract(again(target, old, tmp_path / "one", output_indices=[1, 5], shard_max_samples=2))

    report = run_extract(share(0))
    assert report.extracted == 6 and list(report.lacking) == ["process 1: 3 shards"]
    with pytest.raises(ProblemsError) as error:
        StoreReader(tmp_path / "two")
    assert [problem.kind for problem in error.value.problems] == ["store.incomplete"]
    assert killed(lambda: run_extract(share(1)), "replace", 4)
    report = run_extract(share(1))

    assert 0 < report.extracted < 6 and not report.lacking
    assert content(tmp_path / "two") == content(tmp_path / "one")
    assert run_extract(share(1)).extracted == 0


def test_tasks_of_a_slurm_array_are_extractions_of_their_own(
    target: Path, old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in {"ID": 1, "COUNT": 4, "MIN": 0, "STEP": 1}.items():
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{key}", str(value))

    assert run_extract(again(target, old, tmp_path / "new", output_indices=[1, 5])).extracted == 12


def test_several_processes_that_would_run_the_target_are_refused(
    target: Path, old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")

    with pytest.raises(ProblemsError, match="process 1 of 2") as error:
        run_extract(again(target, old, tmp_path / "new", output_indices=[1, 4], engine="transformers"))
    assert [problem.kind for problem in error.value.problems] == ["extract.one_process"]
    assert not (tmp_path / "new").exists()


def test_a_store_is_never_changed_in_place(target: Path, old: Path) -> None:
    before = files(old)
    with pytest.raises(ProblemsError) as error:
        run_extract(
            again(target, old / "." / "..", old, output_indices=[1]).model_copy(update={"from_store": str(old)})
        )

    assert [problem.kind for problem in error.value.problems] == ["extract.same_store"]
    assert files(old) == before


def test_another_tokenizers_ids_are_refused(tiny_target: Callable[[str], Path], old: Path, tmp_path: Path) -> None:
    with pytest.raises(ProblemsError) as error:
        run_extract(again(tiny_target("kimi"), old, tmp_path / "new", output_indices=[1]))

    assert [problem.kind for problem in error.value.problems] == ["extract.other_tokenizer"]
    assert not (tmp_path / "new").exists()


def test_a_config_without_a_source_is_refused(target: Path, tmp_path: Path) -> None:
    with pytest.raises(ProblemsError, match="neither data nor from_store"):
        again(target, tmp_path, tmp_path / "new", output_indices=[1], from_store=None)
