"""What of a drafter this server loads at all: its class, its options, its tensor names."""

from __future__ import annotations

from collections.abc import Iterable

from eagle3.errors import Problem
from eagle3.wiring.checkpoint_config import option
from eagle3.wiring.conventions import ENGINE_NAMES
from eagle3.wiring.layouts import ARCHITECTURE, LOADERS, Layout
from eagle3.wiring.version import Version

# The first SGLang release that reads other counts of aux layers, `layers.0.*` names and most options; for each
# option the first that reads it, or None while none does. An older one skips flag and tensor without a word.
GENERAL_SINCE = "0.5.12"
_OPTION_SINCE = {
    "norm_output": GENERAL_SINCE,
    "fc_norm": GENERAL_SINCE,
    "norm_before_fc": "0.5.17",
    "norm_before_residual": None,
}


def check_loader(layout: Layout, engine: str, version: str, where: str) -> list[Problem]:
    """A class that this engine version does not load; kind `config.architectures`."""
    known = LOADERS[engine]
    since = known.get(layout.architecture) if isinstance(layout.architecture, str) else None
    if since is not None and Version(version) >= Version(since):
        return []
    server = f"{ENGINE_NAMES[engine]} {version}"
    if since is not None:
        fix = f"use {since} or newer"
    elif engine == "sglang":
        fix = f"convert it to {ARCHITECTURE}'s flat config.json, or serve it with vLLM if that loads it"
    else:
        fix = f"write one of {', '.join(known)}"
    message = f"architectures is {layout.fields.get('architectures')!r}, which {server} does not load as a drafter"
    return [Problem(where, "config.architectures", message, fix)]


def check_options(layout: Layout, num_aux: int, sglang_version: str, where: str) -> list[Problem]:
    """Drafter options that this SGLang version would skip without a word; kind `config.option_unknown`."""
    needs = {name: since for name, since in _OPTION_SINCE.items() if option(layout.fields, name)}
    if num_aux != 3:
        needs[f"{num_aux} aux layers instead of 3"] = GENERAL_SINCE
    return [
        Problem(
            where,
            "config.option_unknown",
            f"SGLang {sglang_version} does not know {name} and would compute something else",
            f"serve with SGLang {since} or newer, or train without it" if since else "serve with vLLM, which knows it",
        )
        for name, since in needs.items()
        if since is None or Version(sglang_version) < Version(since)
    ]


def check_names(layout: Layout, names: Iterable[str], engine: str, version: str, where: str) -> list[Problem]:
    """Tensor names that this server does not read; kind `tensor.unread`."""
    unread = [name for name in names if not _is_read(name, layout.mla, engine, version)]
    if not unread:
        return []
    message = f"{ENGINE_NAMES[engine]} {version} does not read {unread[0]} and {len(unread) - 1} more"
    fix = "write names as midlayer.*, fc.*, norm.*, lm_head.*, d2t, without `model.`"
    return [Problem(where, "tensor.unread", message, fix)]


def _is_read(name: str, mla: bool, engine: str, version: str) -> bool:
    if name == "draft_id_to_target_id":
        return False
    if name.startswith("model.") and (engine == "vllm" or mla):
        return False
    newer = name.removeprefix("model.").startswith("layers.0.")
    return not (newer and engine == "sglang" and Version(version) < Version(GENERAL_SINCE))
