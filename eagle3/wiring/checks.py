"""The checks of whole artifacts: a draft checkpoint, a hidden-state store, and whether they belong together.

What they do not prove: that the weights are trained or finite, or that the stored states are what the contract says
(extraction checks that against the model itself). They read JSON files, headers and the two draft-vocab tables.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from eagle3.errors import Problem, ProblemsError, raise_problems
from eagle3.files import read_json_object, readable
from eagle3.wiring.checkpoint_config import check_config, draft_shape
from eagle3.wiring.checkpoint_layers import (
    Stack,
    check_layers,
    check_recorded,
    check_vllm_key,
    describe_reading,
    ids_of,
    version_to_check,
)
from eagle3.wiring.checkpoint_options import check_loader, check_names, check_options
from eagle3.wiring.checkpoint_target import check_context, compare_shape, compare_shape_with_target, compare_target
from eagle3.wiring.checkpoint_tensors import check_tables, check_tensors
from eagle3.wiring.contract import CONTRACT_FILE, WiringContract
from eagle3.wiring.conventions import ENGINE_NAMES
from eagle3.wiring.dataset import check_dataset as check_dataset
from eagle3.wiring.dataset import dataset_contract, dataset_target_config
from eagle3.wiring.engines import boundaries_read
from eagle3.wiring.fingerprint_file import check_fingerprint
from eagle3.wiring.layers import LayerWiring, is_size
from eagle3.wiring.layouts import Layout, recognise
from eagle3.wiring.provenance import check_said_layers, no_contract
from eagle3.wiring.targets import CONFIG_FILE, KNOWN_TARGETS, TargetFacts, served_context, target_facts
from eagle3.wiring.weights import WEIGHTS_FILE, read_weights

_T = TypeVar("_T")


class _Findings:
    """Collects problems, so that a check that cannot go on does not hide what others find."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._found: dict[Problem, None] = {}

    @property
    def problems(self) -> list[Problem]:
        return list(self._found)

    def add(self, problems: Iterable[Problem]) -> None:
        """Adds what is not there yet: two checks may stumble over the same file."""
        self._found |= dict.fromkeys(problems)

    def get(self, call: Callable[[], _T]) -> _T | None:
        """The value, or None after adding what was raised."""
        try:
            with readable(self.folder):
                return call()
        except ProblemsError as error:
            self.add(error.problems)
            return None


def check_checkpoint(
    path: str | Path,
    *,
    dataset: str | Path | None = None,
    target: str | Path | None = None,
    engine: str = "sglang",
    engine_version: str | None = None,
    layers: Sequence[int] | None = None,
    cuda_graphs: bool = True,
) -> list[Problem]:
    """Everything that would go wrong if this draft checkpoint were served.

    Args:
        path: folder with config.json, the weights as safetensors, and eagle3_contract.json if `eagle3 export` wrote it.
        dataset: hidden-state store that it should belong to.
        target: known target name, or a folder with the target's config.json.
        engine: serving engine.
        engine_version: its version; default: the one that config.json's `eagle3.exported_for` records, else the
            newest known (`describe_checkpoint` says which).
        layers: output indices that the drafter was trained on, for a checkpoint of another tool; needs `target`.
        cuda_graphs: the server uses CUDA graphs, as it does by itself; SGLang up to 0.5.10.post1 captures default
            layers in them.

    Returns:
        All problems: config.json (`config.*`, `context.too_short`), layer ids (`layer_ids.*`, `wiring.*`,
        `engine.*`), weights (`checkpoint.*`, `safetensors.*`, `tensor.*`, `draft_vocab.*`), contract (`contract.*`,
        `layers.*`, `fingerprint.*`), target (`target.*`).
    """
    folder, findings = Path(path), _Findings(Path(path))
    has_config = findings.get(lambda: (folder / CONFIG_FILE).is_file())
    if has_config is None:
        return findings.problems
    if not has_config:
        message = f"is no draft checkpoint: {'it has no config.json' if folder.is_dir() else 'no such folder'}"
        fix = "give the folder that `eagle3 export` or another trainer wrote"
        return [Problem(str(folder), "checkpoint.not_a_checkpoint", message, fix)]
    has_contract = os.path.lexists(folder / CONTRACT_FILE)
    contract = findings.get(lambda: WiringContract.load(folder)) if has_contract else None
    stored = findings.get(lambda: dataset_contract(Path(dataset))) if dataset is not None else None
    facts = findings.get(lambda: target_facts(target)) if target is not None else None
    if contract is not None and stored is not None:
        findings.add(stored.compare(contract, "dataset", "checkpoint"))
    if contract is not None and facts is not None:
        findings.add(compare_target(contract, facts))
    if contract is not None:
        findings.add(check_fingerprint(folder, contract))
    config = findings.get(lambda: read_json_object(folder / CONFIG_FILE, "a checkpoint's config.json"))
    if config is None:
        return findings.problems
    layout = recognise(config)
    layout = replace(layout, own=layout.own or has_contract)
    if not has_contract:
        findings.add(no_contract(layout, facts, layers, folder))
    elif contract is not None and layers is not None:
        findings.add(check_said_layers(contract, layers, str(folder / CONTRACT_FILE)))
    stack = findings.get(lambda: _stack(contract or stored, facts, layers))
    context = findings.get(lambda: _target_context(facts, dataset, contract))
    server = findings.get(lambda: (engine, version_to_check(config, engine, engine_version)[0]))
    _check_config(findings, folder, layout, context, server)
    if server is not None:
        _check_layers(findings, folder, layout, stack, *server, cuda_graphs)
    _check_weights(findings, folder, layout, contract, facts, server)
    return findings.problems


def assert_wiring(
    checkpoint: str | Path,
    dataset: str | Path | None = None,
    engine: str = "sglang",
    engine_version: str | None = None,
    *,
    target: str | Path | None = None,
    layers: Sequence[int] | None = None,
    cuda_graphs: bool = True,
) -> None:
    """Raises if `check_checkpoint` finds anything.

    Raises:
        ProblemsError: listing all problems.
    """
    raise_problems(
        check_checkpoint(
            checkpoint,
            dataset=dataset,
            target=target,
            engine=engine,
            engine_version=engine_version,
            layers=layers,
            cuda_graphs=cuda_graphs,
        )
    )


def describe_checkpoint(
    path: str | Path, engine: str = "sglang", engine_version: str | None = None, *, target: str | Path | None = None
) -> str:
    """In one sentence, which layers this server would read, for which version, and why that version.

    Args:
        target: needed for a checkpoint without a contract, which does not say how many layers its target has.

    Raises:
        ProblemsError: the checkpoint does not say, or the convention is not known.
    """
    folder = Path(path)
    layout = recognise(read_json_object(folder / CONFIG_FILE, "a checkpoint's config.json"))
    contract = WiringContract.load(folder) if os.path.lexists(folder / CONTRACT_FILE) or target is None else None
    facts = target_facts(target) if contract is None and target is not None else None
    stack = _stack(contract, facts, None)
    assert stack is not None
    version, reason = version_to_check(layout.fields, engine, engine_version)
    ids, problems = ids_of(layout.fields, engine, str(folder / CONFIG_FILE))
    if ids is None:
        raise ProblemsError(problems)
    read = boundaries_read(ids, engine, version, stack.family, stack.num_hidden_layers)
    name = contract.target_name if contract is not None else str(target)
    return describe_reading(ids, read, f"{ENGINE_NAMES[engine]} {version}", reason, name)


def _stack(contract: WiringContract | None, facts: TargetFacts | None, layers: Sequence[int] | None) -> Stack | None:
    """What is known about the target's layers, from a contract, else as told."""
    if contract is not None:
        return Stack(contract.target_family, contract.num_hidden_layers, contract.wiring)
    if facts is None:
        return None
    wiring = LayerWiring(tuple(layers), facts.num_hidden_layers) if layers is not None else None
    return Stack(facts.family, facts.num_hidden_layers, wiring)


def _check_config(
    findings: _Findings, folder: Path, layout: Layout, context: int | None, server: tuple[str, str] | None
) -> None:
    where = str(folder / CONFIG_FILE)
    if server is not None:
        findings.add(check_loader(layout, *server, where))
    problems = check_config(layout, where)
    findings.add(problems or check_context(layout.fields, context, where))


def _check_layers(
    findings: _Findings,
    folder: Path,
    layout: Layout,
    stack: Stack | None,
    engine: str,
    version: str,
    cuda_graphs: bool,
) -> None:
    where = str(folder / CONFIG_FILE)
    if stack is None:
        findings.add(ids_of(layout.fields, engine, where)[1])
        return
    findings.add(findings.get(lambda: check_layers(layout.fields, stack, engine, version, where, cuda_graphs)) or [])
    if stack.wiring is not None:
        findings.add(check_recorded(layout.fields, stack.wiring, where))
        if engine != "vllm":
            findings.add(check_vllm_key(layout.fields, stack.wiring, where))


def _check_weights(
    findings: _Findings,
    folder: Path,
    layout: Layout,
    contract: WiringContract | None,
    facts: TargetFacts | None,
    server: tuple[str, str] | None,
) -> None:
    config_file, weights_file = str(folder / CONFIG_FILE), str(folder / WEIGHTS_FILE)
    weights = findings.get(lambda: read_weights(folder))
    shape = draft_shape(layout, contract.wiring.num_aux if contract is not None else 3)
    if shape is None:
        return
    draft_vocab = None
    if weights is not None:
        findings.add(check_tensors(weights, shape, layout.own, weights_file))
        draft_vocab, problems = check_tables(weights, shape, layout.own, weights_file)
        findings.add(problems)
    if server is not None:
        if server[0] == "sglang":
            findings.add(check_options(layout, shape.num_aux, server[1], config_file))
        findings.add(check_names(layout, weights.tensors, *server, weights_file) if weights is not None else [])
    if contract is not None:
        findings.add(compare_shape(contract, shape, draft_vocab, config_file))
    elif facts is not None:
        findings.add(compare_shape_with_target(shape, facts, config_file))


def _target_context(
    facts: TargetFacts | None, dataset: str | Path | None, contract: WiringContract | None
) -> int | None:
    """The target's context in tokens: as told, else as the dataset recorded it, else by a known target's name."""
    if facts is None and dataset is not None:
        recorded = dataset_target_config(Path(dataset))
        if recorded is not None and is_size(recorded.get("max_position_embeddings")):
            return served_context(recorded)
    if facts is None and contract is not None:
        facts = KNOWN_TARGETS.get(contract.target_name)
    return facts.context_length if facts is not None else None
