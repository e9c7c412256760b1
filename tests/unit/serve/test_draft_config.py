from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle3.draft.config import DraftConfig, RopeConfig
from eagle3.draft.rope import inverse_frequencies
from eagle3.errors import ProblemsError
from eagle3.serve.draft_config import draft_config_from_exported, exported_config
from eagle3.wiring.engines import ids_to_write
from eagle3.wiring.layers import LayerWiring

from .cases import kinds, make_target_config

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def make_config(outputs: int = 3, **values: Any) -> DraftConfig:
    return DraftConfig.from_target(make_target_config(), outputs, **{"draft_vocab_size": 8, "head_dim": 6, **values})


def written(config: DraftConfig, context_length: int = 8192, version: str = "0.5.23") -> dict[str, Any]:
    wiring = LayerWiring(tuple(range(1, config.num_aux + 1)), 12)
    ids = ids_to_write(wiring, "sglang", version, "llama")
    return json.loads(json.dumps(exported_config(config, ids, wiring, context_length, "bfloat16")))


@pytest.mark.parametrize(
    "config",
    [
        make_config(),
        make_config(norm_output=True),
        make_config(fc_norm=True),
        make_config(norm_before_fc=True, outputs=4),
        make_config(outputs=4),
        make_config(rope=RopeConfig("linear", 1e4, 4.0)),
        make_config(rope=RopeConfig(**{**LLAMA3, "rope_theta": 5e5})),
    ],
)
def test_config_reads_back_as_the_same_drafter(config: DraftConfig) -> None:
    assert draft_config_from_exported(written(config), "config.json") == config


def test_transformers_reads_the_shape_and_the_type() -> None:
    config = make_config()
    read = LlamaConfig.from_dict(written(config))
    assert (read.hidden_size, read.intermediate_size, read.head_dim) == (16, 24, 6)
    assert (read.num_attention_heads, read.num_key_value_heads, read.num_hidden_layers) == (4, 2, 1)
    assert (read.vocab_size, read.draft_vocab_size, read.rms_norm_eps) == (32, 8, 1e-5)
    assert read.dtype == torch.bfloat16 and read.tie_word_embeddings is False
    assert not read.attention_bias and not read.mlp_bias and not hasattr(read, "target_hidden_size")


def test_transformers_refuses_heads_that_do_not_divide_the_width_and_so_does_the_drafter() -> None:
    with pytest.raises(StrictDataclassClassValidationError, match="not a multiple"):
        LlamaConfig.from_dict(written(make_config()) | {"num_attention_heads": 6})
    with pytest.raises(ProblemsError, match="does not divide hidden_size"):
        make_config(num_attention_heads=6)


@pytest.mark.parametrize("layout", ["old", "new"])
def test_fault_20_exported_rope_gives_the_trainers_frequencies(layout: str) -> None:
    theta = 500000.0
    old = {"rope_theta": theta, "rope_scaling": LLAMA3}
    new = {"rope_theta": None, "rope_parameters": {**LLAMA3, "rope_theta": theta}}
    target = make_target_config(**(old if layout == "old" else new))
    config = DraftConfig.from_target(target, 3, draft_vocab_size=8, head_dim=128)
    assert config.rope.rope_theta == theta
    read = LlamaConfig.from_dict(written(config, context_length=131072))
    served = LlamaRotaryEmbedding(read).inv_freq.double()
    trained = inverse_frequencies(config.rope, 128)
    assert torch.allclose(served, trained, rtol=1e-6, atol=0)
    unscaled = inverse_frequencies(RopeConfig(rope_theta=theta), 128)
    assert not torch.allclose(served, unscaled, rtol=1e-2, atol=0)


def test_fault_20_a_scaling_kind_the_drafter_lacks_is_an_error() -> None:
    target = make_target_config(rope_scaling={"rope_type": "yarn", "factor": 64.0})
    with pytest.raises(ProblemsError, match="yarn"):
        DraftConfig.from_target(target, 3, draft_vocab_size=8, head_dim=6)


@pytest.mark.parametrize(("own", "served", "expected"), [(2048, 8192, 8192), (8192, 2048, 8192)])
def test_context_is_never_below_the_served_one(own: int, served: int, expected: int) -> None:
    config = make_config(max_position_embeddings=own)
    assert written(config, served)["max_position_embeddings"] == expected


def test_options_are_written_where_the_server_reads_them() -> None:
    options = {"norm_output": True, "fc_norm": True, "norm_before_fc": True}
    expected = options | {"num_aux_hidden_states": 4}
    assert written(make_config(outputs=4, **options)).items() >= expected.items()
    assert not expected.keys() & written(make_config()).keys()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"target_hidden_size": 16}, "target_hidden_size"),
        ({"draft_vocab_size": None}, "draft_vocab_size"),
        ({"fc_norm": "yes"}, "fc_norm"),
        ({"use_aux_norm": True}, "use_aux_norm"),
        ({"rope_scaling": "x"}, "rope_scaling"),
        ({"eagle3": {"exported_for": {}, "output_indices": None, "context_length": 1}}, "output_indices"),
    ],
)
def test_an_edited_config_is_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ProblemsError, match=named):
        draft_config_from_exported({**written(make_config()), **change}, "config.json")


def test_missing_keys_are_all_named() -> None:
    config = written(make_config())
    del config["rope_theta"], config["head_dim"], config["torch_dtype"]
    with pytest.raises(ProblemsError) as caught:
        draft_config_from_exported(config, "config.json")
    assert [problem.message for problem in caught.value.problems] == [
        "head_dim is missing", "torch_dtype is missing", "rope_theta is missing",
    ]  # fmt: skip


def test_a_config_of_somebody_else_is_refused() -> None:
    with pytest.raises(ProblemsError) as caught:
        draft_config_from_exported({"architectures": ["LlamaForCausalLM"]}, "config.json")
    assert kinds(caught.value) == ["export.foreign"]
