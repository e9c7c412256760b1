"""The conventions' tables against a second reading of the releases, written as what began when."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from eagle3.errors import ProblemsError
from eagle3.wiring.conventions import CONVENTIONS, UNREADABLE, Convention, Rule
from eagle3.wiring.engines import (
    Version,
    find_convention,
    graphs_difference,
    ids_to_write,
    known_conventions,
    newest_known,
    requested_boundaries,
)
from eagle3.wiring.layers import LayerWiring
from eagle3.wiring.targets import family_of_model_type

RELEASES = re.findall(
    r"\S+",
    """
0.4.4.post2 0.4.4.post3 0.4.4.post4 0.4.5 0.4.5.post1 0.4.5.post2 0.4.5.post3 0.4.6 0.4.6.post1 0.4.6.post2
0.4.6.post3 0.4.6.post4 0.4.6.post5 0.4.7 0.4.7.post1 0.4.8 0.4.8.post1 0.4.9 0.4.9.post1 0.4.9.post2
0.4.9.post3 0.4.9.post4 0.4.9.post5 0.4.9.post6 0.4.10 0.4.10.post1 0.4.10.post2 0.5.1 0.5.1.post1 0.5.1.post2
0.5.1.post3 0.5.2 0.5.3 0.5.3.post1 0.5.3.post2 0.5.3.post3 0.5.4 0.5.4.post1 0.5.4.post2 0.5.4.post3 0.5.5
0.5.5.post1 0.5.5.post2 0.5.5.post3 0.5.6 0.5.6.post1 0.5.6.post2 0.5.7 0.5.8 0.5.8.post1 0.5.9 0.5.10
0.5.10.post1 0.5.11 0.5.12 0.5.12.post1 0.5.13 0.5.13.post1 0.5.14 0.5.15 0.5.15.post1 0.5.16 0.5.17 0.5.18
0.5.19 0.5.20 0.5.21 0.5.22 0.5.23
""",
)
NEVER = "99"


@dataclass(frozen=True)
class Since:
    """The first SGLang release with each ability of a target family."""

    supported: str
    embedding: str = NEVER
    last_layer: str = NEVER
    until: str = NEVER
    other_rule: tuple[str, Rule] = (NEVER, Rule.OUTPUT_INDEX)


CONDITIONAL = ("0.5.13", Rule.OUTPUT_INDEX_IF_FIRST_IS_1)
SGLANG = {
    "llama": Since("0.4.4.post2", "0.5.22"),
    "llama4": Since("0.4.9", "0.5.21"),
    "qwen2": Since("0.5.2", "0"),
    "qwen2_moe": Since("0.5.2", "0"),
    "qwen2_5_vl": Since("0.5.2", "0"),
    "qwen3": Since("0.4.9", "0"),
    "qwen3_moe": Since("0.4.9", "0"),
    "qwen3_next": Since("0.5.9", "0"),
    "qwen3_vl": Since("0.5.11", "0"),
    "qwen3_5": Since("0.5.22", "0"),
    "minimax_m2": Since("0.5.5.post1", "0.5.11"),
    "minimax_m3": Since("0.5.18", "0", "0.5.23"),
    "gpt_oss": Since("0.5.1", "0.5.17", "0.5.17", other_rule=("0.5.17", Rule.BOUNDARY_IF_LAST_IS_N)),
    "glm4_moe": Since("0.5.5", "0.5.21"),
    "longcat_flash": Since("0.5.6", "0.5.21"),
    "bailing_moe": Since("0.5.9", "0"),
    "exaone_moe": Since("0.5.9", "0.5.22"),
    "apertus": Since("0.5.3", "0.5.22"),
    "gemma3": Since("0.5.12", "0", "0", until="0.5.17"),
    "gemma4": Since("0.5.12", "0", "0"),
    "mimo_v2": Since(NEVER),
    "deepseek": Since("0.5.4.post2", "0.5.14", other_rule=CONDITIONAL),
    "glm_moe_dsa": Since("0.5.9", "0.5.14", other_rule=CONDITIONAL),
    "glm4_moe_lite": Since("0.5.8", "0.5.21", other_rule=CONDITIONAL),
    "kimi_k25": Since("0.5.10", "0.5.14", other_rule=CONDITIONAL),
}
VLLM_FAMILIES = {
    "llama", "llama4", "qwen2", "qwen2_5_vl", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_5", "minimax_m2",
    "gpt_oss", "gemma4", "apertus", "deepseek", "kimi_k25",
}  # fmt: skip


def has(version: str, since: str) -> bool:
    return Version(version) >= Version(since)


def test_the_families_are_those_that_were_read() -> None:
    assert {row.family for row in CONVENTIONS if row.engine == "sglang"} == SGLANG.keys()
    assert {row.family for row in CONVENTIONS if row.engine == "vllm"} == VLLM_FAMILIES
    assert len(RELEASES) == 69


@pytest.mark.parametrize("family", SGLANG)
def test_every_sglang_release_reads_as_it_was_read(family: str) -> None:
    since = SGLANG[family]
    for version in RELEASES:
        if not has(version, since.supported) or has(version, since.until):
            with pytest.raises(ProblemsError, match=r"engine\.unsupported"):
                find_convention("sglang", version, family)
            continue
        row = find_convention("sglang", version, family)
        rule = since.other_rule[1] if has(version, since.other_rule[0]) else Rule.OUTPUT_INDEX
        assert row.rule == (rule if has(version, "0.4.9") else Rule.DEFAULTS), version
        assert (row.embedding, row.last_layer) == (has(version, since.embedding), has(version, since.last_layer))
        assert row.graphs_ignore_ids == (not has(version, "0.5.11")), version
        assert row.key == "eagle_config.eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize("family", SGLANG)
def test_the_ranges_of_a_family_leave_no_known_release_out_and_say_where_they_were_read(family: str) -> None:
    rows = known_conventions("sglang", family)

    assert (rows[0].first, rows[-1].last) == ("0", newest_known("sglang"))
    for version in RELEASES:
        assert sum(Version(row.first) <= Version(version) <= Version(row.last) for row in rows) == 1
    for row in rows:
        assert row.source.startswith("sglang/srt/models/") and row.read == "2026-11-29"


def test_what_unsupported_families_lack_is_said() -> None:
    def reason(family: str, version: str) -> str:
        with pytest.raises(ProblemsError) as caught:
            find_convention("sglang", version, family)
        return caught.value.problems[0].message

    assert reason("llama", "0.4.4") == "there is no EAGLE-3 up to SGLang 0.4.4.post1"
    assert reason("qwen3_5", "0.5.9") == "its layer loop captures nothing up to SGLang 0.5.21"
    assert reason("minimax_m3", "0.5.17") == "its layer loop captures nothing up to SGLang 0.5.17"
    assert reason("kimi_k25", "0.5.9").startswith("its target class has no set_eagle3_layers_to_capture up to")
    assert "without the residual" in reason("gemma3", "0.5.17")


@pytest.mark.parametrize("family", sorted(VLLM_FAMILIES))
def test_vllm_reads_boundaries_and_both_ends_but_for_deepseeks_embedding(family: str) -> None:
    row = find_convention("vllm", None, family)

    assert (row.rule, row.key, row.first, row.last) == (
        Rule.BOUNDARY,
        "eagle_aux_hidden_state_layer_ids",
        "0.33.0",
        "0.33.0",
    )
    assert row.last_layer and row.embedding == (family not in ("deepseek", "kimi_k25"))
    assert "(V1)" in row.source and "(V2)" in row.source and row.source.endswith(".py")
    assert not row.graphs_ignore_ids and not row.unsupported


@pytest.mark.parametrize(("engine", "last_layer"), [("speculators", True), ("transformers", False)])
def test_libraries_number_boundaries(engine: str, last_layer: bool) -> None:
    row = find_convention(engine, None, "any")

    assert (row.rule, row.embedding, row.last_layer, row.unsupported) == (Rule.BOUNDARY, True, last_layer, "")


def test_an_engine_that_nobody_could_read_is_never_guessed() -> None:
    for call in (lambda: find_convention("tensorrt_llm", "1.2.1", "llama"), lambda: newest_known("tensorrt_llm")):
        with pytest.raises(ProblemsError) as caught:
            call()
        (problem,) = caught.value.problems
        assert problem.kind == "engine.unreadable"
        assert UNREADABLE["tensorrt_llm"] in problem.message
        assert "eagle3 wiring probe --server URL" in problem.fix


@pytest.mark.parametrize(("version", "family"), [("0.5.24", "llama"), ("0.5.12", "mamba")])
def test_what_is_not_known_offers_the_probe(version: str, family: str) -> None:
    with pytest.raises(ProblemsError, match="eagle3 wiring probe --server URL"):
        find_convention("sglang", version, family)


@pytest.mark.parametrize(
    ("version", "boundaries", "differs"),
    [
        ("0.5.4.post2", (3, 31, 59), True),
        ("0.5.10.post1", (3, 31, 59), True),
        ("0.5.10.post1", (2, 30, 58), False),
        ("0.5.11", (3, 31, 59), False),
    ],
)
def test_cuda_graphs_up_to_0_5_10_post1_hold_the_default_layers(
    version: str, boundaries: tuple[int, ...], differs: bool
) -> None:
    said = graphs_difference(boundaries, find_convention("sglang", version, "deepseek"), 61)

    assert (said is not None and "the outputs of layers 1, 29, 57" in said) == differs


def test_the_first_releases_capture_the_default_layers_whatever_the_ids() -> None:
    assert ids_to_write(LayerWiring((1, 15, 28), 32), "sglang", "0.4.8", "llama").ids == (1, 15, 28)
    with pytest.raises(ProblemsError, match=r"engine\.ids_ignored"):
        ids_to_write(LayerWiring((1, 15, 29), 32), "sglang", "0.4.8", "llama")


@pytest.mark.parametrize(
    ("model_type", "family"),
    [
        *((name, name) for name in SGLANG if name not in ("deepseek", "minimax_m3")),
        ("llama4_text", "llama4"), ("qwen3_5_text", "qwen3_5"), ("qwen3_5_moe", "qwen3_5"),
        ("qwen3_5_moe_text", "qwen3_5"), ("minimax_m3_vl", "minimax_m3"), ("gemma3_text", "gemma3"),
        ("gemma4_text", "gemma4"), ("bailing_moe_v2", "bailing_moe"), ("mimo_v2_flash", "mimo_v2"),
        ("deepseek_v2", "deepseek"), ("deepseek_v3", "deepseek"), ("deepseek_v32", "deepseek"), ("kimi_k2", "deepseek"),
    ],
)  # fmt: skip
def test_each_model_type_belongs_to_a_family_that_was_read(model_type: str, family: str) -> None:
    assert family_of_model_type(model_type) == family
    assert known_conventions("sglang", family)


@pytest.mark.parametrize("row", CONVENTIONS, ids=lambda row: f"{row.engine}-{row.family}-{row.first}")
def test_no_ids_are_no_boundaries_but_for_releases_that_ignore_ids(row: Convention) -> None:
    assert requested_boundaries((), row, 32) == ((2, 16, 29) if row.rule == Rule.DEFAULTS else ())
