"""What is missing in the folders that a server is to load, as far as file names and config.json tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3.errors import Problem, ProblemsError
from eagle3.files import read_json_object
from eagle3.wiring.layers import is_size
from eagle3.wiring.targets import CONFIG_FILE, KNOWN_TARGETS

INDEX = "model.safetensors.index.json"
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tiktoken.model", "vocab.json")
_FETCH = "fetch what is missing, or give another folder"


def is_path(target: str) -> bool:
    """Whether it must be a folder; else it may be a hub id."""
    return target.startswith(("/", "./", "../", "~")) or target.count("/") > 1 or Path(target).exists()


def known_name(cfg_name: str | None, target: str) -> str | None:
    """What the wiring check can be told about the target: its folder, the given name, or the name of a hub id."""
    if cfg_name is not None:
        return cfg_name
    if (Path(target) / CONFIG_FILE).is_file():
        return target
    name = target.rstrip("/").rpartition("/")[2].lower()
    return name if name in KNOWN_TARGETS else None


def check_target_folder(folder: Path, extra: Sequence[str]) -> Iterator[Problem]:
    """Pieces that the target's folder lacks; kind `launch.target`."""
    where = str(folder)
    if not (folder / CONFIG_FILE).is_file():
        found = "it has no config.json" if folder.is_dir() else "no such folder"
        yield Problem(where, "launch.target", f"is no model: {found}", "give the target's folder, or its hub id")
        return
    yield from _weights(folder)
    if "--skip-tokenizer-init" not in extra and not any((folder / name).exists() for name in _TOKENIZERS):
        message = f"has no tokenizer: none of {', '.join(_TOKENIZERS)}"
        yield Problem(where, "launch.target", message, f"{_FETCH}, or add --skip-tokenizer-init")


def _weights(folder: Path) -> Iterator[Problem]:
    where = str(folder)
    if not (folder / INDEX).exists():
        if not any(path for pattern in _WEIGHTS for path in folder.glob(pattern)):
            yield Problem(where, "launch.target", f"has no weights: no {', '.join(_WEIGHTS)}", _FETCH)
        return
    try:
        listed = read_json_object(folder / INDEX, "the index of the target's weights").get("weight_map")
    except ProblemsError as error:
        yield from error.problems
        return
    if not isinstance(listed, dict):
        yield Problem(str(folder / INDEX), "launch.target", "has no weight_map", "fetch it again")
        return
    missing = sorted({str(name) for name in listed.values()} - {path.name for path in folder.iterdir()})
    if missing:
        names = ", ".join(missing[:5]) + (" ..." if len(missing) > 5 else "")
        message = f"lacks {len(missing)} of {len(set(listed.values()))} shards of its index: {names}"
        yield Problem(where, "launch.target", message, _FETCH)


def check_split(config: Mapping[str, Any], tp: int, where: str) -> Iterator[Problem]:
    """Widths that cannot be shared out to so many GPUs; kind `launch.tp`.

    Source: `sglang/srt/models/llama.py` and the parallel linear layers: heads and MLP width divide evenly; key/value
    heads divide evenly or are copied evenly.
    """
    heads, kv_heads, width = (
        config.get(key) if is_size(config.get(key)) else None
        for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    )
    wrong = [
        f"{name} {count}"
        for name, count in (("num_attention_heads", heads), ("intermediate_size", width))
        if count and count % tp
    ]
    if kv_heads and kv_heads % tp and tp % kv_heads:
        wrong.append(f"num_key_value_heads {kv_heads}")
    if wrong:
        message = f"{', '.join(wrong)} cannot be shared out to tp={tp} GPUs"
        yield Problem(where, "launch.tp", message, "choose a tp that divides them")
