"""What a hidden-state store's manifest says was captured, and whether its shards have those widths."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from eagle3.errors import Problem, ProblemsError, problem_error
from eagle3.sealed import read_sealed_object
from eagle3.wiring.contract import WiringContract
from eagle3.wiring.fingerprint_check import check_stored_fingerprint
from eagle3.wiring.safetensors_header import read_header

MANIFEST_FILE = "manifest.json"
RING_FILE = "ring.json"
DTYPE_CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float8_e4m3fn": "F8_E4M3"}
_EXTRACT = "extract again with `eagle3 extract`"


def dataset_contract(folder: Path) -> WiringContract:
    """The contract in the manifest of a hidden-state store, or in the plan of a ring.

    Raises:
        ProblemsError: kinds `file.*`, `dataset.manifest`, `contract.*`, `layers.*`.
    """
    path = _manifest_path(folder)
    manifest = _manifest(folder)
    if "contract" not in manifest:
        message = "has no contract: it is not the manifest of a hidden-state store"
        raise problem_error(str(path), "dataset.manifest", message, "give the folder that `eagle3 extract` wrote")
    return WiringContract.from_dict(manifest["contract"], f"{path}: contract")


def dataset_target_config(folder: Path) -> dict[str, Any] | None:
    """The target's text config that the store recorded, if it did."""
    recorded = _manifest(folder).get("target_config")
    return recorded if isinstance(recorded, dict) else None


def _manifest(folder: Path) -> dict[str, Any]:
    """The manifest; of one that has a seal, only as it was written."""
    return read_sealed_object(_manifest_path(folder), "the manifest of a hidden-state store")


def check_dataset(path: str | Path, expected: WiringContract | None = None) -> list[Problem]:
    """Whether a hidden-state store's contract is sound, and its shards have the widths and types that it says.

    It reads headers, and the few rows that the fingerprint is made of. Sizes, checksums and samples are checked by
    `eagle3.data`, and that the states are what the contract says by extraction and by `eagle3 wiring probe`, against
    the model itself. Of a ring, whose shards come and go, the contract alone is checked.

    Args:
        path: folder with manifest.json or ring.json.
        expected: a contract that the store's must equal.

    Returns:
        All problems; kinds `file.*`, `contract.*`, `layers.*`, `dataset.*`, `safetensors.*`, `fingerprint.*`.
    """
    folder = Path(path)
    try:
        contract = dataset_contract(folder)
    except ProblemsError as error:
        return list(error.problems)
    problems = contract.compare(expected, "dataset", "expected contract") if expected is not None else []
    if _manifest_path(folder).name == RING_FILE:
        return problems
    manifest = _manifest(folder)
    shards = manifest.get("shards")
    for shard in shards if isinstance(shards, list) else [None]:
        problems += _shard_problems(folder, shard, contract)
    return problems or check_stored_fingerprint(folder, manifest, contract)


def _manifest_path(folder: Path) -> Path:
    manifest, ring = folder / MANIFEST_FILE, folder / RING_FILE
    return ring if os.path.lexists(ring) and not os.path.lexists(manifest) else manifest  # false for impossible names


def _shard_problems(folder: Path, shard: object, contract: WiringContract) -> list[Problem]:
    name = shard.get("file") if isinstance(shard, dict) else None
    if not isinstance(name, str) or Path(name).name != name:
        message = f"shards is not a list of shards with plain file names: {name!r}"
        return [Problem(str(folder / MANIFEST_FILE), "dataset.manifest", message, _EXTRACT)]
    try:
        tensors = read_header(folder / name).tensors
    except ProblemsError as error:
        return list(error.problems)
    code, hidden, slots = DTYPE_CODES[contract.dtype], contract.hidden_size, len(contract.output_indices)
    expected = {"aux_hidden_states": (code, slots * hidden), "last_hidden_states": (code, hidden)}
    if code == "F8_E4M3":
        expected["aux_scales"] = ("F32", slots)
    problems = []
    for tensor, (dtype, width) in expected.items():
        info = tensors.get(tensor)
        if info is None or info.dtype != dtype or len(info.shape) != 2 or info.shape[1] != width:
            found = "absent" if info is None else f"{info.dtype} {list(info.shape)}"
            message = f"{tensor} is {found}, the contract means {dtype} [tokens, {width}]"
            problems.append(Problem(str(folder / name), "dataset.width", message, _EXTRACT))
    return problems
