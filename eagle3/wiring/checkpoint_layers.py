"""What a server would capture for a draft checkpoint's layer ids, compared with the layers it was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eagle3.errors import Problem, ProblemsError, problem_error
from eagle3.wiring.checkpoint_config import OWN_KEY, exported_for, layer_ids
from eagle3.wiring.conventions import ENGINE_NAMES, LAYER_IDS, NESTED_KEY, Convention
from eagle3.wiring.engines import (
    find_convention,
    graphs_difference,
    ids_to_write,
    known_conventions,
    newest_known,
    reads_ids,
    requested_boundaries,
    version_range,
)
from eagle3.wiring.layers import EMBEDDING, LayerWiring, compare_layers, describe_layers
from eagle3.wiring.version import Version

SERVING_ENGINES = ("sglang", "vllm")


@dataclass(frozen=True)
class Stack:
    """The target's decoder stack, and which of its layers the drafter was trained on, if anybody says so."""

    family: str
    num_hidden_layers: int
    wiring: LayerWiring | None


def version_to_check(config: Mapping[str, Any], engine: str, engine_version: str | None) -> tuple[str, str]:
    """The version to check against, and in words why: the one asked for, else the one that config.json says it was
    exported for, else the newest known.

    Raises:
        ProblemsError: kinds `engine.unknown`, `engine.unreadable`, `engine.version_malformed`.
    """
    newest = newest_known(engine)
    if engine not in SERVING_ENGINES:
        message = f"{engine!r} does not serve draft checkpoints, only {', '.join(SERVING_ENGINES)}"
        raise problem_error("engine", "engine.unknown", message, "use one of these")
    recorded = exported_for(config, engine)
    if engine_version is not None:
        version, reason = engine_version, "as asked"
    elif recorded is not None:
        version, reason = recorded, "config.json says it was exported for it"
    else:
        version, reason = newest, "the newest known"
    return str(Version(version)), reason


def check_layers(
    config: Mapping[str, Any], stack: Stack, engine: str, version: str, where: str, cuda_graphs: bool = True
) -> list[Problem]:
    """Layer ids that make this server capture anything but what the drafter was trained on.

    Where nobody says what that was, only ids that this server could not serve any drafter with.

    Kinds: `layer_ids.*`; `wiring.one_early`, `wiring.one_late`, `wiring.embedding_added`,
    `wiring.embedding_dropped`, `wiring.other_layers`; `wiring.permuted`; `wiring.never_captured`;
    `wiring.cuda_graphs`.

    Raises:
        ProblemsError: as `find_convention`.
    """
    convention = find_convention(engine, version, stack.family)
    ids, problems = ids_of(config, engine, where)
    if ids is None:
        return problems
    server, fix = f"{ENGINE_NAMES[engine]} {version}", _what_to_write(stack, engine, version)
    requested = requested_boundaries(ids, convention, stack.num_hidden_layers)
    problems = [
        Problem(where, "wiring.never_captured", f"id {value} of {convention.key} {list(ids)} {reason} in {server}", fix)
        for value, boundary in zip(ids, requested, strict=False)
        if (reason := _why_never_captured(value, boundary, convention, stack.num_hidden_layers))
    ]
    if list(requested) != sorted(requested):
        message = f"{convention.key} {list(ids)} is not ascending: {server} captures in ascending order, so the slots "
        problems.append(Problem(where, "wiring.permuted", message + "would not be in the order listed", fix))
    read = [boundary - 1 for boundary in sorted(requested) if 0 <= boundary <= stack.num_hidden_layers]
    if stack.wiring is not None and (difference := compare_layers(stack.wiring.output_indices, read)):
        recorded = exported_for(config, engine)
        note = f" (exported for {ENGINE_NAMES[engine]} {recorded})" if recorded not in (None, version) else ""
        message = (
            f"{convention.key} {list(ids)}{note} makes {server} read {describe_layers(read)}; the drafter was trained "
            f"on {describe_layers(stack.wiring.output_indices)}: {difference[1]}"
        )
        problems.append(Problem(where, f"wiring.{difference[0]}", message, fix))
    wanted = stack.wiring.boundaries if stack.wiring is not None else requested
    graphs = graphs_difference(wanted, convention, stack.num_hidden_layers)
    if graphs and (cuda_graphs or not reads_ids(engine, Version(version))):
        message = f"{server} would verify with other layers than {describe_layers([b - 1 for b in wanted])}: {graphs}"
        fix = "serve with 0.5.11 or newer, or with --disable-cuda-graph and tell the check (--no-cuda-graphs)"
        problems.append(Problem(where, "wiring.cuda_graphs", message, fix))
    return problems


def ids_of(config: Mapping[str, Any], engine: str, where: str) -> tuple[tuple[int, ...] | None, list[Problem]]:
    """The ids that this engine reads, and what is wrong with the list; kinds `layer_ids.*`."""
    if engine != "vllm":
        return layer_ids(config, NESTED_KEY, where)
    ids, problems = layer_ids(config, LAYER_IDS, where)
    nested, _ = layer_ids(config, NESTED_KEY, where)
    if LAYER_IDS in config or nested is None:
        return ids, problems
    message = (
        f"only {NESTED_KEY} names layers: vLLM's V2 runner, the default, does not read it and takes the target's "
        "default layers; the V1 runner takes these ids as boundaries"
    )
    return None, [Problem(where, "layer_ids.nested_only", message, f"write boundaries as top-level {LAYER_IDS}")]


def check_vllm_key(config: Mapping[str, Any], wiring: LayerWiring, where: str) -> list[Problem]:
    """The top-level key, which vLLM reads as boundaries, in a checkpoint made for SGLang; it may be absent.

    Kinds: `layer_ids.*`, `wiring.vllm_key`.
    """
    if LAYER_IDS not in config:
        return []
    ids, problems = layer_ids(config, LAYER_IDS, where)
    if ids is None or ids == wiring.boundaries:
        return problems
    difference = compare_layers(wiring.boundaries, ids)
    assert difference is not None
    message = (
        f"top-level {LAYER_IDS} is {list(ids)}, which vLLM takes as boundaries; the drafter was trained on boundaries "
        f"{list(wiring.boundaries)}: {difference[1]}"
    )
    return [Problem(where, "wiring.vllm_key", message, f"write {list(wiring.boundaries)} there, or remove the key")]


def check_recorded(config: Mapping[str, Any], wiring: LayerWiring, where: str) -> list[Problem]:
    """Output indices in config.json's own key that are not the contract's; they may be absent. `wiring.recorded`."""
    own = config.get(OWN_KEY)
    recorded = own.get("output_indices") if isinstance(own, dict) else None
    if recorded is None or recorded == list(wiring.output_indices):
        return []
    message = f"{OWN_KEY}.output_indices is {recorded!r}, the contract says {list(wiring.output_indices)}"
    return [Problem(where, "wiring.recorded", message, "export it again from the run that the contract belongs to")]


def readings(config: Mapping[str, Any], family: str, num_hidden_layers: int) -> list[str]:
    """What every known server and version would read for this config.json, one line each."""
    lines = []
    for engine in SERVING_ENGINES:
        spans: list[tuple[str, str, str]] = []
        for convention in known_conventions(engine, family):
            layers = _reading(config, convention, num_hidden_layers)
            if spans and spans[-1][2] == layers:
                spans[-1] = (spans[-1][0], convention.last, layers)
            elif layers:
                spans.append((convention.first, convention.last, layers))
        lines += [f"{ENGINE_NAMES[engine]} {version_range(first, last)}: {layers}" for first, last, layers in spans]
    return lines


def _reading(config: Mapping[str, Any], convention: Convention, num_hidden_layers: int) -> str:
    if convention.unsupported:
        return ""
    ids, _ = ids_of(config, convention.engine, "")
    if ids is None:
        return "its default layers"
    requested = requested_boundaries(ids, convention, num_hidden_layers)
    layers = describe_layers([boundary - 1 for boundary in sorted(requested) if 0 <= boundary <= num_hidden_layers])
    graphs = graphs_difference(requested, convention, num_hidden_layers)
    return f"{layers}, but {graphs}" if graphs else layers


def _why_never_captured(value: int, boundary: int, convention: Convention, num_hidden_layers: int) -> str:
    if boundary == 0 and not convention.embedding:
        return "is the embedding, which cannot be captured for this target"
    if boundary == num_hidden_layers and not convention.last_layer:
        return "is the last layer's output, which is never visited for this target"
    if not 0 <= boundary <= num_hidden_layers:
        return "is no layer of the target" + (" (the embedding is id 0)" if value == EMBEDDING else "")
    return ""


def _what_to_write(stack: Stack, engine: str, version: str) -> str:
    server = f"{ENGINE_NAMES[engine]} {version}"
    if stack.wiring is None:
        return f"find out which layers it was trained on and give them as --layers; then this says what {server} needs"
    try:
        wanted = ids_to_write(stack.wiring, engine, version, stack.family)
    except ProblemsError as error:
        reasons = "; ".join(f"{problem.message} ({problem.fix})" for problem in error.problems)
        return f"no list of ids is right for {server}: {reasons}"
    return f"write {list(wanted.ids)} as {wanted.key} for {server}, or export with --engine-version {version}"


def describe_reading(ids: Sequence[int], read: Sequence[int], server: str, reason: str, target: str) -> str:
    """One sentence: which layers this server reads from these ids, and why this version."""
    layers = describe_layers([boundary - 1 for boundary in read])
    return f"{server} ({reason}) reads {layers} of {target} from {list(ids)}"
