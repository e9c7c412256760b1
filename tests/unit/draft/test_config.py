"""Shapes, the published drafter's size, and rotary settings carried over or refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from eagle3.draft.config import DraftConfig, RopeConfig, TTTSettings
from eagle3.draft.model import DraftModel
from eagle3.draft.rope import inverse_frequencies
from eagle3.errors import ProblemsError

from .cases import make_config

# Kimi-K2.5's text config, as published, and the drafter of docs/training-step.md.
KIMI = {
    "hidden_size": 7168, "intermediate_size": 18432, "num_attention_heads": 64, "num_key_value_heads": 64,
    "vocab_size": 163840, "rms_norm_eps": 1e-5, "max_position_embeddings": 262144, "kv_lora_rank": 512,
    "rope_theta": 50000.0, "rope_scaling": {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096},
}  # fmt: skip
LLAMA = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "vocab_size": 100, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512, "rope_theta": 500000.0,
}  # fmt: skip
SCALING = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip


def kinds(error: pytest.ExceptionInfo[ProblemsError]) -> list[str]:
    return [problem.kind for problem in error.value.problems]


def test_kimi_drafter_has_2_62b_parameters_of_which_1_45b_train() -> None:
    config = DraftConfig.from_target(
        KIMI, intermediate_size=40960, num_attention_heads=56, num_key_value_heads=8, head_dim=128,
        draft_vocab_size=32000, rope=RopeConfig(rope_theta=50000.0),
    )  # fmt: skip
    with torch.device("meta"):
        model = DraftModel(config)
    total = sum(value.numel() for value in model.parameters())
    trainable = sum(value.numel() for value in model.trainable_state().values())
    assert (round(total / 1e9, 2), round(trainable / 1e9, 2)) == (2.62, 1.45)
    assert config.parameter_counts() == {"total": total, "trainable": trainable}


def test_more_than_one_layer_is_refused_with_the_reason() -> None:
    with pytest.raises(ProblemsError, match="depend on other chains") as error:
        make_config(num_hidden_layers=2)
    assert kinds(error) == ["draft.num_hidden_layers"]


def test_every_wrong_shape_is_listed() -> None:
    with pytest.raises(ProblemsError) as error:
        make_config(num_key_value_heads=3, head_dim=7, draft_vocab_size=25, num_aux=1, target_hidden_size=8)
    assert sorted(kinds(error)) == [
        "draft.draft_vocab_size",
        "draft.head_dim",
        "draft.num_aux",
        "draft.num_key_value_heads",
        "draft.target_hidden_size",
    ]
    with pytest.raises(ProblemsError) as error:
        make_config(hidden_size=0, intermediate_size=2.0, rms_norm_eps=0.0)
    assert kinds(error) == ["draft.hidden_size", "draft.intermediate_size", "draft.rms_norm_eps"]


def test_shape_follows_the_target_unless_overridden() -> None:
    config = DraftConfig.from_target(LLAMA, num_aux=4, draft_vocab_size=None, intermediate_size=32)
    assert (config.head_dim, config.num_key_value_heads, config.draft_vocab_size) == (8, 8, 100)
    assert (config.target_hidden_size, config.num_aux, config.intermediate_size) == (64, 4, 32)
    assert config.rope == RopeConfig(rope_theta=500000.0)
    assert DraftConfig.from_target({**LLAMA, "head_dim": 16}).head_dim == 16


def test_latent_attention_target_gives_no_head_width() -> None:
    config = DraftConfig.from_target({**LLAMA, "kv_lora_rank": 4, "head_dim": 2})
    assert config.head_dim == 8


def test_heads_that_do_not_divide_the_width_are_refused_as_a_server_would() -> None:
    with pytest.raises(ProblemsError) as error:
        make_config(num_attention_heads=6)
    assert kinds(error) == ["draft.num_attention_heads"]


def test_what_the_target_does_not_say_is_asked_for() -> None:
    with pytest.raises(ProblemsError) as error:
        DraftConfig.from_target({key: LLAMA[key] for key in ("hidden_size", "rope_theta", "vocab_size")})
    expected = ["intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"]
    assert kinds(error) == [f"draft.{name}" for name in (*expected, "max_position_embeddings")]


def test_dict_round_trip_is_strict() -> None:
    config = make_config(norm_output=True, fc_norm=True, rope=RopeConfig("llama3", 100.0, **SCALING))
    values = config.to_dict()
    assert DraftConfig.from_dict(values) == config
    del values["head_dim"]
    with pytest.raises(ProblemsError) as error:
        DraftConfig.from_dict({**values, "headdim": 4})
    assert kinds(error) == ["draft.head_dim", "draft.headdim"]
    with pytest.raises(ProblemsError, match="rope_base"):
        DraftConfig.from_dict({**config.to_dict(), "rope": {**dataclasses.asdict(config.rope), "rope_base": 1}})
    with pytest.raises(ProblemsError, match="expected a mapping"):
        DraftConfig.from_dict({**config.to_dict(), "rope": None})


def test_fault_20_both_config_layouts_give_the_same_rope() -> None:
    old = RopeConfig.from_hf({"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **SCALING}})
    new = RopeConfig.from_hf({"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **SCALING}})
    both = RopeConfig.from_hf(
        {
            "rope_theta": 500000.0,
            "rope_scaling": {"type": "llama3", "rope_type": "llama3", **SCALING},
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **SCALING},
        }
    )
    assert old == new == both == RopeConfig("llama3", 500000.0, **SCALING)
    assert RopeConfig.from_hf(old.to_hf()) == old
    plain = RopeConfig.from_hf({"rope_theta": 5e4, "rope_scaling": None})
    assert plain == RopeConfig.from_hf({"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}})
    assert plain == RopeConfig.from_hf({"rope_parameters": {"rope_theta": 5e4}})
    assert plain.to_hf() == {"rope_theta": 5e4, "rope_scaling": None} and RopeConfig.from_hf(plain.to_hf()) == plain


@pytest.mark.parametrize(
    ("name", "value"),
    [("factor", 16.0), ("low_freq_factor", 2.0), ("high_freq_factor", 8.0), ("original_max_position_embeddings", 4096)],
)
def test_fault_20_each_scaling_value_reaches_the_frequencies(name: str, value: float) -> None:
    base = RopeConfig("llama3", 500000.0, **SCALING)
    changed = RopeConfig.from_hf(dataclasses.replace(base, **{name: value}).to_hf())
    assert not torch.equal(inverse_frequencies(base, 128), inverse_frequencies(changed, 128))


def test_fault_20_unknown_scaling_is_refused_and_names_the_setting() -> None:
    for layout in (
        KIMI,
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 64.0}},
        {"rope_theta": 1e4, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}},
    ):
        with pytest.raises(ProblemsError, match=r"set draft\.rope in the training config") as error:
            RopeConfig.from_hf(layout)
        assert kinds(error) == ["draft.rope.kind"]
    with pytest.raises(ProblemsError, match=r"set draft\.rope"):
        DraftConfig.from_target({**LLAMA, "rope_scaling": {"type": "yarn", "factor": 2.0}})


def test_fault_20_fields_are_never_dropped_in_silence() -> None:
    with pytest.raises(ProblemsError, match="partial_rotary_factor"):
        RopeConfig.from_hf({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}})
    assert RopeConfig.from_hf({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}}).rope_theta == 1e4
    with pytest.raises(ProblemsError, match="no rope_theta"):
        RopeConfig.from_hf({"rope_scaling": {"type": "linear", "factor": 2.0}})
    with pytest.raises(ProblemsError, match="rope_scaling says"):
        RopeConfig.from_hf({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0},
                            "rope_parameters": {"rope_type": "linear", "factor": 4.0}})  # fmt: skip
    with pytest.raises(ProblemsError) as error:
        RopeConfig("llama3", 0.0, factor=8.0, low_freq_factor=float("nan"))
    assert kinds(error) == ["draft.rope.value", "draft.rope.value", "draft.rope.missing", "draft.rope.missing"]
    with pytest.raises(ProblemsError, match="does not use factor"):
        RopeConfig(factor=2.0)


@pytest.mark.parametrize("values", [{"steps": 0}, {"steps": 2.0}, {"decay": 0.0}, {"decay": 1.5}, {"chain_rule": "x"}])
def test_ttt_settings_refuse_what_cannot_be(values: dict[str, object]) -> None:
    with pytest.raises(ProblemsError, match=f"draft.ttt.{next(iter(values))}"):
        TTTSettings(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("scaling", [{"rope_type": {}}, {"type": ["linear"]}, "linear", [1], 3])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_a_rope_of_the_wrong_json_type_is_a_problem(key: str, scaling: object) -> None:
    with pytest.raises(ProblemsError, match=r"draft\.rope\."):
        RopeConfig.from_hf({"rope_theta": 10000.0, key: scaling})
