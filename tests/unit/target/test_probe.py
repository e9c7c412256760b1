"""The probe of a real store: right for what extraction wrote, and by the same words through both engines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eagle3.errors import ProblemsError
from eagle3.target import engine_choice, probe
from eagle3.target.extract import run_extract
from eagle3.target.probe import probe_dataset
from eagle3.target.tiny import make_tiny_llama
from eagle3.wiring.fingerprint_file import load_fingerprint
from eagle3.wiring.probe_report import ProbeReport
from tests.stores import rewrite_manifest
from tests.unit.target.cases import extract_config, write_conversations

LAYERS = {"llama": [1, 3, 5], "qwen3": [1, 3, 5], "kimi": [2, 30, 58]}


def extract(folder: Path, checkpoint: Path, layers: list[int], **values: Any) -> Path:
    data = write_conversations(folder / "data.jsonl", 10)
    run_extract(extract_config(checkpoint, data, folder / "store", output_indices=layers, **values))
    return folder / "store"


def kinds(report: ProbeReport) -> list[str]:
    return [problem.kind for problem in report.problems]


def run(store: Path, target: Path, **values: Any) -> ProbeReport:
    return probe_dataset(store, str(target), device="cpu", **values)


def names(report: ProbeReport) -> list[tuple[str, str, str]]:
    return [(item.measured.sample, item.measured.slot, item.cause) for item in report.verdicts]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", LAYERS)
def test_both_engines_find_an_extracted_store_right(
    tiny_target: Callable[[str], Path], tmp_path: Path, name: str, dtype: str
) -> None:
    target = tiny_target(name)
    store = extract(tmp_path, target, LAYERS[name], target={"dtype": dtype}, store_dtype="bfloat16")

    reports = [run(store, target, engine=engine) for engine in ("transformers", "streamed")]

    assert reports[0].problems == []
    assert len(reports[0].verdicts) == 5 * 4, "four samples and the fingerprint, three aux slots and the last states"
    assert reports[1].problems == []
    assert names(reports[0]) == names(reports[1])
    assert [report.facts["engine"] for report in reports if report.facts] == ["transformers", "streamed"]
    assert {report.facts["dtype"] for report in reports if report.facts} == {dtype}, "as the extraction recorded"


def relabel(store: Path, layers: list[int]) -> None:
    """Claims other layers, consistently: contract and fingerprint."""
    manifest = json.loads((store / "manifest.json").read_text())
    fingerprint, contract = load_fingerprint(store)
    rows = dict(zip(layers, fingerprint.slots(contract), strict=False))
    manifest["contract"]["output_indices"] = layers
    manifest["fingerprint"] = type(fingerprint)(**{**vars(fingerprint), "states": rows}).to_dict()
    rewrite_manifest(store / "manifest.json", manifest)


@pytest.mark.parametrize("engine", ["transformers", "streamed"])
@pytest.mark.parametrize(("claimed", "expected"), [([2, 4, 6], ["probe.one_early"]), ([0, 2, 4], ["probe.one_late"])])
def test_a_contract_that_names_other_layers_is_found_out(
    tiny_target: Callable[[str], Path], tmp_path: Path, claimed: list[int], expected: list[str], engine: str
) -> None:
    store = extract(tmp_path, tiny_target("llama"), [1, 3, 5])
    relabel(store, claimed)

    report = run(store, tiny_target("llama"), engine=engine)

    assert kinds(report) == expected
    assert "in 5 of 5 samples" in report.problems[0].message
    assert "[" not in report.problems[0].fix and "extract again" in report.problems[0].fix


def test_the_last_states_can_be_left_out_and_with_them_the_last_layers(
    tiny_target: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target("llama")
    store = extract(tmp_path, target, [1, 3])
    depths: list[int] = []
    skeleton = probe.Skeleton
    monkeypatch.setattr(probe, "Skeleton", lambda *args: depths.append(args[2]) or skeleton(*args))

    report = run(store, target, engine="streamed", last=False)
    assert report.problems == [] and depths == [5], "boundaries 2 and 4, and one more to compare with"
    assert {verdict.measured.slot for verdict in report.verdicts} == {"slot 0", "slot 1"}
    assert "not checked" in report.notes[-1]

    assert run(store, target, engine="streamed").problems == [] and depths == [5, 8]
    assert names(run(store, target, engine="transformers", last=False)) == names(report)


@pytest.mark.parametrize("last", ["pre_norm", "post_norm"])
def test_both_kinds_of_last_states_are_right_when_said(
    tiny_target: Callable[[str], Path], tmp_path: Path, last: str
) -> None:
    store = extract(tmp_path, tiny_target("qwen3"), [1, 7], last_hidden_states=last)
    assert run(store, tiny_target("qwen3")).problems == []

    manifest = json.loads((store / "manifest.json").read_text())
    manifest["contract"]["last_hidden_states"] = "pre_norm" if last == "post_norm" else "post_norm"
    rewrite_manifest(store / "manifest.json", manifest)
    assert kinds(run(store, tiny_target("qwen3"))) == [f"probe.{last}"]


def test_a_manifest_without_its_shards_is_enough(tiny_target: Callable[[str], Path], tmp_path: Path) -> None:
    target = tiny_target("llama")
    store = extract(tmp_path, target, [1, 3, 5])
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "manifest.json").write_bytes((store / "manifest.json").read_bytes())

    report = run(alone, target)

    assert report.problems == []
    assert len(report.verdicts) == 4
    assert "only the fingerprint" in report.notes[0]
    assert run(store, target, samples=0).verdicts == report.verdicts

    relabel(alone, [2, 4, 6])
    assert kinds(run(alone, target)) == ["probe.one_early"]


def test_the_fingerprint_holds_the_layers_beside_the_captured_ones(
    tiny_target: Callable[[str], Path], tmp_path: Path
) -> None:
    store = extract(tmp_path, tiny_target("llama"), [1, 3, 7])

    fingerprint, contract = load_fingerprint(store)

    assert sorted(fingerprint.states) == [-1, 0, 1, 2, 3, 4, 6, 7]
    wrong = {index: fingerprint.states[index] for index in (0, 2, 6)}
    assert len({fingerprint.states[index] for index in fingerprint.states}) == len(fingerprint.states)
    assert not set(wrong.values()) & set(fingerprint.slots(contract))


def test_other_weights_and_other_targets_are_named(tmp_path: Path) -> None:
    target = make_tiny_llama(tmp_path / "target")
    store = extract(tmp_path, target, [1, 3, 5])

    report = run(store, make_tiny_llama(tmp_path / "seed", seed=1))
    assert kinds(report) == ["probe.other_target"]
    assert "weight files are not those" in report.notes[0]

    report = run(store, make_tiny_llama(tmp_path / "theta", rope_theta=50000.0))
    assert kinds(report)[0] == "target.config_digest", "the config differs, and so do the states"
    assert len(kinds(report)) > 1

    with pytest.raises(ProblemsError) as error:
        run(store, make_tiny_llama(tmp_path / "deep", num_hidden_layers=9))
    assert [problem.kind for problem in error.value.problems] == ["target.num_hidden_layers"]


def test_a_damaged_store_is_refused_and_a_half_copied_one_too(
    tiny_target: Callable[[str], Path], tmp_path: Path
) -> None:
    store = extract(tmp_path, tiny_target("llama"), [1, 3, 5], shard_max_samples=4)
    (store / "shard-00001.safetensors").unlink()

    with pytest.raises(ProblemsError) as error:
        run(store, tiny_target("llama"))
    assert [problem.kind for problem in error.value.problems] == ["store.shard_missing"]


def test_auto_streams_what_does_not_fit(
    tiny_target: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target("llama")
    store = extract(tmp_path, target, [1, 3, 5])

    def chosen() -> str:
        facts = run(store, target).facts
        assert facts is not None
        return str(facts["engine"])

    assert chosen() == "transformers"
    values = sum(path.stat().st_size for path in target.glob("*.safetensors")) / 4
    memory = SimpleNamespace(available=values * 4 / 0.7 * 0.99)
    monkeypatch.setattr(engine_choice.psutil, "virtual_memory", lambda: memory)
    assert chosen() == "streamed"
    memory = SimpleNamespace(available=values * 4 / 0.7 * 1.01)
    monkeypatch.setattr(engine_choice.psutil, "virtual_memory", lambda: memory)
    assert chosen() == "transformers"
