"""The commands on a store in a local S3 give what they give on the same store on disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from eagle3.cli import main
from eagle3.config import CacheSection, ServeConfig, TrainConfig, dump_config
from eagle3.data.open_reader import open_cache
from eagle3.serve.export import export_run
from eagle3.target.extract import run_extract
from eagle3.target.tiny import make_tiny_llama
from eagle3.train.checkpoint import list_checkpoints
from eagle3.train.tracking import TIMED, read_log
from eagle3.train.trainer import Trainer, run_training
from tests.remote import local_s3, upload
from tests.stores import train_config, write_random_store
from tests.unit.serve.cases import make_run
from tests.unit.target.cases import extract_config, write_conversations

GOLDEN = Path(__file__).parents[1] / "golden" / "hidden_state_store_v1"
MASKS = [[0, 0] + [1] * 30, [0, 1, 1, 1, 1, 0, 0, 1, 1, 1]]


@pytest.fixture(autouse=True)
def _s3() -> Iterator[None]:
    with local_s3():
        yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[dict[str, object]]:
    values: dict[str, object] = {"folder": str(tmp_path / "cache"), "max_bytes": 1 << 20, "threads": 4}
    yield values
    close_cache(values)


def close_cache(values: dict[str, object]) -> None:
    open_cache(CacheSection(**values), "").close()  # type: ignore[arg-type]


def eagle3(*args: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(args)
    return int(caught.value.code or 0)


def log_of(run: Path) -> list[dict[str, object]]:
    return [{key: value for key, value in item.items() if key not in TIMED} for item in read_log(run / "log.jsonl")]


def assert_same_run(one: Path, other: Path) -> None:
    for name in ("draft.safetensors", "optimizer.safetensors"):
        mine, theirs = (load_file(list_checkpoints(path)[-1] / name) for path in (one, other))
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert log_of(one) == log_of(other) and len(log_of(one)) > 5


class Stopped(Exception):
    pass


def test_training_equals_that_on_disk_bit_for_bit_also_when_it_is_stopped(
    tmp_path: Path, cache: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = write_random_store(tmp_path / "store", [(20, (2, 8)), (9, (8, 9)), (12, (3, 12)), (7, (1, 7))] * 4)
    heldout = write_random_store(tmp_path / "heldout", count=5, seed=3)
    urls = [upload(folder, f"s3://bucket/{tmp_path.name}/{folder.name}") for folder in (store, heldout)]
    settings: dict[str, object] = {"batch_size": 2, "epochs": 3, "save_every": 2, "eval_every": 3}
    run_training(train_config(store, tmp_path / "local", eval_dataset=str(heldout), **settings))

    def config(output: str, **values: object) -> TrainConfig:
        values = {**settings, "eval_dataset": urls[1], "cache": cache, **values}
        return train_config(urls[0], tmp_path / output, **values)

    run_training(config("remote"))
    assert_same_run(tmp_path / "remote", tmp_path / "local")

    original = Trainer._evaluate_and_save

    def stopping(self: Trainer) -> None:
        if self.state.step == 7:
            raise Stopped
        original(self)

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(Trainer, "_evaluate_and_save", stopping)
        run_training(config("stopped"))
    close_cache(cache)
    moved = {**cache, "folder": f"{cache['folder']}-2", "max_bytes": 200 << 10}
    run_training(config("stopped", cache=moved))
    close_cache(moved)
    assert_same_run(tmp_path / "stopped", tmp_path / "local")


def test_evaluation_wiring_check_and_export_take_a_url(
    tmp_path: Path, cache: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path, masks=MASKS)
    url = upload(run.dataset, f"s3://bucket/{tmp_path.name}")
    through = ("--cache", str(cache["folder"]), "--cache-max-bytes", str(cache["max_bytes"]))
    capsys.readouterr()
    assert eagle3("evaluate", "--checkpoint", str(run.folder), "--dataset", str(run.dataset)) == 0
    local = capsys.readouterr().out
    assert eagle3("evaluate", "--checkpoint", str(run.folder), "--dataset", url, *through) == 0
    assert capsys.readouterr().out == local.replace(str(run.dataset), url)

    exported = tmp_path / "exported"
    export_run(ServeConfig(run=str(run.folder), output=str(exported), dtype="float32"))
    assert eagle3("wiring", "check", str(exported), "--dataset", url, *through) == 0
    other = write_random_store(tmp_path / "other")
    capsys.readouterr()
    wrong = upload(other, f"s3://bucket/{tmp_path.name}-other")
    assert eagle3("wiring", "check", str(exported), "--dataset", wrong, "--json", *through) == 2
    theirs = json.loads(capsys.readouterr().out)["problems"]
    assert eagle3("wiring", "check", str(exported), "--dataset", str(other), "--json") == 2
    mine = json.loads(capsys.readouterr().out)["problems"]
    assert theirs == json.loads(json.dumps(mine).replace(str(other), wrong)) != []
    old = upload(GOLDEN, f"s3://bucket/{tmp_path.name}-1")  # of version 1, without a fingerprint
    assert eagle3("wiring", "check", str(exported), "--dataset", old, "--json", *through) == 2
    theirs = json.loads(capsys.readouterr().out)["problems"]
    assert eagle3("wiring", "check", str(exported), "--dataset", str(GOLDEN), "--json") == 2
    mine = json.loads(capsys.readouterr().out)["problems"]
    assert theirs == json.loads(json.dumps(mine).replace(str(GOLDEN), old)) != []


def test_a_store_is_extracted_from_inspected_and_verified_at_its_url(
    tmp_path: Path, cache: dict[str, object], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_llama(target := tmp_path / "target", seed=1)
    data = write_conversations(tmp_path / "data.jsonl", 10)
    old = tmp_path / "old"
    run_extract(extract_config(target, data, old, output_indices=[1, 3, 5], shard_max_samples=4))
    url = f"s3://bucket/{tmp_path.name}"
    through = ("--cache", str(cache["folder"]), "--cache-max-bytes", str(cache["max_bytes"]))
    assert eagle3("data", "push", str(old), url) == 0

    for output, indices in (("same", [3, 5]), ("other", [2, 5])):  # copied, and extracted once more
        for place, name in ((str(old), f"{output}-local"), (url, output)):
            config = extract_config(target, data, tmp_path / name, output_indices=indices, shard_max_samples=4)
            values = {
                "data": None,
                "cache": None if place == str(old) else CacheSection(**cache),  # type: ignore[arg-type]
                "from_store": place,
            }
            (tmp_path / f"{name}.yaml").write_text(dump_config(config.model_copy(update=values)))
            assert eagle3("extract", "--config", str(tmp_path / f"{name}.yaml")) == 0
        for path in (tmp_path / output).glob("*.safetensors"):
            assert path.read_bytes() == (tmp_path / f"{output}-local" / path.name).read_bytes()
        assert len(list((tmp_path / output).glob("shard-*"))) == 3

    capsys.readouterr()
    assert eagle3("data", "verify", url, *through) == 0
    assert eagle3("data", "verify", url, "--quick", *through) == 0
    capsys.readouterr()
    assert eagle3("data", "inspect", url, "--json", "--target", str(target), *through) == 0
    theirs = json.loads(capsys.readouterr().out)
    assert eagle3("data", "inspect", str(old), "--json", "--target", str(target)) == 0
    mine = json.loads(capsys.readouterr().out)
    assert theirs == {**mine, "store": url}
    assert eagle3("data", "verify", url) == 2
    assert "[cache.missing]" in "".join(capsys.readouterr())
    assert eagle3("data", "verify", url, "--resume", str(tmp_path / "r.jsonl"), *through) == 2
    assert "[remote.no_resume]" in "".join(capsys.readouterr())
    assert eagle3("data", "pull", url, str(tmp_path / "back")) == 0
    assert eagle3("data", "verify", str(tmp_path / "back")) == 0


@pytest.mark.parametrize(
    ("command", "named", "said"),
    [
        (["data", "repair", "URL"], "URL", "eagle3 data pull"),
        (["data", "merge", "URL", "STORE", "STORE"], "URL", "eagle3 data push"),
        (["data", "split", "STORE", "URL", "--parts", "2"], "URL", "eagle3 data push"),
        (["data", "split", "URL", "OUT", "--parts", "2"], "URL", "eagle3 data pull"),
        (["wiring", "probe", "URL", "--target", "x"], "URL", "eagle3 data pull"),
        (["extract", "target.path=x", "output_indices=[1]", "data.path=x", "output=URL"], "URL", "eagle3 data push"),
        (["extract", "--stream", "target.path=x", "output_indices=[1]", "data.path=x", "output=URL"], "URL", ""),
        (["train", "dataset=STORE", "output_indices=[0,2,5]", "output=URL"], "URL", "give a folder"),
        (["train", "--stream", "dataset=URL", "output_indices=[0,2,5]", "output=OUT"], "URL", "give a folder"),
        (["train", "dataset=URL", "output_indices=[0,2,5]", "output=OUT"], "URL", "--cache"),
        (["export", "run=URL", "output=OUT"], "URL", "give a folder"),
        (["data", "push", "STORE", "OUT"], "OUT", "s3://bucket/folder"),
        (["data", "pull", "STORE", "OUT"], "STORE", "s3://bucket/folder"),
        (["regenerate", "target.path=x", "data.path=x", "output=URL"], "URL", "local file"),
        (["tiny-kimi", "--output", "URL"], "URL", "give a folder"),
    ],
)
def test_a_url_where_a_folder_is_needed_is_refused_with_one_problem(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    named: str,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    places = {
        "URL": f"s3://bucket/{tmp_path.name}",
        "STORE": str(write_random_store(tmp_path / "store")),
        "OUT": str(tmp_path / "out"),
    }

    def filled(text: str) -> str:
        for name, place in places.items():
            text = text.replace(name, place)
        return text

    assert eagle3(*map(filled, command)) == 2
    output = "".join(capsys.readouterr())
    assert f"{places[named]}:" in output and said in output
    assert output.count("fix: ") == 1, output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]
