"""`eagle3 data import` on dumps of a tiny Llama: what is refused, left out, rounded, killed and gone on with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.config import ImportConfig, build_config
from eagle3.data.store import StoreReader, verify
from eagle3.errors import ProblemsError
from eagle3.target import import_dump
from eagle3.target.extract import run_extract
from eagle3.target.import_dump import run_import
from tests.children import killed
from tests.dumps import DumpSample, write_modelopt, write_specforge
from tests.unit.target.cases import extract_config, make_engine, write_conversations

LAYERS = (1, 4)


@pytest.fixture(scope="module")
def llama(tiny_target: Callable[[str], Path]) -> Path:
    return tiny_target("llama")


@pytest.fixture(scope="module")
def samples(llama: Path) -> list[DumpSample]:
    """Seven samples of 5 to 11 tokens, their states from the target."""
    engine = make_engine(llama, LAYERS)
    result = []
    for number in range(7):
        ids = [7 + number, *range(20, 24 + number)]
        [capture] = engine.capture([ids])
        aux = capture.aux_hidden_states.chunk(len(LAYERS), dim=-1)
        mask = torch.arange(len(ids)) >= 3
        result.append(DumpSample(torch.tensor(ids), mask.long(), list(aux), capture.last_hidden_states))
    return result


def config(llama: Path, source: Path, output: Path, **values: Any) -> ImportConfig:
    nested = {
        "source": str(source),
        "target": {"path": str(llama), "dtype": "float32", "device": "cpu"},
        "layers": list(LAYERS),
        "numbering": "output_index",
        "last_hidden_states": "post_norm",
        "output": str(output),
        "shard_max_samples": 2,
        "free_disk_fraction": 0.0,
        **values,
    }
    return build_config(ImportConfig, nested, "test")


def refused(cfg: ImportConfig) -> list[str]:
    """Kinds; nothing may have been written."""
    before = content(Path(cfg.output))
    with pytest.raises(ProblemsError) as caught:
        run_import(cfg)
    assert content(Path(cfg.output)) == before
    return [problem.kind for problem in caught.value.problems]


def content(folder: Path) -> dict[str, Any]:
    """Files by name; of the manifest, all but when and how it was begun."""
    files: dict[str, Any] = {
        path.name: path.read_bytes() for path in folder.glob("*") if path.is_file() and path.suffix != ".lock"
    }
    if "manifest.json" in files:
        files["manifest.json"] = {**json.loads(files["manifest.json"]), "provenance": None, "seal": None}
    return files


def changed(sample: DumpSample, value: float) -> DumpSample:
    last = sample.last.clone()
    last[2, 5] = value
    return replace(sample, last=last)


def unsupervised(sample: DumpSample) -> DumpSample:
    return replace(sample, mask=torch.zeros_like(sample.mask))


def test_what_is_missing_is_named_all_at_once() -> None:
    with pytest.raises(ProblemsError) as caught:
        build_config(ImportConfig, {"source": "dump"}, "import.yaml")

    assert {problem.message for problem in caught.value.problems} == {
        f"{key} is not given" for key in ("target", "layers", "numbering", "last_hidden_states", "output")
    }


@pytest.mark.parametrize("probe", [True, False])
@pytest.mark.parametrize("call", [1, 2, 3, 4, 6])
def test_an_import_that_was_killed_goes_on_to_an_equal_store(
    llama: Path, samples: list[DumpSample], tmp_path: Path, probe: bool, call: int
) -> None:
    source = write_specforge(tmp_path / "dump", samples)
    run_import(config(llama, source, tmp_path / "whole", probe=probe))
    cfg = config(llama, source, tmp_path / "killed", probe=probe)

    assert killed(lambda: run_import(cfg), "replace", call)
    report = run_import(cfg)

    assert report.imported > 0
    assert content(tmp_path / "killed") == content(tmp_path / "whole")
    assert verify(tmp_path / "killed", deep=True) == []
    assert run_import(cfg).imported == 0


def test_imported_samples_get_the_greedy_tokens_of_their_states(
    llama: Path, samples: list[DumpSample], tmp_path: Path
) -> None:
    run_import(config(llama, write_specforge(tmp_path / "dump", samples), tmp_path / "store", last_hidden_rows="all"))
    reader = StoreReader(tmp_path / "store")
    weight = reader.target_head()["lm_head.weight"].double()
    for index, sample in enumerate(samples):
        expected = (sample.last.double() @ weight.T).argmax(-1)
        assert reader.read(index).target_argmax.tolist() == expected.tolist()  # type: ignore[union-attr]


def test_a_shard_that_is_gone_is_imported_again(llama: Path, samples: list[DumpSample], tmp_path: Path) -> None:
    cfg = config(llama, write_specforge(tmp_path / "dump", samples), tmp_path / "store")
    run_import(cfg)
    whole = content(tmp_path / "store")
    for name in ("shard-00000.safetensors", "shard-00002.safetensors"):
        (tmp_path / "store" / name).unlink()

    assert run_import(cfg).imported == 4
    assert content(tmp_path / "store") == whole


def test_the_target_does_not_run_again_for_what_was_probed(
    llama: Path, samples: list[DumpSample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = config(llama, write_specforge(tmp_path / "dump", samples), tmp_path / "store")
    run_import(cfg)
    (tmp_path / "store" / "shard-00001.safetensors").unlink()
    monkeypatch.setattr(import_dump, "probe_dump", lambda plan: pytest.fail("it ran"))

    report = run_import(cfg)

    assert report.imported == 2 and "every slot is right" in report.probed


def test_what_was_imported_without_a_probe_is_probed_when_asked(
    llama: Path, samples: list[DumpSample], tmp_path: Path
) -> None:
    source = write_specforge(tmp_path / "dump", samples)
    run_import(config(llama, source, tmp_path / "right", probe=False))
    assert "not probed" in run_import(config(llama, source, tmp_path / "wrong", probe=False, layers=[2, 5])).probed

    assert "every slot is right" in run_import(config(llama, source, tmp_path / "right")).probed
    assert refused(config(llama, source, tmp_path / "wrong", layers=[2, 5])) == ["probe.one_early"]


def test_a_target_that_does_not_fit_is_streamed_for_the_probe(
    llama: Path, samples: list[DumpSample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle3.target.import_probe.choose_engine", lambda files, target: "streamed")
    source = write_specforge(tmp_path / "dump", samples)

    assert refused(config(llama, source, tmp_path / "store", layers=[2, 5])) == ["probe.one_early"]
    assert "every slot is right" in run_import(config(llama, source, tmp_path / "store")).probed
    states = json.loads((tmp_path / "store" / "manifest.json").read_text())["fingerprint"]["states"]
    assert set(states) == {"-1", "0", "1", "2", "3", "4", "5", "last"}


def test_a_dry_run_writes_nothing_and_finds_the_same(llama: Path, samples: list[DumpSample], tmp_path: Path) -> None:
    source = write_specforge(tmp_path / "dump", samples)

    report = run_import(config(llama, source, tmp_path / "store"), dry=True)

    assert (report.samples, report.imported) == (7, 0) and "nothing was written" in report.render()
    assert not (tmp_path / "store").exists()
    assert refused_dry(config(llama, source, tmp_path / "store", layers=[2, 5])) == ["probe.one_early"]


def refused_dry(cfg: ImportConfig) -> list[str]:
    with pytest.raises(ProblemsError) as caught:
        run_import(cfg, dry=True)
    return [problem.kind for problem in caught.value.problems]


def test_bad_samples_are_all_named_or_left_out_and_counted(
    llama: Path, samples: list[DumpSample], tmp_path: Path
) -> None:
    bad = [samples[0], changed(samples[1], float("nan")), samples[2], samples[3].cut(mask=4), *samples[4:]]
    source = write_specforge(tmp_path / "dump", bad)
    (source / "rows_0-7" / "data_6.ckpt").write_bytes(b"")

    assert refused(config(llama, source, tmp_path / "store")) == [
        "import.non_finite",
        "import.length",
        "import.damaged",
    ]
    report = run_import(config(llama, source, tmp_path / "store", skip_bad=True))

    assert report.left_out == {"import.non_finite": 1, "import.length": 1, "import.damaged": 1}
    assert [sample.id for sample in StoreReader(tmp_path / "store").samples] == [
        f"rows_0-7/data_{number}.ckpt" for number in (0, 2, 4, 5)
    ]
    assert "1 samples left out: import.damaged" in report.render()


def test_nothing_left_is_refused_even_if_bad_samples_may_be_left_out(
    llama: Path, samples: list[DumpSample], tmp_path: Path
) -> None:
    source = write_specforge(tmp_path / "dump", [changed(sample, float("nan")) for sample in samples[:2]])

    assert refused(config(llama, source, tmp_path / "store", skip_bad=True)) == ["import.non_finite"] * 2


def test_samples_without_a_mask_say_where_one_may_come_from(
    llama: Path, samples: list[DumpSample], tmp_path: Path
) -> None:
    source = write_modelopt(tmp_path / "dump", samples[:2])
    for path in source.iterdir():
        values = torch.load(path)
        del values["loss_mask"]
        torch.save(values, path)

    with pytest.raises(ProblemsError, match="loss_mask=all"):
        run_import(config(llama, source, tmp_path / "store"))
    assert refused(config(llama, source, tmp_path / "store")) == ["import.no_mask"] * 2
    report = run_import(config(llama, source, tmp_path / "store", loss_mask="all"))
    assert report.supervised_tokens == report.tokens == 11


def test_a_type_that_rounds_must_be_named(
    llama: Path, samples: list[DumpSample], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_specforge(tmp_path / "dump", samples[:2])

    assert run_import(config(llama, source, tmp_path / "exact")).dtype == "float32"
    assert "rounded" not in capsys.readouterr().err
    report = run_import(config(llama, source, tmp_path / "narrow", store_dtype="bfloat16"))

    assert report.dtype == "bfloat16"
    assert "2 samples of float32 states are rounded to bfloat16" in capsys.readouterr().err
    stored = StoreReader(tmp_path / "narrow").read(1)
    assert torch.equal(stored.supervised_last, samples[1].last.bfloat16()[stored.loss_mask])


def test_states_in_eight_bits_with_scales(
    llama: Path, samples: list[DumpSample], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_specforge(tmp_path / "dump", samples)

    report = run_import(config(llama, source, tmp_path / "store", store_dtype="float8_e4m3fn"))

    assert "7 samples of float32 states are rounded to float8_e4m3fn" in capsys.readouterr().err
    assert report.dtype == "float8_e4m3fn" and "every slot is right" in report.probed
    stored = StoreReader(tmp_path / "store").read(3)
    expected = torch.cat(list(samples[3].aux), dim=-1)
    assert 0 < (stored.aux_hidden_states - expected).norm() / expected.norm() < 0.04
    assert refused(config(llama, source, tmp_path / "other", store_dtype="float8_e4m3fn", layers=[2, 5])) == [
        "probe.one_early"
    ]


@pytest.mark.parametrize("rows", ["supervised", "all"])
def test_last_hidden_states_of_supervised_tokens_or_of_all(
    llama: Path, samples: list[DumpSample], tmp_path: Path, rows: str
) -> None:
    cfg = config(llama, write_specforge(tmp_path / "dump", samples), tmp_path / "store", last_hidden_rows=rows)

    run_import(cfg)

    stored, mask = StoreReader(tmp_path / "store").read(2), samples[2].mask.bool()
    assert torch.equal(stored.last_hidden_states, samples[2].last if rows == "all" else samples[2].last[mask])
    other = {"supervised": "all", "all": "supervised"}[rows]
    assert refused(cfg.model_copy(update={"last_hidden_rows": other})) == ["store.other_settings"]


@pytest.mark.parametrize("count", [1, 3, 6])
def test_samples_without_a_supervised_token_are_left_out_and_counted(
    llama: Path, samples: list[DumpSample], tmp_path: Path, count: int
) -> None:
    """As extraction drops such conversations; whatever their states are, they do not matter."""
    blank = [changed(unsupervised(sample), float("nan")) for sample in samples[:count]]
    cfg = config(llama, write_specforge(tmp_path / "dump", [*blank, *samples[count:]]), tmp_path / "store")

    report = run_import(cfg)

    assert [sample.id for sample in StoreReader(tmp_path / "store").samples] == [
        f"rows_0-7/data_{number}.ckpt" for number in range(count, 7)
    ]
    assert f"{count} samples left out: no supervised token" in report.render()
    assert verify(tmp_path / "store", deep=True) == []
    assert run_import(cfg).imported == 0


@pytest.mark.parametrize("skip_bad", [False, True])
def test_a_dump_without_any_supervised_token_is_one_error(
    llama: Path, samples: list[DumpSample], tmp_path: Path, skip_bad: bool
) -> None:
    source = write_specforge(tmp_path / "dump", [unsupervised(sample) for sample in samples])

    with pytest.raises(ProblemsError, match="7 of its 7 samples can be imported, and none of these has a supervised"):
        run_import(config(llama, source, tmp_path / "store", skip_bad=skip_bad))
    assert refused(config(llama, source, tmp_path / "store", skip_bad=skip_bad)) == ["import.nothing_supervised"]
    assert run_import(config(llama, source, tmp_path / "store", loss_mask="all")).samples == 7


@pytest.mark.parametrize("skip_bad", [False, True])
def test_bad_samples_are_named_beside_a_rest_without_a_supervised_token(
    llama: Path, samples: list[DumpSample], tmp_path: Path, skip_bad: bool
) -> None:
    source = write_specforge(tmp_path / "dump", [samples[0].cut(mask=4), *map(unsupervised, samples[1:])])

    kinds = refused(config(llama, source, tmp_path / "store", skip_bad=skip_bad))

    assert kinds == ["import.length", "import.nothing_supervised"]


def test_states_of_several_types_are_refused_unless_one_is_named(
    llama: Path, samples: list[DumpSample], tmp_path: Path
) -> None:
    half = replace(samples[1], aux=[layer.half() for layer in samples[1].aux], last=samples[1].last.half())
    source = write_specforge(tmp_path / "dump", [samples[0], half])

    assert refused(config(llama, source, tmp_path / "store")) == ["import.several_dtypes"]
    assert run_import(config(llama, source, tmp_path / "store", store_dtype="float16")).samples == 2


@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        ({"layers": [4, 1]}, ["layers.unsorted"]),
        ({"layers": [1, 8]}, ["layers.out_of_range"]),
        ({"layers": [1, 4, 6]}, ["import.width"] * 2),
        ({"layers": []}, ["layers.count"]),
        ({"layers": [0, 4], "numbering": "boundary"}, ["probe.other_layer", "probe.one_late"]),
        ({"numbering": "sglang"}, ["layers.numbering"]),
        ({"numbering": "sglang", "sglang_version": "0.5.23", "layers": [1, 7]}, ["wiring.never_captured"]),
        ({"numbering": "sglang", "sglang_version": "99.0"}, ["engine.version_unknown"]),
        ({"layers": [1, 9], "loss_mask": "/nowhere"}, ["layers.out_of_range", "import.masks"]),
        ({"free_disk_fraction": 0.999999}, ["extract.disk"]),
        ({"format": "speculators"}, ["import.empty"]),
    ],
)
def test_what_does_not_fit_is_refused(
    llama: Path, samples: list[DumpSample], tmp_path: Path, values: dict[str, Any], kinds: Sequence[str]
) -> None:
    source = write_specforge(tmp_path / "dump", samples[:2])

    assert refused(config(llama, source, tmp_path / "store", **values)) == kinds


def test_the_output_is_held_against_source_and_what_is_there(
    llama: Path, samples: list[DumpSample], tmp_path: Path
) -> None:
    source = write_specforge(tmp_path / "dump", samples[:2])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")

    assert refused(config(llama, source, source / "store")) == ["import.same_place"]
    assert refused(config(llama, source, tmp_path)) == ["import.same_place", "store.not_a_store"]
    assert refused(config(llama, source, tmp_path / "mine")) == ["store.not_a_store"]
    assert refused(config(llama, tmp_path / "nowhere", tmp_path / "mine")) == ["import.source", "store.not_a_store"]


def test_another_runs_store_is_refused_before_the_dump_is_read(
    llama: Path, samples: list[DumpSample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_conversations(tmp_path / "data.jsonl", 3)
    run_extract(extract_config(llama, data, tmp_path / "store", output_indices=list(LAYERS)))
    source = write_specforge(tmp_path / "dump", samples[:2])
    monkeypatch.setattr("eagle3.target.import_plan.scan_dump", lambda *args: pytest.fail("it was read"))

    assert refused(config(llama, source, tmp_path / "store")) == ["store.other_settings"]
    assert refused(config(llama, source, tmp_path / "store", layers=[2, 4])) == [
        "contract.output_indices",
        "store.other_settings",
    ]


def test_another_dump_into_an_imported_store_is_refused(llama: Path, samples: list[DumpSample], tmp_path: Path) -> None:
    run_import(config(llama, write_specforge(tmp_path / "dump", samples[:2]), tmp_path / "store"))
    other = write_specforge(tmp_path / "other", samples[2:4])

    assert refused(config(llama, other, tmp_path / "store")) == ["store.other_settings"]


@pytest.mark.parametrize("kind", ["import.damaged", "import.changed"])
def test_a_file_that_changed_after_it_was_checked_stops_the_import(
    llama: Path, samples: list[DumpSample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    source = write_specforge(tmp_path / "dump", samples)
    cfg = config(llama, source, tmp_path / "store", probe=False)
    real, path = import_dump.check_room, source / "rows_0-7" / "data_3.ckpt"

    def then_changed(plan: Any) -> None:
        real(plan)
        path.write_bytes(b"PK\x03\x04" if kind == "import.damaged" else path.with_name("data_4.ckpt").read_bytes())

    monkeypatch.setattr(import_dump, "check_room", then_changed)

    with pytest.raises(ProblemsError) as caught:
        run_import(cfg)
    assert [problem.kind for problem in caught.value.problems] == [kind]
    with pytest.raises(ProblemsError) as caught:
        StoreReader(tmp_path / "store")
    assert {problem.kind for problem in caught.value.problems} == {"store.incomplete"}


def test_a_target_without_its_head_is_refused_before_the_dump_is_read(
    llama: Path, samples: list[DumpSample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(llama, tmp_path / "target", ignore=shutil.ignore_patterns("*.safetensors"))
    source = write_specforge(tmp_path / "dump", samples[:2])
    monkeypatch.setattr("eagle3.target.import_plan.scan_dump", lambda *args: pytest.fail("it was read"))

    kinds = refused(config(tmp_path / "target", source, tmp_path / "store"))

    assert set(kinds) == {"target.missing_weights"}
