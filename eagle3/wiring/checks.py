"""The checks of whole artifacts: a draft checkpoint, a hidden-state store, and whether they belong together.

What they do not prove: that the weights are trained or finite, or that the stored states are what the contract says
(extraction checks that against the model itself). They read JSON files, headers and the two draft-vocab tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from eagle3.errors import Problem, ProblemsError, problem_error, raise_problems
from eagle3.files import read_json_object
from eagle3.wiring.checkpoint_config import check_config, check_options, draft_shape, layer_ids
from eagle3.wiring.checkpoint_layers import check_layers, check_recorded, check_vllm_key, version_to_check
from eagle3.wiring.checkpoint_target import check_context, compare_shape, compare_target
from eagle3.wiring.checkpoint_tensors import (
    WEIGHTS_FILE,
    check_layout,
    check_tables,
    check_tensors,
    read_weights_header,
)
from eagle3.wiring.contract import CONTRACT_FILE, WiringContract
from eagle3.wiring.conventions import ENGINE_NAMES, LAYER_IDS, NESTED_KEY
from eagle3.wiring.dataset import check_dataset as check_dataset
from eagle3.wiring.dataset import dataset_contract, dataset_target_config
from eagle3.wiring.engines import boundaries_read, find_convention
from eagle3.wiring.layers import describe_layers, is_int
from eagle3.wiring.targets import CONFIG_FILE, KNOWN_TARGETS, TargetFacts, served_context, target_facts

_T = TypeVar("_T")


class _Findings:
    """Collects problems, so that a check that cannot go on does not hide what others find."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def add(self, problems: Iterable[Problem]) -> None:
        """Adds what is not there yet: two checks may stumble over the same file."""
        self.problems += [problem for problem in problems if problem not in self.problems]

    def get(self, call: Callable[[], _T]) -> _T | None:
        """The value, or None after adding what was raised."""
        try:
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
) -> list[Problem]:
    """Everything that would go wrong if this draft checkpoint were served.

    Args:
        path: folder with config.json, model.safetensors and eagle3_contract.json.
        dataset: hidden-state store that it should belong to.
        target: known target name, or a folder with the target's config.json.
        engine: serving engine.
        engine_version: its version; default: the one that config.json's `eagle3.exported_for` records, else the
            newest known (`describe_checkpoint` says which).

    Returns:
        All problems: config.json (`config.*`, `context.too_short`), layer ids (`layer_ids.*`, `wiring.*`,
        `engine.*`), weights (`checkpoint.*`, `safetensors.*`, `tensor.*`, `draft_vocab.*`), contract (`contract.*`,
        `layers.*`), target (`target.*`).
    """
    folder, findings = Path(path), _Findings()
    if not (folder / CONFIG_FILE).is_file():
        message = f"is no draft checkpoint: {'it has no config.json' if folder.is_dir() else 'no such folder'}"
        fix = "give the folder that `eagle3 export` wrote"
        return [Problem(str(folder), "checkpoint.not_a_checkpoint", message, fix)]
    contract = findings.get(lambda: _read_contract(folder))
    stored = findings.get(lambda: dataset_contract(Path(dataset))) if dataset is not None else None
    facts = findings.get(lambda: target_facts(target)) if target is not None else None
    if contract is not None and stored is not None:
        findings.add(stored.compare(contract, "dataset", "checkpoint"))
    if contract is not None and facts is not None:
        findings.add(compare_target(contract, facts))
    config = findings.get(lambda: read_json_object(folder / CONFIG_FILE, "a checkpoint's config.json"))
    if config is not None:
        context = findings.get(lambda: _target_context(facts, dataset, contract))
        server = findings.get(lambda: (engine, version_to_check(config, engine, engine_version)[0]))
        _check_config(findings, folder, config, context)
        if server is not None:
            _check_layers(findings, folder, config, contract if contract is not None else stored, *server)
        _check_weights(findings, folder, config, contract, server)
    return findings.problems


def assert_wiring(
    checkpoint: str | Path,
    dataset: str | Path | None = None,
    engine: str = "sglang",
    engine_version: str | None = None,
) -> None:
    """Raises if `check_checkpoint` finds anything.

    Raises:
        ProblemsError: listing all problems.
    """
    raise_problems(check_checkpoint(checkpoint, dataset=dataset, engine=engine, engine_version=engine_version))


def describe_checkpoint(path: str | Path, engine: str = "sglang", engine_version: str | None = None) -> str:
    """In one sentence, which layers this server would read, for which version, and why that version.

    Raises:
        ProblemsError: the checkpoint does not say, or the convention is not known.
    """
    folder = Path(path)
    config = read_json_object(folder / CONFIG_FILE, "a checkpoint's config.json")
    contract = _read_contract(folder)
    version, reason = version_to_check(config, engine, engine_version)
    convention = find_convention(engine, version, contract.target_family)
    ids, problems = layer_ids(config, convention.key, str(folder / CONFIG_FILE))
    if ids is None:
        raise ProblemsError(problems)
    read = boundaries_read(ids, engine, version, contract.target_family, contract.num_hidden_layers)
    layers = describe_layers([boundary - 1 for boundary in read])
    return f"{ENGINE_NAMES[engine]} {version} ({reason}) reads {layers} of {contract.target_name} from {list(ids)}"


def _check_config(findings: _Findings, folder: Path, config: Mapping[str, Any], context: int | None) -> None:
    where = str(folder / CONFIG_FILE)
    problems = check_config(config, where)
    findings.add(problems or check_context(config, context, where))


def _check_layers(
    findings: _Findings,
    folder: Path,
    config: Mapping[str, Any],
    expected: WiringContract | None,
    engine: str,
    version: str,
) -> None:
    where = str(folder / CONFIG_FILE)
    if expected is None:
        findings.add(layer_ids(config, LAYER_IDS if engine == "vllm" else NESTED_KEY, where)[1])
        return
    problems = findings.get(
        lambda: check_layers(config, expected.wiring, expected.target_family, engine, version, where)
    )
    findings.add(problems or [])
    findings.add(check_recorded(config, expected.wiring, where))
    if engine != "vllm":
        findings.add(check_vllm_key(config, expected.wiring, where))


def _check_weights(
    findings: _Findings,
    folder: Path,
    config: Mapping[str, Any],
    contract: WiringContract | None,
    server: tuple[str, str] | None,
) -> None:
    where = str(folder / CONFIG_FILE)
    header = findings.get(lambda: read_weights_header(folder))
    shape = draft_shape(config, contract.wiring.num_aux if contract is not None else 3)
    if shape is None:
        return
    draft_vocab = None
    if header is not None:
        findings.add(check_tensors(header, shape, str(folder / WEIGHTS_FILE)))
        draft_vocab, problems = check_tables(folder, header, shape)
        findings.add(problems)
    if server is not None and server[0] == "sglang":
        findings.add(check_options(config, shape.num_aux, server[1], where))
        findings.add(check_layout(header, server[1], where) if header is not None else [])
    if contract is not None:
        findings.add(compare_shape(contract, shape, draft_vocab, where))


def _target_context(
    facts: TargetFacts | None, dataset: str | Path | None, contract: WiringContract | None
) -> int | None:
    """The target's context in tokens: as told, else as the dataset recorded it, else by a known target's name."""
    if facts is None and dataset is not None:
        recorded = dataset_target_config(Path(dataset))
        if recorded is not None and is_int(recorded.get("max_position_embeddings")):
            return served_context(recorded)
    if facts is None and contract is not None:
        facts = KNOWN_TARGETS.get(contract.target_name)
    return facts.context_length if facts is not None else None


def _read_contract(folder: Path) -> WiringContract:
    if not (folder / CONTRACT_FILE).is_file():
        message = f"has no {CONTRACT_FILE}: nothing says which layers the drafter was trained on"
        fix = "export it with `eagle3 export`, which writes the contract"
        raise problem_error(str(folder), "checkpoint.no_contract", message, fix)
    return WiringContract.load(folder)
