"""From output indices to each serving engine's numbers, and from a checkpoint's numbers to what a server captures.

The conventions are data in `conventions.py`; here they are looked up and applied. An engine, a version or a target
family that is not in the table is a named error, never a guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eagle3.errors import Problem, ProblemsError, problem_error
from eagle3.wiring.conventions import ANY_FAMILY, BEGINNING, CONVENTIONS, ENGINE_NAMES, UNREADABLE, Convention, Rule
from eagle3.wiring.layers import LayerWiring, default_boundaries, describe_layers, to_output_index
from eagle3.wiring.sglang_table import IDS_READ_SINCE
from eagle3.wiring.version import Version as Version

PROBE = "ask the running server: eagle3 wiring probe --server URL"


@dataclass(frozen=True)
class EngineIds:
    """What to write into a checkpoint's config.json.

    Attributes:
        engine, version: what it was worked out for.
        key: dotted key of config.json.
        ids: the engine's numbers, in slot order.
    """

    engine: str
    version: str
    key: str
    ids: tuple[int, ...]


def newest_known(engine: str) -> str:
    """The newest version whose convention was read.

    Raises:
        ProblemsError: kind `engine.unknown`.
    """
    return str(max(Version(convention.last) for convention in _of_engine(engine)))


def known_conventions(engine: str, family: str) -> list[Convention]:
    """Every version range of this engine that is known for this target family, oldest first; may be empty.

    Raises:
        ProblemsError: kind `engine.unknown`.
    """
    found = [convention for convention in _of_engine(engine) if convention.family in (family, ANY_FAMILY)]
    return sorted(found, key=lambda convention: Version(convention.first))


def find_convention(engine: str, version: str | None, family: str) -> Convention:
    """The convention of one engine version (default: the newest known) for one target family.

    Raises:
        ProblemsError: kinds `engine.unknown`, `engine.version_unknown`, `engine.version_malformed`,
            `engine.family_unknown`, `engine.unsupported`, `engine.unreadable`.
    """
    wanted = Version(version if version is not None else newest_known(engine))
    server = f"{ENGINE_NAMES[engine]} {wanted}"
    candidates = known_conventions(engine, family)
    if not candidates:
        families = ", ".join(sorted({convention.family for convention in _of_engine(engine)}))
        message = f"its layer ids are not known for target family {family!r}, only for {families}"
        fix = f"use one of these, add its convention and source to eagle3/wiring, or {PROBE}"
        raise problem_error(server, "engine.family_unknown", message, fix)
    for convention in candidates:
        if Version(convention.first) <= wanted <= Version(convention.last):
            if convention.unsupported:
                raise problem_error(server, "engine.unsupported", convention.unsupported, _other_versions(candidates))
            return convention
    message = f"its layer ids are not known for target family {family!r}: nobody has read this version's rule"
    fix = f"{_other_versions(candidates)}, read that version's rule and add it, or {PROBE}"
    raise problem_error(server, "engine.version_unknown", message, fix)


def version_range(first: str, last: str) -> str:
    """E.g. `0.5.10 to 0.5.12.post1`, or one version."""
    if first == BEGINNING:
        return f"up to {last}"
    return first if first == last else f"{first} to {last}"


def ids_to_write(wiring: LayerWiring, engine: str, version: str | None, family: str) -> EngineIds:
    """The numbers that make this engine version capture exactly these layers (default version: the newest known).

    Raises:
        ProblemsError: as `find_convention`, and `engine.embedding`, `engine.last_layer`, `engine.inexpressible`,
            `engine.ids_ignored` for layers that this engine cannot be told to capture. CUDA graphs that ignore the
            ids are no reason, since they can be switched off: see `graphs_difference`.
    """
    convention = find_convention(engine, version, family)
    wanted = version if version is not None else newest_known(engine)
    server = f"{ENGINE_NAMES[engine]} {wanted}"
    if problems := _unreachable(wiring, convention, Version(wanted), family):
        raise ProblemsError(problems)
    for ids in (wiring.output_indices, wiring.boundaries):
        if requested_boundaries(ids, convention, wiring.num_hidden_layers) == wiring.boundaries:
            return EngineIds(engine, wanted, convention.key, ids)
    message = f"cannot be told to capture boundaries {list(wiring.boundaries)}: it reads ids as {convention.rule.value}"
    fix = "train on other layers, or serve with another version"
    raise problem_error(server, "engine.inexpressible", message, fix)


def boundaries_read(
    ids: Sequence[int], engine: str, version: str | None, family: str, num_hidden_layers: int
) -> tuple[int, ...]:
    """The boundaries that a server captures for these ids: ascending, and without those that its loop never visits.

    Raises:
        ProblemsError: as `find_convention`.
    """
    convention = find_convention(engine, version, family)
    requested = requested_boundaries(ids, convention, num_hidden_layers)
    last = num_hidden_layers if convention.last_layer else num_hidden_layers - 1
    return tuple(sorted({boundary for boundary in requested if 0 <= boundary <= last}))


def output_indices_of(
    numbers: Sequence[int], numbering: str, num_hidden_layers: int, family: str, sglang_version: str | None = None
) -> tuple[int, ...]:
    """The output indices that someone's layer numbers mean, in slot order; not checked any further.

    Args:
        numbers: as they were written.
        numbering: `output_index`, `boundary`, or `sglang`, which captures in ascending order whatever the list's.
        sglang_version: for `sglang`; a version must be named, since two of them may read one list differently.

    Raises:
        ProblemsError: as `find_convention`; kinds `layers.numbering`, `wiring.never_captured`.
    """
    match numbering:
        case "output_index":
            return tuple(numbers)
        case "boundary":
            return tuple(map(to_output_index, numbers))
    if numbering != "sglang" or sglang_version is None:
        message = f"{numbering!r} without a version does not say which layers {list(numbers)} are"
        fix = "name the version, or number the layers as output_index or boundary"
        raise problem_error("numbering", "layers.numbering", message, fix)
    captured = boundaries_read(numbers, "sglang", sglang_version, family, num_hidden_layers)
    if len(captured) != len(numbers):
        message = f"SGLang {sglang_version} captures {len(captured)} of the {len(numbers)} layers {list(numbers)}"
        raise problem_error("layers", "wiring.never_captured", message, "check the numbers, and the version")
    return tuple(map(to_output_index, captured))


def requested_boundaries(ids: Sequence[int], convention: Convention, num_hidden_layers: int) -> tuple[int, ...]:
    """What the engine's rule makes of the ids, in their order, reachable or not."""
    match convention.rule:
        case Rule.OUTPUT_INDEX:
            shift = 1
        case Rule.BOUNDARY:
            shift = 0
        case Rule.OUTPUT_INDEX_IF_FIRST_IS_1:
            shift = 1 if ids and ids[0] == 1 else 0
        case Rule.BOUNDARY_IF_LAST_IS_N:
            shift = 0 if ids and max(ids) == num_hidden_layers else 1
        case Rule.DEFAULTS:
            return default_boundaries(num_hidden_layers)
    return tuple(value + shift for value in ids)


def graphs_difference(boundaries: Sequence[int], convention: Convention, num_hidden_layers: int) -> str | None:
    """In words, what CUDA graphs of this version capture, if not these boundaries; None where they follow the ids."""
    defaults = default_boundaries(num_hidden_layers)
    if not convention.graphs_ignore_ids or tuple(boundaries) == defaults:
        return None
    layers = describe_layers([boundary - 1 for boundary in defaults])
    return f"its CUDA graphs capture {layers}, whatever the ids (sglang PR 22836, fixed in 0.5.11)"


def reads_ids(engine: str, version: Version) -> bool:
    """Whether this version reads layer ids at all."""
    return engine != "sglang" or version >= Version(IDS_READ_SINCE)


def _other_versions(candidates: Sequence[Convention]) -> str:
    ranges = [version_range(item.first, item.last) for item in candidates if not item.unsupported]
    return f"use a known version: {', '.join(ranges)}" if ranges else "use another engine"


def _of_engine(engine: str) -> list[Convention]:
    if engine in UNREADABLE:
        raise problem_error(engine, "engine.unreadable", f"its layer ids are not known: {UNREADABLE[engine]}", PROBE)
    found = [convention for convention in CONVENTIONS if convention.engine == engine]
    if not found:
        known = ", ".join(sorted({convention.engine for convention in CONVENTIONS}))
        raise problem_error("engine", "engine.unknown", f"{engine!r} is not known, only {known}", "use one of these")
    return found


def _unreachable(wiring: LayerWiring, convention: Convention, version: Version, family: str) -> list[Problem]:
    server, problems = f"{ENGINE_NAMES[convention.engine]} {version}", []
    if 0 in wiring.boundaries and not convention.embedding:
        later = [other for other in known_conventions(convention.engine, family) if other.embedding]
        fix = "train without -1" + (f", or serve with {later[0].first} or newer" if later else "")
        message = f"cannot capture the embedding for target family {family!r}"
        problems.append(Problem(server, "engine.embedding", message, fix))
    if wiring.num_hidden_layers in wiring.boundaries and not convention.last_layer:
        message = f"cannot capture the last layer's output for target family {family!r}"
        fix = f"train on layers up to {wiring.num_hidden_layers - 2}"
        problems.append(Problem(server, "engine.last_layer", message, fix))
    if not reads_ids(convention.engine, version):
        defaults = default_boundaries(wiring.num_hidden_layers)
        if wiring.boundaries != defaults:
            message = f"captures boundaries {list(defaults)}, whatever the ids"
            fix = f"serve with {IDS_READ_SINCE} or newer, or train on the default layers"
            problems.append(Problem(server, "engine.ids_ignored", message, fix))
    return problems
