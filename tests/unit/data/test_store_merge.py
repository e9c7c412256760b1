"""Merging and splitting stores: every sample as it was, whole or refused, and on from where a kill left it."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3.cli import main
from eagle3.data import store_build
from eagle3.data.store import StoredSample, StoreReader, verify
from eagle3.data.store_format import load_manifest
from eagle3.data.store_merge import merge
from eagle3.data.store_split import _runs, split_fraction, split_parts
from eagle3.errors import ProblemsError
from tests.children import killed

from .cases import contract, kinds, sample, target_head, writer
from .test_store_verify import flip, shard

SETTINGS = {"conversations": "sha256:one", "max_length": 64, "target": {"dtype": "bfloat16"}}


def store(folder: Path, names: list[str], **changes: Any) -> Path:
    """A store of these samples, two to a shard."""
    with writer(folder, **{"settings": SETTINGS, **changes}) as begun:
        for begin in range(0, len(names), 2):
            begun.write_shard(
                [sample(name, 3 + number, number) for number, name in enumerate(names)][begin : begin + 2]
            )
    return folder


@pytest.fixture
def first(tmp_path: Path) -> Path:
    return store(tmp_path / "first", ["a", "b", "c", "d", "e"])


@pytest.fixture
def second(tmp_path: Path) -> Path:
    return store(tmp_path / "second", ["f", "g", "h"])


def argmax_of(item: StoredSample) -> torch.Tensor:
    assert item.target_argmax is not None
    return item.target_argmax


def samples(folder: Path) -> dict[str, list[Any]]:
    """Every sample of a store that is whole to the last byte, by id."""
    assert verify(folder, deep=True, workers=1) == []
    reader = StoreReader(folder)
    read = [reader.read(index) for index in range(len(reader))]
    return {
        item.id: [
            tensor.tolist()
            for tensor in (
                item.input_ids,
                item.loss_mask,
                item.aux_hidden_states,
                item.last_hidden_states,
                argmax_of(item),
            )
        ]
        for item in read
    }


def content(folder: Path) -> dict[str, Any]:
    """All but the provenance."""
    files = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".lock"
    }
    for name, data in files.items():
        if name.endswith(".json"):
            files[name] = json.dumps({**json.loads(data), "provenance": None, "seal": None}).encode()
    return files


def refusal(action: Callable[[], object]) -> ProblemsError:
    with pytest.raises(ProblemsError) as error:
        action()
    return error.value


@pytest.mark.parametrize("link", [False, True])
def test_a_merged_store_holds_the_samples_of_its_sources_in_order(
    tmp_path: Path, first: Path, second: Path, link: bool
) -> None:
    before = [content(first), content(second)]
    report = merge(tmp_path / "out", [first, second], link=link)
    assert samples(tmp_path / "out") == {**samples(first), **samples(second)}
    assert [item.id for item in StoreReader(tmp_path / "out").samples] == list("abcdefgh")
    assert report.done == {"linked" if link else "copied": 5}
    assert shard(tmp_path / "out", 3).samefile(shard(second, 0)) == link
    assert [content(first), content(second)] == before
    manifest = load_manifest(tmp_path / "out")
    assert manifest.fingerprint == load_manifest(first).fingerprint
    assert {**manifest.settings, "conversations": "sha256:one"} == SETTINGS != manifest.settings
    told = manifest.provenance["merged"]
    assert [(item["store"], item["samples"], item["conversations"]) for item in told] == [
        (str(first), 5, "sha256:one"),
        (str(second), 3, "sha256:one"),
    ]


def test_no_extraction_goes_on_with_a_merged_store_or_a_part(tmp_path: Path, first: Path, second: Path) -> None:
    merge(tmp_path / "out", [first, second])
    split_parts(first, tmp_path / "parts", 2)
    for folder in (tmp_path / "out", tmp_path / "parts" / "part-00000"):
        error = refusal(lambda: writer(folder, settings=SETTINGS))  # noqa: B023
        assert "settings.conversations" in str(error) and kinds(error) == ["store.other_settings"]


def test_every_difference_is_listed_and_nothing_is_made(tmp_path: Path, first: Path) -> None:
    other = store(
        tmp_path / "other",
        ["x"],
        contract=contract(output_indices=(2, 4, 5), last_hidden_states="pre_norm"),
        settings={"conversations": "sha256:two", "max_length": 32, "target": {"dtype": "float16"}},
        target_head=target_head(2.0),
    )
    error = refusal(lambda: merge(tmp_path / "out", [first, other]))
    assert kinds(error) == [
        "contract.output_indices",
        "contract.last_hidden_states",
        "merge.target_head",
        *["merge.settings"] * 3,
    ]
    for said in ("conversations is 'sha256:two' here, 'sha256:one' in", "max_length is 32 here, 64", "target.dtype"):
        assert said in str(error)
    assert (
        kinds(refusal(lambda: merge(tmp_path / "out", [first, other], allow_different_data=True))).count(
            "merge.settings"
        )
        == 2
    )
    assert not (tmp_path / "out").exists()


def test_other_conversations_are_merged_only_if_that_is_allowed(tmp_path: Path, first: Path) -> None:
    other = store(tmp_path / "other", ["x", "y"], settings={**SETTINGS, "conversations": "sha256:two"})
    error = refusal(lambda: merge(tmp_path / "out", [first, other]))
    assert kinds(error) == ["merge.settings"] and "--allow-different-data" in str(error)
    merge(tmp_path / "out", [first, other], allow_different_data=True)
    assert samples(tmp_path / "out") == {**samples(first), **samples(other)}
    settings = {load_manifest(folder).settings["conversations"] for folder in (first, other, tmp_path / "out")}
    assert len(settings) == 3


def test_stores_with_other_rows_of_the_last_hidden_states_are_not_merged(tmp_path: Path, first: Path) -> None:
    other = store(tmp_path / "other", ["x", "y"], last_rows="all")
    error = refusal(lambda: merge(tmp_path / "out", [first, other]))
    assert kinds(error) == ["merge.last_rows"] and "has last hidden states for all tokens" in str(error)


def test_a_sample_that_is_in_two_stores_is_named(tmp_path: Path, first: Path, second: Path) -> None:
    third = store(tmp_path / "third", ["h", "b", "z"])
    error = refusal(lambda: merge(tmp_path / "out", [first, second, third]))
    assert [(problem.kind, problem.where) for problem in error.problems] == [
        ("store.duplicate_sample", str(third)),
        ("store.duplicate_sample", str(third)),
    ]
    assert "'b'" in error.problems[0].message and "'h'" in error.problems[1].message
    assert kinds(refusal(lambda: merge(tmp_path / "out", [first, first]))) == ["store.duplicate_sample"]


def test_one_store_is_not_merged(tmp_path: Path, first: Path) -> None:
    assert kinds(refusal(lambda: merge(tmp_path / "out", [first]))) == ["merge.one_store"]


def test_a_source_that_is_damaged_is_refused_by_name(tmp_path: Path, first: Path, second: Path) -> None:
    flip(shard(second, 1), 8 * shard(second, 1).stat().st_size - 1)
    error = refusal(lambda: merge(tmp_path / "out", [first, second]))
    assert kinds(error) == ["store.checksum"] and error.problems[0].where == str(shard(second, 1))
    assert kinds(refusal(lambda: StoreReader(tmp_path / "out"))).count("store.empty") == 1
    shard(second, 0).unlink()
    assert kinds(refusal(lambda: merge(tmp_path / "out", [first, second]))) == ["store.shard_missing"]


def test_a_split_never_gives_a_damaged_shard_a_new_checksum(tmp_path: Path, first: Path) -> None:
    flip(shard(first, 1), 8 * shard(first, 1).stat().st_size - 600)  # in the states
    error = refusal(lambda: split_parts(first, tmp_path / "out", 5))
    assert "store.checksum" in kinds(error) and error.problems[0].where == str(shard(first, 1))


def test_what_does_not_fit_the_disk_is_refused_before_it_begins(
    tmp_path: Path, first: Path, second: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(path.stat().st_size for folder in (first, second) for path in folder.glob("shard-*"))
    size += (first / "target_head.safetensors").stat().st_size
    usage = namedtuple("usage", ["free"])
    monkeypatch.setattr(store_build.shutil, "disk_usage", lambda path: usage(size - 1))
    error = refusal(lambda: merge(tmp_path / "out", [first, second]))
    assert kinds(error) == ["store.no_room"] and f"{size:,} bytes more" in str(error)
    assert not (tmp_path / "out").exists()
    merge(tmp_path / "linked", [first, second], link=True)
    monkeypatch.setattr(store_build.shutil, "disk_usage", lambda path: usage(size))
    merge(tmp_path / "out", [first, second])
    shard(tmp_path / "out", 1).unlink()
    monkeypatch.setattr(store_build.shutil, "disk_usage", lambda path: usage(shard(first, 1).stat().st_size))
    merge(tmp_path / "out", [first, second])  # only what is lacking needs room
    assert kinds(refusal(lambda: split_parts(first, tmp_path / "parts", 2))) == ["store.no_room"]
    assert not (tmp_path / "parts").exists()


def test_what_a_killed_copy_left_goes_though_links_come_in_its_place(tmp_path: Path, first: Path, second: Path) -> None:
    left = tmp_path / "out" / "shard-00000.safetensors.tmp"
    left.parent.mkdir()
    left.write_bytes(b"half")
    merge(tmp_path / "out", [first, second], link=True)
    assert not left.exists()


def test_where_no_links_can_be_made_shards_are_copied(
    tmp_path: Path, first: Path, second: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(source: Path, place: Path) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(store_build.os, "link", refused)
    assert merge(tmp_path / "out", [first, second], link=True).done == {"copied": 5}
    assert len(samples(tmp_path / "out")) == 8


@pytest.mark.parametrize("parts", [2, 3, 5])
@pytest.mark.parametrize("link", [False, True])
def test_parts_hold_every_sample_once_in_order(tmp_path: Path, first: Path, parts: int, link: bool) -> None:
    before = content(first)
    reports = split_parts(first, tmp_path / "out", parts, link)
    folders = [tmp_path / "out" / f"part-{part:05d}" for part in range(parts)]
    assert [report.folder for report in reports] == folders and content(first) == before
    joined = {name: values for folder in folders for name, values in samples(folder).items()}
    assert joined == samples(first) and list(joined) == list("abcde")
    done = sum((report.done for report in reports), start=type(reports[0].done)())
    if parts <= 3:
        assert done == {"linked" if link else "copied": 3}, "shards stay whole"
    for folder in folders:
        assert load_manifest(folder).fingerprint.sample in samples(folder)  # type: ignore[union-attr]


def test_parts_are_about_as_large() -> None:
    assert _runs([1, 1, 1, 1], 2) == [range(2), range(2, 4)]
    assert _runs([9, 1, 1, 1], 2) == [range(1), range(1, 4)]
    assert _runs([1, 1, 1, 9], 3) == [range(2), range(2, 3), range(3, 4)]
    assert _runs([5] * 7, 7) == [range(place, place + 1) for place in range(7)]


@pytest.mark.parametrize(("fraction", "count"), [(0.4, 2), (0.01, 1), (0.99, 4)])
def test_a_fraction_is_random_by_its_seed_and_leaves_the_rest(
    tmp_path: Path, first: Path, fraction: float, count: int
) -> None:
    split_fraction(first, tmp_path / "out", fraction, seed=3)
    some, rest = (samples(tmp_path / "out" / f"part-0000{part}") for part in (0, 1))
    assert len(some) == count and {**some, **rest} == {**rest, **some} and len({**some, **rest}) == 5
    assert {name: {**some, **rest}[name] for name in "abcde"} == samples(first)
    split_fraction(first, tmp_path / "again", fraction, seed=3)
    assert content(tmp_path / "again") == content(tmp_path / "out")
    chosen = set()
    for seed in range(8):
        split_fraction(first, tmp_path / f"seed{seed}", fraction, seed=seed)
        chosen.add(tuple(samples(tmp_path / f"seed{seed}" / "part-00000")))
    assert len(chosen) > 1


def test_parts_can_be_merged_again(tmp_path: Path, first: Path) -> None:
    folders = [report.folder for report in split_parts(first, tmp_path / "out", 2)]
    assert "--allow-different-data" in str(refusal(lambda: merge(tmp_path / "joined", folders)))
    merge(tmp_path / "joined", folders, allow_different_data=True)
    assert samples(tmp_path / "joined") == samples(first)


@pytest.mark.parametrize("parts", [0, 1, 6])
def test_parts_that_cannot_be(tmp_path: Path, first: Path, parts: int) -> None:
    assert kinds(refusal(lambda: split_parts(first, tmp_path / "out", parts))) == ["split.parts"]
    for fraction in (0.0, 1.0, -1.0, float("nan")):
        assert kinds(refusal(lambda: split_fraction(first, tmp_path / "out", fraction))) == ["split.fraction"]  # noqa: B023


def test_a_folder_that_is_something_else_is_left_alone(tmp_path: Path, first: Path, second: Path) -> None:
    third = store(tmp_path / "third", ["z"])
    before = content(third)
    assert set(kinds(refusal(lambda: merge(third, [first, second])))) == {"store.other_settings"}
    assert content(third) == before
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("mine")
    assert kinds(refusal(lambda: merge(tmp_path / "notes", [first, second]))) == ["store.not_a_store"]
    assert [path.name for path in (tmp_path / "notes").iterdir()] == ["thesis.txt"]


def test_a_source_that_changed_meanwhile_is_not_mixed_in(tmp_path: Path, first: Path, second: Path) -> None:
    merge(tmp_path / "out", [first, second])
    shutil.rmtree(second)
    store(second, ["f", "g", "i"])
    assert kinds(refusal(lambda: merge(tmp_path / "out", [first, second]))) == ["store.other_settings"]


@pytest.mark.parametrize(("function", "link"), [("replace", False), ("fsync", False), ("link", True)])
@pytest.mark.parametrize("what", ["merge", "fraction"])
def test_a_kill_at_any_step_is_gone_on_from(
    tmp_path: Path, first: Path, second: Path, what: str, function: str, link: bool
) -> None:
    def action(out: Path) -> object:
        if what == "merge":
            return merge(out, [first, second], link=link)
        return split_fraction(first, out, 0.4, 1, link)

    action(tmp_path / "whole")
    whole = content(tmp_path / "whole")
    for call in range(1, 60):
        out = tmp_path / f"out{call}"
        if not killed(lambda: action(out), function, call):  # noqa: B023
            assert call > 1
            return
        for manifest in out.rglob("manifest.json"):
            _whole_or_refused(manifest.parent, tmp_path / "whole" / manifest.parent.relative_to(out))
        action(out)
        assert content(out) == whole
    raise AssertionError("it never came to its end")


def _whole_or_refused(folder: Path, whole: Path) -> None:
    try:
        reader = StoreReader(folder)
    except ProblemsError as error:
        assert set(kinds(error)) <= {"store.empty", "store.shard_unlisted"}
    else:
        assert reader.samples == StoreReader(whole).samples


def test_a_shard_that_is_there_is_not_made_again(tmp_path: Path, first: Path, second: Path) -> None:
    merge(tmp_path / "out", [first, second])
    before = shard(tmp_path / "out", 0).stat().st_mtime_ns
    shard(tmp_path / "out", 4).unlink()
    assert merge(tmp_path / "out", [first, second]).done == {"there already": 4, "copied": 1}
    assert shard(tmp_path / "out", 0).stat().st_mtime_ns == before and len(samples(tmp_path / "out")) == 8


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--parts", "2"], 0),
        (["--fraction", "0.4", "--seed", "1", "--link"], 0),
        ([], 2),
        (["--parts", "2", "--fraction", "0.4"], 2),
        (["--parts", "2", "--seed", "1"], 2),
    ],
)
def test_the_command(
    tmp_path: Path, first: Path, capsys: pytest.CaptureFixture[str], options: list[str], code: int
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["data", "split", str(first), str(tmp_path / "out"), *options])
    assert int(stop.value.code or 0) == code
    out, err = capsys.readouterr()
    assert ("part-00001: " in out) == (code == 0) and "Traceback" not in err
    if code == 0:
        parts = [str(tmp_path / "out" / f"part-0000{part}") for part in (0, 1)]
        with pytest.raises(SystemExit) as stop:
            main(["data", "merge", str(tmp_path / "joined"), *parts, "--allow-different-data", "--link"])
        assert not stop.value.code and "5 samples" in capsys.readouterr().out
        assert samples(tmp_path / "joined").keys() == set("abcde")


def test_a_part_that_could_have_no_fingerprint_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with writer(tmp_path / "store") as store:
        store.write_shard([sample("a")])
        store.write_shard([replace(sample("b"), loss_mask=torch.zeros(5, dtype=torch.bool))])
    with pytest.raises(ProblemsError, match=r"part-00001.*\n?.*samples b") as error:
        split_parts(tmp_path / "store", tmp_path / "parts", 2)
    assert [problem.kind for problem in error.value.problems] == ["fingerprint.nothing_supervised"]
    assert not (tmp_path / "parts").exists()
