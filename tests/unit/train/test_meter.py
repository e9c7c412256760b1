"""Speed, share of the card's peak, memory and waiting in the log."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from eagle3.data.loader import Ahead
from eagle3.draft.cost import Cost, Work
from eagle3.train import cards
from eagle3.train.cards import PEAK_TFLOPS, peak_of
from eagle3.train.meter import Meter
from eagle3.train.tracking import Record, read_log
from eagle3.train.trainer import Trainer, run_training
from tests.stores import train_config, write_random_store


def trained(run: Path) -> list[Record]:
    return [record for record in read_log(run / "log.jsonl") if record["kind"] == "train"]


def test_mfu_is_the_steps_own_products_over_the_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = write_random_store(tmp_path / "store", [(16, (2, 16)), (12, (1, 12)), (9, (2, 9)), (16, (3, 16))])
    tracking = {"log_every": 1, "peak_tflops": 0.5}
    draft = {"draft_vocab_size": 24, "init": "random", "intermediate_size": 512}
    config = train_config(store, tmp_path / "run", batch_size=2, tracking=tracking, draft=draft)
    counted: list[int] = []
    step = Trainer._step

    def counting(self: Trainer, *args: Any) -> str:
        with FlopCounterMode(display=False) as counter:
            note = step(self, *args)
        counted.append(counter.get_total_flops())
        return note

    monkeypatch.setattr(Trainer, "_step", counting)
    run_training(config)
    records = trained(tmp_path / "run")
    assert len(records) == len(counted) == 2
    for record, operations in zip(records, counted, strict=True):
        assert record["mfu"] * 0.5e12 * record["seconds"] == pytest.approx(operations, rel=0.05)


def test_a_record_has_what_one_wants_to_watch(tmp_path: Path) -> None:
    store = write_random_store(tmp_path / "store", [(8, (2, 8)), (16, (4, 16))] * 3)
    run_training(train_config(store, tmp_path / "run", batch_size=2))
    for record in trained(tmp_path / "run"):
        assert record["mfu"] is None
        assert 0.05 < record["memory_gib"] < 64
        ratio = record["supervised_tokens_per_second"] / record["tokens_per_second"]
        assert any(ratio == pytest.approx(share) for share in (6 / 8, 18 / 24, 12 / 16))
        losses = [0.8**k * loss for k, loss in enumerate(record["step_loss"])]
        assert sum(losses) == pytest.approx(record["loss"])
        assert len(record["in_vocab"]) == 3 and all(0 < share <= 1 for share in record["in_vocab"])
        assert {"lr", "grad_norm", "data_wait", "save_wait", "time"} <= record.keys()
        assert "data_wait_rank" not in record


def test_waiting_for_data_is_said_once_with_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = write_random_store(tmp_path / "store", [(8, (2, 8))] * 8)
    take = Ahead.take

    def slow(self: Ahead) -> Any:
        time.sleep(0.2)
        return take(self)

    monkeypatch.setattr(Ahead, "take", slow)
    run_training(train_config(store, tmp_path / "run"))
    said = re.findall(r"warning: training waits for data .*", capsys.readouterr().err)
    assert len(said) == 1, said
    assert f"copy {store} to a faster or local disk" in said[0] and "docs/watching.md" in said[0]
    assert all(record["data_wait"] > 0.5 for record in trained(tmp_path / "run"))


class Feed:
    faster = "get a faster one"

    def work(self, _: object) -> Work:
        return Work(10, 5, 25)

    def loads(self, _: object) -> list[int]:
        return [1]


class Alone:
    device, num_processes, process_index = torch.device("cpu"), 1, 0


def test_waiting_is_said_again_when_it_is_twice_as_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter(Feed(), Cost(1, 1, 1), Alone(), None)  # type: ignore[arg-type]
    now = [0.0]
    monkeypatch.setattr("eagle3.train.interval.time", type("Clock", (), {"monotonic": lambda: now[0]}))
    said = []
    for waits in (0.5, 12, 15, 20, 5, 30, 40):
        meter.begin()
        with meter.waiting():
            now[0] += waits
        now[0] += 100 - waits
        meter.end([], [1.0])
        said.append(meter.warning(meter.take())[:50])
    assert [bool(words) for words in said] == [False, True, False, False, False, True, False]
    assert "data 12% of" in said[1] and "data 30% of" in said[5]


@pytest.mark.parametrize(("name", "peak"), [("NVIDIA H200", 989.5e12), ("NVIDIA H200 MIG 1g.18gb", None)])
def test_a_cards_peak_is_known_by_its_name(
    tmp_path: Path, name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cards.torch.cuda, "get_device_name", lambda _: name)
    config = train_config(tmp_path, tmp_path / "run", mixed_precision="bf16")
    found, notes = peak_of(config, torch.device("cuda", 0))
    assert found == peak
    assert [name in note and "tracking.peak_tflops" in note for note in notes] == ([] if peak else [True])
    assert peak_of(config, torch.device("cpu")) == (None, [])
    assert peak_of(train_config(tmp_path, tmp_path / "run"), torch.device("cuda", 0)) == (None, []), "float32"
    given = config.model_copy(update={"tracking": config.tracking.model_copy(update={"peak_tflops": 100.0})})
    assert peak_of(given, torch.device("cuda", 0)) == (100e12, [])
    assert all(50 < value < 5000 for value in PEAK_TFLOPS.values())
