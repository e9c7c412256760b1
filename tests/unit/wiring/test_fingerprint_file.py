from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle3.errors import ProblemsError
from eagle3.wiring import check_checkpoint
from eagle3.wiring.fingerprint_file import FINGERPRINT_FILE, Fingerprint, load_fingerprint
from tests.unit.wiring.cases import kinds, make_contract, write_checkpoint

CONTRACT = make_contract()


def make_fingerprint(**changes: Any) -> Fingerprint:
    rows = ((0.5, -1.25), (3.0, 0.1))
    values = {
        "sample": "c1",
        "token_ids": (4, 0, 11, 7),
        "positions": (0, 3),
        "channels": (2, 5),
        "states": {-1: rows, 2: rows, 30: rows, 58: rows},
        "last": rows,
    }
    return Fingerprint(**{**values, **changes})


def read(value: object) -> Fingerprint:
    return Fingerprint.from_dict(value, CONTRACT, "here")


def test_what_is_written_is_read_back_and_keeps_its_digest(tmp_path: Path) -> None:
    fingerprint = make_fingerprint()
    fingerprint.save(tmp_path)
    CONTRACT.save(tmp_path)

    assert load_fingerprint(tmp_path) == (fingerprint, CONTRACT)
    assert read(json.loads(json.dumps(fingerprint.to_dict()))).digest == fingerprint.digest
    assert make_fingerprint(sample="c2").digest != fingerprint.digest
    assert list(fingerprint.to_dict()["states"]) == ["-1", "2", "30", "58", "last"]


def test_slots_are_in_the_contracts_order_and_end_with_the_last_states() -> None:
    states = {index: ((float(index),),) for index in (58, 2, -1, 30, 3)}
    fingerprint = make_fingerprint(states=states, last=((99.0,),))

    assert [rows[0][0] for rows in fingerprint.slots(CONTRACT)] == [2.0, 30.0, 58.0, 99.0]


def test_a_manifest_alone_is_enough(tmp_path: Path) -> None:
    manifest = {"contract": CONTRACT.to_dict(), "fingerprint": make_fingerprint().to_dict(), "shards": ["far away"]}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))

    assert load_fingerprint(tmp_path) == (make_fingerprint(), CONTRACT)


@pytest.mark.parametrize("in_manifest", [True, False])
def test_without_a_fingerprint_there_is_one_clear_error(tmp_path: Path, in_manifest: bool) -> None:
    if in_manifest:
        (tmp_path / "manifest.json").write_text(json.dumps({"contract": CONTRACT.to_dict(), "fingerprint": None}))
    else:
        CONTRACT.save(tmp_path)

    with pytest.raises(ProblemsError) as error:
        load_fingerprint(tmp_path)
    assert kinds(error.value.problems) == ["fingerprint.missing"]


def test_what_is_no_folder_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(ProblemsError) as error:
        load_fingerprint(tmp_path / "nowhere")
    assert kinds(error.value.problems) == ["file.missing"]


def edit(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    value = copy.deepcopy(make_fingerprint().to_dict())
    change(value)
    return value


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, "format"),
        ([], "format"),
        (edit(lambda v: v.update(format="x")), "format"),
        (edit(lambda v: v.update(format_version=2)), "format"),
        (edit(lambda v: v.pop("channels")), "format"),
        (edit(lambda v: v.update(more=1)), "format"),
        (edit(lambda v: v.update(sample="")), "value"),
        (edit(lambda v: v.update(sample=3)), "value"),
        (edit(lambda v: v.update(token_ids=[1, 2, 12, 3])), "value"),
        (edit(lambda v: v.update(token_ids=[])), "value"),
        (edit(lambda v: v.update(token_ids="abcd")), "value"),
        (edit(lambda v: v.update(positions=[0, 4])), "value"),
        (edit(lambda v: v.update(positions=[3, 0])), "value"),
        (edit(lambda v: v.update(channels=[2, 8])), "value"),
        (edit(lambda v: v.update(channels=[5, 5])), "value"),
        (edit(lambda v: v.update(channels=[True, 5])), "value"),
        (edit(lambda v: v.update(states=[])), "value"),
        (edit(lambda v: v["states"].pop("30")), "value"),
        (edit(lambda v: v["states"].pop("last")), "value"),
        (edit(lambda v: v["states"].update({"61": v["states"]["2"]})), "value"),
        (edit(lambda v: v["states"].update({"02": v["states"]["2"]})), "value"),
        (edit(lambda v: v["states"]["2"].pop()), "value"),
        (edit(lambda v: v["states"]["2"][0].pop()), "value"),
        (edit(lambda v: v["states"]["2"][0].__setitem__(0, "1")), "value"),
        (edit(lambda v: v["states"]["2"][0].__setitem__(0, float("nan"))), "value"),
        (edit(lambda v: v["states"]["2"][0].__setitem__(0, 1e39)), "value"),
        (edit(lambda v: v["states"]["2"][0].__setitem__(0, True)), "value"),
        (edit(lambda v: v["states"].update({"2": {}})), "value"),
        (edit(lambda v: v.update(token_ids=[-1, 2, 3, 4])), "value"),
        (edit(lambda v: v.update(token_ids={}, positions=[])), "value"),
        (edit(lambda v: v.update(positions=[-1, 3])), "value"),
        (edit(lambda v: v.update(channels=[], positions=[3, 0])), "value"),
        (edit(lambda v: v["states"]["2"][0].__setitem__(0, 0.51)), "digest"),
        (edit(lambda v: v.update(digest="sha256:" + "0" * 64)), "digest"),
    ],
)
def test_what_is_no_fingerprint_is_refused_by_name(value: object, kind: str) -> None:
    with pytest.raises(ProblemsError) as error:
        read(value)
    assert set(kinds(error.value.problems)) == {f"fingerprint.{kind}"}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (edit(lambda v: v.pop("channels")), "channels is missing"),
        (edit(lambda v: v.update(more=1)), "more is not part of it"),
        (edit(lambda v: v["states"].pop("30")), "states has no '30'"),
        (edit(lambda v: v["states"].update({"61": []})), "states has '61', no layer of the target"),
        (edit(lambda v: v.update(positions=[3, 0])), "positions does not ascend"),
        (edit(lambda v: v.update(states=3)), "states is not an object"),
        (edit(lambda v: v.update(format_version=3)), "'format_version': 3"),
        ("text", "no fingerprint that this version reads: 'text'"),
    ],
)
def test_the_message_says_what_is_wrong(value: object, message: str) -> None:
    with pytest.raises(ProblemsError) as error:
        read(value)
    [problem] = error.value.problems
    assert message in problem.message


def test_the_ends_of_every_range_are_allowed() -> None:
    largest = (2.0**128 - 2.0**104, -(2.0**128 - 2.0**104))
    fingerprint = make_fingerprint(
        token_ids=(0, 11), positions=(0, 1), channels=(0, 7), last=(largest, (0.0, 1.0)),
        states={60: (largest, largest), **make_fingerprint().states},
    )  # fmt: skip
    assert read(fingerprint.to_dict()) == fingerprint


def test_a_checkpoint_with_a_damaged_fingerprint_fails_its_check(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "draft")
    make_fingerprint().save(checkpoint)
    assert check_checkpoint(checkpoint) == []

    (checkpoint / FINGERPRINT_FILE).write_text(json.dumps(edit(lambda v: v["states"].pop("58"))))
    assert kinds(check_checkpoint(checkpoint)) == ["fingerprint.value"]

    (checkpoint / FINGERPRINT_FILE).write_text("{")
    assert kinds(check_checkpoint(checkpoint)) == ["file.not_json"]
