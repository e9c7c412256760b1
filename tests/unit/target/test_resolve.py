from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError

from eagle3.config import TargetConfig
from eagle3.errors import ProblemsError
from eagle3.target import resolve
from eagle3.target.resolve import find_target, pick_device, weights_digest
from eagle3.target.tiny import make_tiny_llama

TinyTarget = Callable[[str], Path]


def test_a_local_folder_is_used_as_it_is(tiny_target: TinyTarget) -> None:
    files = find_target(TargetConfig(path=str(tiny_target("kimi")), name="kimi-k2.5"))
    assert files.folder == tiny_target("kimi")
    assert (files.facts.name, files.facts.family, files.facts.num_hidden_layers) == ("kimi-k2.5", "kimi_k25", 61)
    assert files.text_config["model_type"] == "kimi_k2"


@pytest.mark.parametrize("path", ["/no/such/folder", "./no-such", "a/b/c"])
def test_a_missing_folder_is_one_clear_error(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "snapshot_download", lambda *args, **kwargs: pytest.fail("asked the hub"))
    with pytest.raises(ProblemsError, match=r"target\.not_found.*no such folder"):
        find_target(TargetConfig(path=path))


def test_a_hub_failure_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: Any, **kwargs: Any) -> str:
        raise LocalEntryNotFoundError("cannot reach the hub\nlong explanation")

    monkeypatch.setattr(resolve, "snapshot_download", offline)
    with pytest.raises(ProblemsError, match=r"target\.not_found.*owner/name.*cannot reach the hub") as caught:
        find_target(TargetConfig(path="owner/name"))
    assert len(caught.value.problems) == 1


def test_an_impossible_hub_id_is_one_clear_error() -> None:
    with pytest.raises(ProblemsError, match=r"target\.not_found"):
        find_target(TargetConfig(path="not a hub id"))


@pytest.mark.parametrize("trusted", [False, True])
def test_code_is_downloaded_only_where_it_is_trusted(
    tiny_target: TinyTarget, monkeypatch: pytest.MonkeyPatch, trusted: bool
) -> None:
    asked: dict[str, Any] = {}

    def download(name: str, **kwargs: Any) -> str:
        asked.update(kwargs, name=name)
        return str(tiny_target("llama"))

    monkeypatch.setattr(resolve, "snapshot_download", download)
    find_target(TargetConfig(path="owner/name", revision="v1", trust_remote_code=trusted))
    assert (asked["name"], asked["revision"]) == ("owner/name", "v1")
    assert ("*.py" in asked["allow_patterns"]) == trusted


def test_an_unsupported_model_type_names_those_that_are(tiny_target: TinyTarget, tmp_path: Path) -> None:
    config = json.loads((tiny_target("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    with pytest.raises(
        ProblemsError, match=r"target\.unsupported.*'mamba'.*deepseek_v3, gpt_oss, kimi_k2, kimi_k25, llama"
    ):
        find_target(TargetConfig(path=str(tmp_path)))


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProblemsError, match=r"file\.missing"):
        find_target(TargetConfig(path=str(tmp_path)))


def test_devices() -> None:
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    for name in ("cuda:99", "gpu", "meta:x", "meta", "mps"):
        with pytest.raises(ProblemsError, match=r"target\.device(.|\n)*use cpu, or auto"):
            pick_device(name)


def test_weights_digest_tells_other_weights_of_the_same_shapes_apart(tiny_target: TinyTarget, tmp_path: Path) -> None:
    same = make_tiny_llama(tmp_path / "same")
    other = make_tiny_llama(tmp_path / "other", seed=1)
    assert weights_digest(same) == weights_digest(tiny_target("llama"))
    assert weights_digest(other) != weights_digest(same)
