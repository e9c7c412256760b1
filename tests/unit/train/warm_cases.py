"""A trained run, its export, and the same drafter as another tool would lay it out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from eagle3.config import ServeConfig, TrainConfig
from eagle3.serve.export import export_run
from eagle3.train.tracking import read_log
from eagle3.train.trainer import run_training
from tests.stores import train_config, write_random_store

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
OURS = ("eagle3", LAYER_IDS)


def make_first_run(folder: Path) -> Path:
    """`store`, `run` (four steps, its last checkpoint is the best or the newest) and `export` (float32)."""
    store = write_random_store(folder / "store", count=16)
    config = train_config(store, folder / "run", eval_fraction=0.25, batch_size=4, epochs=2)
    run_training(config)
    serve = ServeConfig(run=str(folder / "run"), output=str(folder / "export"), checkpoint="last", dtype="float32")
    export_run(serve)
    return folder


def warm_config(folder: Path, output: Path, start: Path | str, **values: object) -> TrainConfig:
    """The same data as the first run's."""
    defaults: dict[str, object] = {"eval_fraction": 0.25, "batch_size": 4, "draft": {}, "init_from": str(start)}
    dataset = values.pop("dataset", folder / "store")
    return train_config(str(dataset), output, **{**defaults, **values})


def evaluations(run: Path) -> list[dict[str, Any]]:
    return [record for record in read_log(run / "log.jsonl") if record["kind"] == "eval"]


def write_as_another_tool(
    export: Path,
    folder: Path,
    prefix: str = "midlayer.",
    shards: int = 1,
    config: Mapping[str, Any] | None = None,
    **tensors: torch.Tensor | None,
) -> Path:
    """SpecForge's layout: no contract, nothing of ours in config.json, ids under the nested key only.

    Args:
        prefix: of the layer's names.
        shards: safetensors files.
        config: keys to add, or with None to remove.
        tensors: to add, or with None to remove; a dot is written as two underscores.
    """
    folder.mkdir()
    found = {key: value for key, value in json.loads((export / "config.json").read_text()).items() if key not in OURS}
    found |= config or {}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in found.items() if value is not None}))
    stored = load_file(export / "model.safetensors")
    changes = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    stored = {name: tensor for name, tensor in (stored | changes).items() if tensor is not None}
    write_weights(folder, {rename(name, prefix): tensor for name, tensor in stored.items()}, shards)
    return folder


def rename(name: str, prefix: str) -> str:
    return name.replace("midlayer.", prefix)


def write_weights(folder: Path, tensors: Mapping[str, torch.Tensor], shards: int = 1) -> None:
    names = sorted(tensors)
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return
    places = {name: f"model-{number % shards + 1:05}-of-{shards:05}.safetensors" for number, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
