import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate import PartialState

from eagle3.config import TrackingSection
from eagle3.errors import ProblemsError
from eagle3.train.curves import check_tracking
from eagle3.train.tracking import Tracker, read_log

OFF = TrackingSection()


def test_resume_drops_what_came_after_the_checkpoint_and_a_torn_line(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, OFF, "id", None)
    for step in (1, 2, 3):
        tracker.log("train", step, loss=1.0 / step)
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"kind": "tr')
    tracker = Tracker(tmp_path, OFF, "id", 2)
    tracker.log("train", 3, loss=0.5)
    assert tracker.records == read_log(tmp_path / "log.jsonl")
    assert [(record["step"], record["loss"]) for record in tracker.records] == [(1, 1.0), (2, 0.5), (3, 0.5)]


def test_a_new_run_starts_an_empty_log(tmp_path: Path) -> None:
    Tracker(tmp_path, OFF, "id", None).log("train", 1, loss=1.0)
    assert Tracker(tmp_path, OFF, "id", None).records == []
    assert (tmp_path / "log.jsonl").read_text() == ""


def test_a_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"kind": "skip", "step": 1}\nnonsense\n')
    with pytest.raises(ProblemsError, match=r"line 2"):
        read_log(tmp_path / "log.jsonl")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("log.jsonl", '{"kind": "train", "step": 1, "loss": NaN}'),
        ("log.jsonl", '{"kind": "train", "step": 1, "loss": "0.5"}'),
        ("log.jsonl", '{"kind": ["train"], "step": 1}'),
        ("samples.jsonl", '{"kind": "samples", "step": 1}'),
        ("samples.jsonl", '{"kind": "samples", "step": 1, "samples": [1]}'),
    ],
)
def test_a_record_that_cannot_be_read_back_is_named(tmp_path: Path, name: str, line: str) -> None:
    (tmp_path / name).write_text(f'{{"kind": "skip", "step": 1}}\n{line}\n')
    with pytest.raises(ProblemsError, match=rf"log\.not_json\] .*{name}, line 2"):
        Tracker(tmp_path, OFF, "id", 2)


def test_asking_for_wandb_without_it_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert check_tracking(OFF) == []
    assert [problem.kind for problem in check_tracking(TrackingSection(wandb="offline"))] == ["tracking.wandb_missing"]


def test_wandb_offline_writes_into_the_run_folder(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    PartialState(cpu=True)
    tracker = Tracker(tmp_path, TrackingSection(wandb="offline"), "abcdef", None)
    tracker.log("train", 1, loss=1.0, step_accuracy=[0.5, None])
    tracker.close()
    assert len(list((tmp_path / "wandb").glob("offline-run-*/run-abcdef.wandb"))) == 1


@pytest.mark.parametrize("line", [b"[1]", b"{}", b"null", b"\xff", b'{"kind": "eval", "step": "1"}'])
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "log.jsonl").write_bytes(line + b"\n")
    with pytest.raises(ProblemsError, match=r"line 1"):
        read_log(tmp_path / "log.jsonl")


def test_what_wandb_refuses_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise RuntimeError("No API key configured")

    PartialState(cpu=True)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Error=RuntimeError, init=init))
    with pytest.raises(ProblemsError, match=r"tracking\.wandb_refused.*No API key"):
        Tracker(tmp_path, TrackingSection(wandb="online"), "id", None)
