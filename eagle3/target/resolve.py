"""A target named in a config -> its folder on this machine, its config and what identifies it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError

from eagle3.config import TargetConfig
from eagle3.errors import Eagle3Error, Problem, problem_error, raise_problems
from eagle3.target.families import find_spec
from eagle3.target.spec import TargetSpec
from eagle3.wiring.targets import CONFIG_FILE, TargetFacts, facts_from_config, read_target_config, text_config

_FILES = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")
_WEIGHT_FILES = ("*.safetensors",)
_CODE_FILES = ("*.py",)
_PROBE_BYTES = 1 << 16


@dataclass(frozen=True)
class TargetFiles:
    """A target's checkpoint folder.

    Attributes:
        folder: where it is.
        config: the whole config.json.
        facts: its shape, under the name that contracts give it.
        spec: how its family loads.
    """

    folder: Path
    config: dict[str, Any]
    facts: TargetFacts
    spec: TargetSpec

    @property
    def text_config(self) -> dict[str, Any]:
        return text_config(self.config)


def find_target(target: TargetConfig, weights: bool | Sequence[str] = True, download: bool = True) -> TargetFiles:
    """Finds the checkpoint, downloading it from the hub if `path` is no folder here. Loads no weights.

    Args:
        target: which.
        weights: download them too, or the named files of them; without, config and tokenizer only.
        download: without, take what the hub's cache on this machine has.

    Raises:
        ProblemsError: it is nowhere, has no (good) config.json, or its model type is not supported.
    """
    folder = _folder(target, weights, download)
    config = read_target_config(folder)
    spec = find_spec(config.get("model_type"), str(folder))
    files = TargetFiles(folder, config, facts_from_config(config, target.contract_name, str(folder)), spec)
    raise_problems(_config_problems(files))
    return files


def _config_problems(files: TargetFiles) -> Iterator[Problem]:
    """What Transformers would take, or stumble over, without a word that helps."""
    where, fix = str(files.folder / CONFIG_FILE), "correct it, or download config.json again"
    eps = files.text_config.get("rms_norm_eps")
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not eps > 0:
        yield Problem(where, "target.config", f"rms_norm_eps is {eps!r:.40}, expected a number above 0", fix)
    for config in (files.config, files.text_config):
        found = config.get("quantization_config")
        if not isinstance(found, dict | None):
            yield Problem(where, "target.quantized", f"quantization_config is {found!r:.40}, expected an object", fix)
            return


def pick_device(name: str) -> torch.device:
    """`auto` is the first GPU, else the CPU.

    Raises:
        ProblemsError: there is no such device on this machine.
    """
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError("nothing here runs on it")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        fix = "use cpu, or auto, which takes a GPU where there is one"
        raise problem_error("target.device", "target.device", f"{name!r} cannot be used: {reason}", fix) from None
    return torch.empty(0, device=device).device  # a plain `cuda` gets its number


def weights_digest(folder: Path) -> str:
    """`sha256:<hex>` of every weight file's name, size, and first, middle and last 64 KiB.

    Tells other weights of the same shapes apart without reading hundreds of gigabytes; not a proof of equality.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with open(path, "rb") as handle:
            for begin in (0, max(size - _PROBE_BYTES, 0) // 2, max(size - _PROBE_BYTES, 0)):
                handle.seek(begin)
                digest.update(handle.read(_PROBE_BYTES))
    return f"sha256:{digest.hexdigest()}"


def _folder(target: TargetConfig, weights: bool | Sequence[str], download: bool) -> Path:
    local = Path(target.path).expanduser()
    if local.is_dir():
        return local
    if local.exists():
        raise _not_found(target.path, "is a file, expected a checkpoint folder or a hub id")
    if local.is_absolute() or target.path.startswith(".") or target.path.count("/") > 1:
        raise _not_found(target.path, "no such folder")
    wanted = weights if not isinstance(weights, bool) else _WEIGHT_FILES if weights else ()
    patterns = [*_FILES, *wanted, *(_CODE_FILES if target.trust_remote_code else ())]
    try:
        return Path(
            snapshot_download(
                target.path, revision=target.revision, allow_patterns=patterns, local_files_only=not download
            )
        )
    except (OSError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if not download and isinstance(error, OSError):
            message = "is no folder here, and is not in the hub's cache; nothing is downloaded for a plan"
            fix = f"download it first, e.g. with `hf download {target.path}`, or give the folder of a checkpoint"
            raise problem_error(target.path, "target.not_found", message, fix) from error
        message = f"is no folder here, and the Hugging Face hub does not give it: {reason}"
        raise _not_found(target.path, message) from error


def _not_found(path: str, message: str) -> Eagle3Error:
    fix = "give the folder of a checkpoint, or a hub id (owner/name) that you can reach and may read"
    return problem_error(path, "target.not_found", message, fix)
