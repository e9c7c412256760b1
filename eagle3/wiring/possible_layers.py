"""Which layers a draft checkpoint without a contract may have been trained on, by its config.json.

Its ids are no single convention: each server version has its rule for them, and each trainer wrote them with one in
mind. Where all of these come to the same layers, that is what they mean; where they do not, only who trained it knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from eagle3.wiring.checkpoint_config import OWN_KEY, layer_ids
from eagle3.wiring.checkpoint_layers import SERVING_ENGINES, ids_of
from eagle3.wiring.conventions import ENGINE_NAMES, LAYER_IDS, NESTED_KEY, Rule
from eagle3.wiring.engines import known_conventions, requested_boundaries, version_range
from eagle3.wiring.layers import check_output_indices, describe_layers, to_output_index

Layers = tuple[int, ...]


def possible_layers(config: Mapping[str, Any], family: str, num_hidden_layers: int) -> dict[Layers, list[str]]:
    """Every reading of the ids: output indices in slot order, and who reads them so.

    Empty where config.json has no ids, or none that lead to layers of this target. Servers that would take default
    layers, whatever the ids or for want of them, say nothing about what the drafter was trained on.

    Args:
        config: the drafter's fields, flat (`eagle3.wiring.layouts.recognise`).
        family: of the target.
        num_hidden_layers: of the target.
    """
    found: dict[Layers, list[str]] = {}
    for layers, reader in _readings(config, family, num_hidden_layers):
        if not any(problem.kind != "layers.unsorted" for problem in check_output_indices(layers, num_hidden_layers)):
            found.setdefault(layers, []).append(reader)
    return found


def _readings(config: Mapping[str, Any], family: str, num_hidden_layers: int) -> Iterator[tuple[Layers, str]]:
    own = config.get(OWN_KEY)
    recorded = own.get("output_indices") if isinstance(own, dict) else None
    if isinstance(recorded, list) and not check_output_indices(recorded, num_hidden_layers):
        yield tuple(recorded), f"{OWN_KEY}.output_indices"  # always output indices
        return
    nested, top = (layer_ids(config, key, "")[0] for key in (NESTED_KEY, LAYER_IDS))
    if nested is not None:
        yield nested, f"trainers that write output indices as {NESTED_KEY}, as SpecForge does"
    if top is not None:
        yield tuple(map(to_output_index, top)), f"trainers that write boundaries as {LAYER_IDS}, as speculators does"
    for engine in SERVING_ENGINES:
        ids, _ = ids_of(config, engine, "")
        if ids is not None:
            for layers, first, last in _spans(ids, engine, family, num_hidden_layers):
                yield layers, f"{ENGINE_NAMES[engine]} {version_range(first, last)}"


def _spans(ids: Layers, engine: str, family: str, num_hidden_layers: int) -> list[tuple[Layers, str, str]]:
    """What an engine's versions capture, with the first and last of neighbours that capture the same."""
    spans: list[tuple[Layers, str, str]] = []
    for convention in known_conventions(engine, family):
        if convention.unsupported or convention.rule is Rule.DEFAULTS:
            continue
        boundaries = sorted(requested_boundaries(ids, convention, num_hidden_layers))
        layers, first = tuple(map(to_output_index, boundaries)), convention.first
        if spans and spans[-1][0] == layers:
            first = spans.pop()[1]
        spans.append((layers, first, convention.last))
    return spans


def describe_possible(possible: Mapping[Layers, list[str]]) -> str:
    """All readings in words."""
    return "; ".join(f"{describe_layers(layers)} by {', '.join(readers)}" for layers, readers in possible.items())
