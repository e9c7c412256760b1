"""`eagle3 wiring probe --server` tells a real, running SGLang that is wired as trained from one that is not."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eagle3.cli import app
from eagle3.config import ServeConfig
from eagle3.errors import ProblemsError
from eagle3.serve.export import export_run
from eagle3.serve.server_probe import probe_server
from eagle3.target.extract import run_extract
from eagle3.target.tiny import make_tiny_llama
from eagle3.train.trainer import run_training
from eagle3.wiring.fingerprint_file import load_fingerprint
from tests.serving.conftest import ServerStarter
from tests.serving.constructed import with_ids
from tests.serving.sglang_venv import SERVED_VERSION
from tests.stores import train_config
from tests.unit.target.cases import extract_config, write_conversations

LAYERS = (1, 3, 5)
EAGLE = ("--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "2", "--speculative-eagle-topk", "1",
         "--speculative-num-draft-tokens", "3")  # fmt: skip
RETURN = "--enable-return-hidden-states"
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`target`, `store`, `run` and `draft`, as the commands leave them; nothing of it is constructed."""
    folder = tmp_path_factory.mktemp("probe")
    target = make_tiny_llama(folder / "target")
    data = write_conversations(folder / "data.jsonl", 4, answer_words=60)
    run_extract(extract_config(target, data, folder / "store", output_indices=list(LAYERS)))
    settings = {"output_indices": list(LAYERS), "max_length": 128, "max_steps": 1, "draft": {"draft_vocab_size": 64}}
    run_training(train_config(folder / "store", folder / "run", **settings))
    export_run(
        ServeConfig(
            run=str(folder / "run"), output=str(folder / "draft"), engine_version=SERVED_VERSION, dtype="float32"
        )
    )
    return folder


def start(server: ServerStarter, folder: Path, draft: Path) -> str:
    return server("--model-path", folder / "target", "--dtype", "float32", *EAGLE, RETURN,
                  "--speculative-draft-model-path", draft)  # fmt: skip


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ((0, 2, 4), ["probe.one_early"]),
        ((2, 4, 6), ["probe.one_late"]),
        ((-1, 1, 3), ["probe.embedding", "probe.other_layer"]),
        ((5, 1, 3), []),  # SGLang captures in ascending order, whatever the list's
    ],
)
def test_other_ids_are_named(
    server: ServerStarter, folder: Path, tmp_path: Path, ids: Sequence[int], expected: list[str]
) -> None:
    url = start(server, folder, with_ids(folder / "draft", tmp_path / "draft", ids))

    report = probe_server(folder / "store", url)

    assert [problem.kind for problem in report.problems] == expected
    assert all("[1, 3, 5] in eagle_config" in problem.fix for problem in report.problems)


def test_the_exported_drafter_is_wired_as_trained_and_its_own_folder_can_say_so(
    server: ServerStarter, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = start(server, folder, folder / "draft")

    result = CliRunner().invoke(app, ["wiring", "probe", str(folder / "draft"), "--server", url, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["engine_version"] == SERVED_VERSION
    assert [verdict["cause"] for verdict in report["verdicts"]] == ["right"] * 3
    assert all(verdict["error"] < 1e-4 for verdict in report["verdicts"])
    assert probe_server(folder / "store", url).problems == [], "asked again, it does not answer from its prefix cache"

    assert refused(of_a_larger_vocabulary(folder, tmp_path), url) == "server.vocabulary"
    assert probe_server(folder / "store", url).problems == [], "and has survived"

    monkeypatch.setattr(uuid, "uuid4", lambda: "always the same")
    assert probe_server(folder / "store", url).problems == []
    assert refused(folder / "store", url) == "server.prefix_cache"


def of_a_larger_vocabulary(folder: Path, copy: Path) -> Path:
    fingerprint, contract = load_fingerprint(folder / "store")
    replace(contract, vocab_size=1000).save(copy)
    replace(fingerprint, token_ids=(*fingerprint.token_ids[:-1], 999)).save(copy)
    return copy


def refused(path: Path, url: str) -> str:
    with pytest.raises(ProblemsError) as error:
        probe_server(path, url)
    [problem] = error.value.problems
    return problem.kind


def test_a_server_that_returns_no_states_says_so(server: ServerStarter, folder: Path) -> None:
    url = server("--model-path", folder / "target", "--dtype", "float32")

    assert refused(folder / "store", url) == "server.hidden_states_off"


def test_a_server_without_a_drafter_says_so(server: ServerStarter, folder: Path) -> None:
    url = server("--model-path", folder / "target", "--dtype", "float32", RETURN)

    assert refused(folder / "store", url) == "server.no_drafter"
