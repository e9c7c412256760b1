"""What a server would capture for a draft checkpoint's layer ids, compared with the layers it was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle3.errors import Problem, ProblemsError, problem_error
from eagle3.wiring.checkpoint_config import OWN_KEY, exported_for, layer_ids
from eagle3.wiring.conventions import ENGINE_NAMES, LAYER_IDS, Convention
from eagle3.wiring.engines import Version, find_convention, ids_to_write, newest_known, requested_boundaries
from eagle3.wiring.layers import EMBEDDING, LayerWiring, compare_layers, describe_layers

SERVING_ENGINES = ("sglang", "vllm")


def version_to_check(config: Mapping[str, Any], engine: str, engine_version: str | None) -> tuple[str, str]:
    """The version to check against, and in words why: the one asked for, else the one that config.json says it was
    exported for, else the newest known.

    Raises:
        ProblemsError: kinds `engine.unknown`, `engine.version_malformed`.
    """
    if engine not in SERVING_ENGINES:
        message = f"{engine!r} does not serve draft checkpoints, only {', '.join(SERVING_ENGINES)}"
        raise problem_error("engine", "engine.unknown", message, "use one of these")
    recorded = exported_for(config, engine)
    if engine_version is not None:
        version, reason = engine_version, "as asked"
    elif recorded is not None:
        version, reason = recorded, "config.json says it was exported for it"
    else:
        version, reason = newest_known(engine), "the newest known"
    return str(Version(version)), reason


def check_layers(
    config: Mapping[str, Any], wiring: LayerWiring, family: str, engine: str, version: str, where: str
) -> list[Problem]:
    """Layer ids that make this server capture anything but `wiring`.

    Kinds: `layer_ids.*`; `wiring.one_early`, `wiring.one_late`, `wiring.embedding_added`,
    `wiring.embedding_dropped`, `wiring.other_layers`; `wiring.permuted`; `wiring.never_captured`.

    Raises:
        ProblemsError: as `find_convention`.
    """
    convention = find_convention(engine, version, family)
    ids, problems = layer_ids(config, convention.key, where)
    if ids is None:
        return problems
    server, fix = f"{ENGINE_NAMES[engine]} {version}", _what_to_write(wiring, engine, version, family)
    requested = requested_boundaries(ids, convention, wiring.num_hidden_layers)
    problems = [
        Problem(where, "wiring.never_captured", f"id {value} of {convention.key} {list(ids)} {reason} in {server}", fix)
        for value, boundary in zip(ids, requested, strict=True)
        if (reason := _why_never_captured(value, boundary, convention, wiring.num_hidden_layers))
    ]
    if list(requested) != sorted(requested):
        message = f"{convention.key} {list(ids)} is not ascending: {server} captures in ascending order, so the slots "
        problems.append(Problem(where, "wiring.permuted", message + "would not be in the order listed", fix))
    read = [boundary - 1 for boundary in sorted(requested) if 0 <= boundary <= wiring.num_hidden_layers]
    if difference := compare_layers(wiring.output_indices, read):
        recorded = exported_for(config, engine)
        note = f" (exported for {ENGINE_NAMES[engine]} {recorded})" if recorded not in (None, version) else ""
        message = (
            f"{convention.key} {list(ids)}{note} makes {server} read {describe_layers(read)}; the drafter was trained "
            f"on {describe_layers(wiring.output_indices)}: {difference[1]}"
        )
        problems.append(Problem(where, f"wiring.{difference[0]}", message, fix))
    return problems


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


def _why_never_captured(value: int, boundary: int, convention: Convention, num_hidden_layers: int) -> str:
    if boundary == 0 and not convention.embedding:
        return "is the embedding, which cannot be captured for this target"
    if boundary == num_hidden_layers and not convention.last_layer:
        return "is the last layer's output, which is never visited for this target"
    if not 0 <= boundary <= num_hidden_layers:
        return "is no layer of the target" + (" (the embedding is id 0)" if value == EMBEDDING else "")
    return ""


def _what_to_write(wiring: LayerWiring, engine: str, version: str, family: str) -> str:
    server = f"{ENGINE_NAMES[engine]} {version}"
    try:
        wanted = ids_to_write(wiring, engine, version, family)
    except ProblemsError as error:
        reasons = "; ".join(f"{problem.message} ({problem.fix})" for problem in error.problems)
        return f"no list of ids is right for {server}: {reasons}"
    return f"write {list(wanted.ids)} as {wanted.key} for {server}, or export with --engine-version {version}"
