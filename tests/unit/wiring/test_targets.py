from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle3.errors import ProblemsError
from eagle3.wiring.targets import (
    KNOWN_TARGETS,
    config_digest,
    family_of_model_type,
    served_context,
    target_facts,
    text_config,
)

TEXT = {
    "model_type": "kimi_k2",
    "num_hidden_layers": 61,
    "hidden_size": 64,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}
NESTED = {"model_type": "kimi_k25", "text_config": TEXT, "vision_config": {"hidden_size": 32}}


def write(folder: Path, config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_facts_of_a_multimodal_target_come_from_its_text_config(tmp_path: Path) -> None:
    facts = target_facts(write(tmp_path / "tiny", NESTED))

    assert (facts.name, facts.family) == ("tiny", "kimi_k25")
    assert (facts.num_hidden_layers, facts.hidden_size, facts.vocab_size) == (61, 64, 512)
    assert facts == target_facts(tmp_path / "tiny" / "config.json")


def test_a_known_name_needs_no_folder() -> None:
    assert target_facts("Kimi-K2.5") == KNOWN_TARGETS["kimi-k2.5"]
    assert target_facts("kimi-k2.5").num_hidden_layers == 61


def test_the_known_targets_are_as_published() -> None:
    shapes = {
        name: (
            facts.family,
            facts.num_hidden_layers,
            facts.hidden_size,
            facts.vocab_size,
            facts.context_length,
            facts.config_digest,
        )
        for name, facts in KNOWN_TARGETS.items()
    }

    assert shapes == {
        "kimi-k2.5": ("kimi_k25", 61, 7168, 163840, 262144, None),
        "deepseek-v3": ("deepseek", 61, 7168, 129280, 163840, None),
        "llama-3.1-8b": ("llama", 32, 4096, 128256, 131072, None),
        "qwen3-8b": ("qwen3", 36, 4096, 151936, 40960, None),
        "smollm2-135m": ("llama", 30, 576, 49152, 8192, None),
    }


def test_an_unknown_name_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ProblemsError, match=r"target\.unknown.*smollm2-135m"):
        target_facts("kimi-k3")


def test_an_unknown_model_type_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ProblemsError, match=r"target\.model_type"):
        target_facts(write(tmp_path / "t", TEXT | {"model_type": "mamba"}))
    with pytest.raises(ProblemsError, match=r"target\.model_type"):
        target_facts(write(tmp_path / "t", TEXT | {"model_type": ["llama"]}))


@pytest.mark.parametrize("value", ["61", 61.0, True, None, [61], 0, -1])
@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings"])
def test_a_wrong_size_is_one_error_that_names_it(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(ProblemsError) as caught:
        target_facts(write(tmp_path / "t", TEXT | {key: value}))

    (problem,) = caught.value.problems
    assert problem.kind == "target.config"
    assert key in problem.message


@pytest.mark.parametrize("content", ["[]", "null", "{", "", "\ufeff{}", '"text"', "[" * 100_000, "1" * 5000])
def test_a_broken_config_is_one_named_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content, encoding="utf-8")

    with pytest.raises(ProblemsError) as caught:
        target_facts(tmp_path)

    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].kind.startswith("file.")


def test_kimi_and_deepseek_are_two_families() -> None:
    assert family_of_model_type("kimi_k25") == "kimi_k25"
    assert {family_of_model_type(name) for name in ("kimi_k2", "deepseek_v2", "deepseek_v3")} == {"deepseek"}


def test_the_digest_ignores_bookkeeping_nulls_and_key_order() -> None:
    digest = config_digest(NESTED)

    assert digest == config_digest(TEXT)
    assert digest == config_digest(dict(reversed(TEXT.items())))
    noise = {"transformers_version": "5.24", "torch_dtype": "float32", "use_cache": True, "head_dim": None}
    assert digest == config_digest(TEXT | noise)


@pytest.mark.parametrize(
    "field",
    """_attn_implementation _commit_hash _name_or_path architectures attn_implementation auto_map dtype name_or_path
    output_attentions output_hidden_states return_dict torch_dtype transformers_version use_cache""".replace(
        "\n", ""
    ).split(),
)
def test_the_digest_ignores_what_changes_no_number(field: str) -> None:
    assert config_digest(TEXT | {field: "x"}) == config_digest(TEXT)


@pytest.mark.parametrize("change", [{"hidden_size": 65}, {"rope_theta": 1e4}, {"model_type": "llama"}])
def test_the_digest_sees_what_the_target_computes(change: dict[str, Any]) -> None:
    assert config_digest(TEXT | change) != config_digest(TEXT)


def test_the_text_config_of_a_text_model_is_itself() -> None:
    assert text_config(TEXT) == TEXT


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        (None, 4096),
        ({"rope_type": "linear", "factor": 4}, 16384),
        ({"rope_type": "llama3", "factor": 8}, 4096),
        ({"rope_type": "yarn", "factor": 64, "original_max_position_embeddings": 4096}, 4096),
        ("nonsense", 4096),
        ({"factor": "4"}, 4096),
    ],
)
def test_the_served_context_is_what_sglang_derives(rope: object, context: int) -> None:
    assert served_context(TEXT | {"rope_scaling": rope}) == context
    assert served_context(TEXT | {"rope_parameters": rope}) == context
