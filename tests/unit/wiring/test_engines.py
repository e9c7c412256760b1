from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.errors import ProblemsError
from eagle3.wiring.conventions import CONVENTIONS, Convention
from eagle3.wiring.engines import (
    Version,
    boundaries_read,
    find_convention,
    ids_to_write,
    known_conventions,
    newest_known,
    requested_boundaries,
)
from eagle3.wiring.layers import LayerWiring
from tests.unit.wiring.cases import wiring
from tests.unit.wiring.test_layers import wirings

SERVABLE = [convention for convention in CONVENTIONS if not convention.unsupported]


def written(*output_indices: int, version: str | None, family: str, engine: str = "sglang") -> list[int]:
    return list(ids_to_write(wiring(*output_indices), engine, version, family).ids)


def refusal(*output_indices: int, version: str | None, family: str, engine: str = "sglang") -> list[str]:
    with pytest.raises(ProblemsError) as caught:
        ids_to_write(wiring(*output_indices), engine, version, family)
    return [problem.kind for problem in caught.value.problems]


def sglang_loop(boundaries: Sequence[int], layers: int, after_the_last: bool) -> tuple[int, ...]:
    """What a loop of the form `if i in layers_to_capture` captures, in the order in which it captures."""
    return tuple(boundary for boundary in range(layers + after_the_last) if boundary in boundaries)


@pytest.mark.parametrize("version", ["0.5.11", "0.5.12", "0.5.12.post1"])
def test_kimi_needs_output_indices_up_to_sglang_0_5_12_post1(version: str) -> None:
    assert written(2, 30, 58, version=version, family="kimi_k25") == [2, 30, 58]


@pytest.mark.parametrize("version", ["0.5.13", "0.5.13.post1", "0.5.16", "0.5.23", None])
def test_kimi_needs_boundaries_from_sglang_0_5_13(version: str | None) -> None:
    assert written(2, 30, 58, version=version, family="kimi_k25") == [3, 31, 59]


@pytest.mark.parametrize("version", ["0.5.9", "0.5.8", "0.4.10.post2", "0.1"])
def test_kimi_is_refused_before_sglang_0_5_10(version: str) -> None:
    assert refusal(2, 30, 58, version=version, family="kimi_k25") == ["engine.unsupported"]


def test_vllm_takes_boundaries_under_the_top_level_key() -> None:
    ids = ids_to_write(wiring(2, 30, 58), "vllm", None, "kimi_k25")

    assert (ids.key, list(ids.ids), ids.version) == ("eagle_aux_hidden_state_layer_ids", [3, 31, 59], "0.33.0")


def test_layers_that_start_with_1_have_one_list_for_old_and_new_deepseek_servers() -> None:
    assert written(1, 29, 57, version="0.5.12", family="deepseek") == [1, 29, 57]
    assert written(1, 29, 57, version="0.5.23", family="deepseek") == [1, 29, 57]


def test_the_same_list_means_other_layers_to_an_old_and_a_new_server() -> None:
    assert boundaries_read([2, 30, 58], "sglang", "0.5.12.post1", "kimi_k25", 61) == (3, 31, 59)
    assert boundaries_read([2, 30, 58], "sglang", "0.5.13", "kimi_k25", 61) == (2, 30, 58)


def test_llama_and_qwen_always_take_output_indices() -> None:
    for family in ("llama", "qwen2", "qwen3", "qwen3_moe", "minimax_m2", "glm4_moe"):
        for version in ("0.5.11", "0.5.12.post1", "0.5.23"):
            assert written(0, 2, 30, version=version, family=family) == [0, 2, 30]


def test_fault_22_outputs_2_4_5_are_exported_as_3_5_6_and_2_4_5_is_one_block_early() -> None:
    ids = ids_to_write(LayerWiring((2, 4, 5), 8), "sglang", "0.5.23", "deepseek").ids

    assert ids == (3, 5, 6)
    assert boundaries_read((2, 4, 5), "sglang", "0.5.23", "deepseek", 8) == LayerWiring((1, 3, 4), 8).boundaries


def test_fault_22_a_list_of_boundaries_that_starts_with_1_cannot_be_written_for_deepseek() -> None:
    assert refusal(0, 2, 30, version="0.5.13", family="deepseek") == ["engine.inexpressible"]
    assert refusal(0, 2, 30, version="0.5.23", family="glm4_moe_lite") == ["engine.inexpressible"]
    assert written(0, 2, 30, version="0.5.12", family="deepseek") == [0, 2, 30]
    assert written(-1, 0, 2, version="0.5.23", family="deepseek") == [0, 1, 3]


def test_the_embedding_only_where_the_server_can_capture_it() -> None:
    assert written(-1, 2, version="0.5.22", family="llama") == [-1, 2]
    assert refusal(-1, 2, version="0.5.21", family="llama") == ["engine.embedding"]
    assert written(-1, 2, version="0.5.11", family="qwen3") == [-1, 2]
    assert written(-1, 2, version="0.5.14", family="kimi_k25") == [0, 3]
    assert refusal(-1, 2, version="0.5.13.post1", family="kimi_k25") == ["engine.embedding"]
    assert refusal(-1, 2, version="0.5.12", family="deepseek") == ["engine.embedding"]
    assert refusal(-1, 2, version=None, family="kimi_k25", engine="vllm") == ["engine.embedding"]
    assert written(-1, 2, version=None, family="llama", engine="vllm") == [0, 3]


def test_the_last_layer_only_where_the_server_visits_it() -> None:
    for family in ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek", "kimi_k25"):
        assert refusal(2, 60, version=None, family=family) == ["engine.last_layer"]
        assert written(2, 60, version=None, family=family, engine="vllm") == [3, 61]
    assert refusal(2, 60, version="0.5.16", family="gpt_oss") == ["engine.last_layer"]
    assert boundaries_read(written(2, 60, version="0.5.17", family="gpt_oss"), "sglang", "0.5.17", "gpt_oss", 61) == (
        3,
        61,
    )


def test_both_ends_out_of_reach_are_both_reported() -> None:
    assert refusal(-1, 60, version="0.5.16", family="llama") == ["engine.embedding", "engine.last_layer"]


def test_gpt_oss_reads_a_list_with_the_last_boundary_as_boundaries_from_0_5_17() -> None:
    assert boundaries_read([3, 24], "sglang", "0.5.17", "gpt_oss", 24) == (3, 24)
    assert boundaries_read([3, 23], "sglang", "0.5.17", "gpt_oss", 24) == (4, 24)
    assert boundaries_read([3, 23], "sglang", "0.5.16", "gpt_oss", 24) == (4,)


def test_minus_one_is_never_reached_by_a_new_deepseek_server() -> None:
    assert boundaries_read([-1, 2, 30, 58], "sglang", "0.5.23", "kimi_k25", 61) == (2, 30, 58)


@pytest.mark.parametrize(
    ("engine", "version", "family", "kind"),
    [
        ("tgi", None, "llama", "engine.unknown"),
        ("sglang", "0.5.24", "llama", "engine.version_unknown"),
        ("sglang", "0.4.4.post1", "llama", "engine.unsupported"),
        ("sglang", "0.5.12.post2", "deepseek", "engine.version_unknown"),
        ("sglang", "1.0", "kimi_k25", "engine.version_unknown"),
        ("vllm", "0.32.0", "llama", "engine.version_unknown"),
        ("sglang", None, "mamba", "engine.family_unknown"),
        ("vllm", None, "glm4_moe", "engine.family_unknown"),
        ("sglang", "latest", "llama", "engine.version_malformed"),
        ("sglang", "0.5.13rc1", "llama", "engine.version_malformed"),
        ("sglang", "0.5.13.dev3", "llama", "engine.version_malformed"),
        ("sglang", "", "llama", "engine.version_malformed"),
        ("sglang", "9" * 5000, "llama", "engine.version_malformed"),
    ],
)
def test_what_is_not_known_is_a_named_error(engine: str, version: str | None, family: str, kind: str) -> None:
    with pytest.raises(ProblemsError) as caught:
        find_convention(engine, version, family)

    assert [problem.kind for problem in caught.value.problems] == [kind]


def test_versions_order_by_number_and_post_release() -> None:
    texts = ["0.5.9", "0.5.10", "0.5.12", "0.5.12.post1", "0.5.13", "0.5.13.post1", "0.6"]

    assert sorted(map(Version, reversed(texts))) == list(map(Version, texts))
    assert Version("0.33") == Version("0.33.0")
    assert Version("0.5.16+cu129") == Version("v0.5.16")


@pytest.mark.parametrize("text", [None, 5, 0.5, b"0.5.12", ["0.5.12"]])
def test_a_version_that_is_no_text_is_malformed(text: object) -> None:
    with pytest.raises(ProblemsError, match=r"engine\.version_malformed"):
        Version(text)  # type: ignore[arg-type]


def test_the_newest_known_versions() -> None:
    assert newest_known("sglang") == "0.5.23"
    assert newest_known("vllm") == "0.33.0"


def test_every_convention_names_its_source_and_its_ranges_do_not_overlap() -> None:
    for convention in CONVENTIONS:
        assert ".py" in convention.source
        assert convention.read.startswith("20")
    for engine in {convention.engine for convention in CONVENTIONS}:
        for family in {convention.family for convention in CONVENTIONS if convention.engine == engine}:
            ranges = known_conventions(engine, family)
            for earlier, later in pairwise(ranges):
                assert Version(earlier.first) <= Version(earlier.last) < Version(later.first)


@given(st.sampled_from(SERVABLE), wirings())
def test_what_is_written_is_what_is_read(convention: Convention, layers: LayerWiring) -> None:
    family = convention.family if convention.family != "*" else "llama"
    for version in (convention.first, convention.last):
        try:
            ids = ids_to_write(layers, convention.engine, version, family).ids
        except ProblemsError as error:
            reasons = {problem.kind for problem in error.problems}
            ends = {"engine.embedding", "engine.last_layer", "engine.ids_ignored"}
            assert reasons == {"engine.inexpressible"} or reasons <= ends
            assert (
                "engine.ids_ignored" in reasons
                or layers.boundaries[0] in (0, 1)
                or layers.boundaries[-1] == layers.num_hidden_layers
            )
            continue
        requested = requested_boundaries(ids, convention, layers.num_hidden_layers)
        captured = sglang_loop(requested, layers.num_hidden_layers, convention.last_layer)
        assert captured == layers.boundaries
        read = boundaries_read(ids, convention.engine, version, family, layers.num_hidden_layers)
        assert read == layers.boundaries


@given(st.sampled_from(SERVABLE), st.lists(st.integers(-3, 12), min_size=1, max_size=5), st.integers(1, 10))
def test_boundaries_read_is_what_the_servers_loop_captures(convention: Convention, ids: list[int], layers: int) -> None:
    family = convention.family if convention.family != "*" else "llama"
    requested = requested_boundaries(ids, convention, layers)

    read = boundaries_read(ids, convention.engine, convention.last, family, layers)

    assert read == sglang_loop(requested, layers, convention.last_layer)
