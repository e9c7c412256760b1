from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.errors import ProblemsError
from eagle3.wiring.layers import (
    LayerWiring,
    check_output_indices,
    compare_layers,
    default_output_indices,
    describe_layers,
    parse_layers,
)
from tests.unit.wiring.cases import kinds


@st.composite
def wirings(draw: st.DrawFn, max_layers: int = 64) -> LayerWiring:
    layers = draw(st.integers(1, max_layers))
    indices = draw(st.sets(st.integers(-1, layers - 1), min_size=1, max_size=5))
    return LayerWiring(tuple(sorted(indices)), layers)


def test_the_three_numbers_of_kimis_layers() -> None:
    wiring = LayerWiring([2, 30, 58], 61)  # type: ignore[arg-type]

    assert wiring.output_indices == (2, 30, 58)
    assert wiring.boundaries == (3, 31, 59)
    assert wiring.transformers_indices == (3, 31, 59)
    assert wiring.num_aux == 3


def test_the_embedding_is_boundary_zero() -> None:
    assert LayerWiring((-1, 2), 8).boundaries == (0, 3)


def test_transformers_has_no_index_for_the_raw_output_of_the_last_layer() -> None:
    with pytest.raises(ProblemsError, match=r"layers\.post_norm"):
        _ = LayerWiring((2, 60), 61).transformers_indices


@given(wirings())
def test_boundaries_round_trip(wiring: LayerWiring) -> None:
    assert LayerWiring.from_boundaries(wiring.boundaries, wiring.num_hidden_layers) == wiring


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([2, 30, 61], "layers.out_of_range"),
        ([2, 30, 30], "layers.duplicate"),
        ([30, 2, 58], "layers.unsorted"),
        ([-2, 2, 30], "layers.negative"),
        ([], "layers.count"),
        ("2,30,58", "layers.type"),
        (None, "layers.type"),
        ([2, 30.0, 58], "layers.type"),
        ([2, True, 58], "layers.type"),
        ([[2, 30, 58]], "layers.type"),
        (["2", "30", "58"], "layers.type"),
        ({2, 30, 58}, "layers.type"),
    ],
)
def test_each_kind_of_wrong_list_is_one_named_error(values: object, kind: str) -> None:
    assert kinds(check_output_indices(values, 61)) == [kind]
    with pytest.raises(ProblemsError, match=kind.replace(".", r"\.")):
        LayerWiring(values, 61)  # type: ignore[arg-type]


def test_every_fault_of_a_list_is_reported_at_once() -> None:
    found = kinds(check_output_indices([61, -2, 3, 3], 61, expected_count=3))

    assert found == ["layers.negative", "layers.out_of_range", "layers.duplicate", "layers.unsorted", "layers.count"]


def test_a_wrong_count_says_what_was_expected() -> None:
    assert check_output_indices([], 61)[0].message == "has 0 layers, expected at least 1"
    assert check_output_indices([2], 61, expected_count=3)[0].message == "has 1 layers, expected 3"
    assert check_output_indices([2, 30, 58], 61, expected_count=3) == []


@pytest.mark.parametrize("layers", [0, -1, True, 61.0, "61", None])
def test_a_wrong_number_of_layers_is_named(layers: object) -> None:
    assert kinds(check_output_indices([0], layers)) == ["layers.type"]  # type: ignore[arg-type]


@given(st.lists(st.integers(-4, 12), max_size=5), st.integers(1, 10))
def test_a_list_is_accepted_exactly_if_it_ascends_within_the_target(values: list[int], layers: int) -> None:
    good = bool(values) and values == sorted(set(values)) and values[0] >= -1 and values[-1] < layers

    assert (check_output_indices(values, layers) == []) == good


@pytest.mark.parametrize("layers", range(7))
def test_fault_22_shallow_targets_have_no_default_layers(layers: int) -> None:
    with pytest.raises(ProblemsError, match=r"layers\.shallow"):
        default_output_indices(layers)


@given(st.integers(7, 200))
def test_default_layers_are_the_boundaries_that_the_engines_default_to(layers: int) -> None:
    assert LayerWiring(default_output_indices(layers), layers).boundaries == (2, layers // 2, layers - 3)


@pytest.mark.parametrize(
    ("found", "name"),
    [
        ((2, 30, 58), None),
        ((1, 29, 57), "one_early"),
        ((3, 31, 59), "one_late"),
        ((-1, 2, 30, 58), "embedding_added"),
        ((30, 2, 58), "permuted"),
        ((2, 30), "other_layers"),
        ((1, 30, 58), "other_layers"),
        ((-1, 30, 58), "other_layers"),
    ],
)
def test_differences_are_named(found: tuple[int, ...], name: str | None) -> None:
    difference = compare_layers((2, 30, 58), found)

    assert (difference[0] if difference else None) == name


def test_a_dropped_embedding_is_named() -> None:
    difference = compare_layers((-1, 2, 30), (2, 30))

    assert difference == ("embedding_dropped", "the embedding is missing")


def test_layers_in_words() -> None:
    assert describe_layers((-1,)) == "the embedding"
    assert describe_layers((4,)) == "the output of layer 4"
    assert describe_layers((-1, 2, 30)) == "the embedding and the outputs of layers 2, 30"
    assert describe_layers(()) == "no layer"


def test_layers_are_parsed_from_text() -> None:
    assert parse_layers("-1, 2,30") == (-1, 2, 30)
    for text in ("", "2;30", "a", "2,,3", "1.5"):
        with pytest.raises(ProblemsError, match=r"layers\.type"):
            parse_layers(text)
