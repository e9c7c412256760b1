"""A target's folder and a drafter's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle3.config import LaunchConfig
from eagle3.errors import ProblemsError
from eagle3.serve.export import export_run
from eagle3.serve.launch import build_command
from tests.unit.serve.cases import make_run, make_target_config, serve
from tests.unit.serve.launch.fakes import VERSION


def make_models(folder: Path, version: str = VERSION) -> tuple[Path, Path]:
    """Folders of a target that could be loaded, by its file names, and of a drafter that was exported for it."""
    config = make_target_config()
    target = folder / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (target / "model.safetensors").touch()
    (target / "tokenizer.json").touch()
    run = make_run(folder / "made", config, outputs=(1, 4, 8))  # not the default layers
    export_run(serve(run, folder / "draft", engine_version=version))
    return target, folder / "draft"


def launch_config(target: Path, draft: Path | None, **values: Any) -> LaunchConfig:
    drafter = {} if draft is None else {"checkpoint": str(draft)}
    return LaunchConfig.model_validate({"target": str(target), "engine_version": VERSION, **drafter, **values})


def refused(cfg: LaunchConfig) -> list[str]:
    """The kinds of all problems."""
    with pytest.raises(ProblemsError) as caught:
        build_command(cfg)
    return [problem.kind for problem in caught.value.problems]
